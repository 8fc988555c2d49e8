"""Whatever is wrong with a request: one clear error in one shape, and the server goes on answering."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, FakeTokenizer
from hypothesis import given
from hypothesis import strategies as st
from live_fake import CHAT, HELLO, HTTP, error_of, post, running
from starlette.requests import Request

from outrider.entrypoints import http_edge
from outrider.entrypoints.errors import ApiError
from outrider.entrypoints.prepare import Limits, Preparer
from outrider.entrypoints.protocol import ChatCompletionRequest, CompletionRequest, parse


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running() as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


LONG = "x" * (1 << 20)
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BAD_CHATS: list[tuple[str, Any, str | None, str]] = [
    ("malformed JSON", b'{"messages": [', None, "not valid JSON"),
    ("not an object", b"[]", None, "must be a JSON object"),
    ("empty body", b"", None, "not valid JSON"),
    ("invalid UTF-8", b'{"messages": "\xff"}', None, "not valid UTF-8: byte 0xff at offset 14"),
    ("lone surrogate", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "not valid JSON"),
    ("deep nesting", b"[" * 100_000, None, "recursion limit"),
    ("wrong type", chat(temperature="hot"), "temperature", "valid number; got 'hot'"),
    ("bool for int", chat(max_tokens=True), "max_tokens", "valid integer"),
    ("NaN", b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature", "finite"),
    ("unknown field", chat(temprature=1), "temprature", "did you mean 'temperature'"),
    ("field of a later version", chat(functions=[{}]), "functions", "not supported by this version"),
    ("tool without a name", chat(tools=[{"type": "function", "function": {}}]), "tools[0].function.name",
     "required"),
    ("tool of another kind", chat(tools=[{"type": "custom"}]), "tools[0].type", "'custom' is not supported"),
    ("choice without tools", chat(tool_choice="required"), "tool_choice", "needs tools"),
    ("parallel without tools", chat(parallel_tool_calls=True), "parallel_tool_calls", "needs tools"),
    ("choice of no tool", chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}}),
     "tool_choice", "no tool 'g'; tools has f"),
    ("two of a name", chat(tools=TOOLS + TOOLS), "tools", "two functions have the name 'f'"),
    ("a user's calls", {"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]},
     "messages[0].tool_calls", "only an assistant"),
    ("two forms", chat(tools=TOOLS, tool_choice="required", guided_regex="a"), "guided_regex", "exclude"),
    ("bad schema", chat(tools=[{"type": "function", "function": {
        "name": "f", "parameters": {"type": "nothing"}}}], tool_choice="required"), "tool_choice", "grammar"),
    ("json mode", chat(response_format={"type": "json"}), "response_format.type", "not supp"),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0].type", "'image_url' is not supported"),
    ("unknown role", {"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role",
     "'system', 'developer', 'user'"),
    ("no messages", {}, "messages", "at least one message"),
    ("empty messages", {"messages": []}, "messages", "at least one message"),
    ("messages and ids", chat(prompt_token_ids=[1]), "prompt_token_ids", "exclude"),
    ("max_tokens 0", chat(max_tokens=0), "max_tokens", "at least 1, got 0"),
    ("max_tokens -1", chat(max_tokens=-1), "max_tokens", "at least 1, got -1"),
    ("max_tokens huge", chat(max_tokens=10**9), "max_tokens", "12 tokens and the model"),
    ("max_tokens beyond integers", chat(max_tokens=10**30), "max_tokens", "too large"),
    ("both limits", chat(max_tokens=1, max_completion_tokens=1), "max_tokens", "exclude"),
    ("prompt_logprobs with stream", chat(prompt_logprobs=1, stream=True), "prompt_logprobs", "exclude"),
    ("prompt_logprobs too many", chat(prompt_logprobs=21), "prompt_logprobs", "at most 20, got 21"),
    ("n too large", chat(n=65), "n", "at most 64"),
    ("n zero", chat(n=0), "n", "greater than or equal to 1"),
    ("prompt too long", {"messages": [{"role": "user", "content": "x" * 4000}]}, "messages", "4007 tokens"),
    ("1 MB prompt", {"messages": [{"role": "user", "content": LONG}]}, "messages", f"is {MAX_MODEL_LEN}"),
    ("unknown ids", {"prompt_token_ids": [5, 300]}, "prompt_token_ids", "300 is not in the vocabulary"),
    ("negative id", {"prompt_token_ids": [-5]}, "prompt_token_ids[0]", "greater than or equal to 0"),
    ("empty stop", chat(stop=""), "stop", "empty string"),
    ("long stop", chat(stop="x" * 1025), "stop", "at most 1024 characters"),
    ("long stop in a list", chat(stop=["x" * 1025]), "stop[0]", "at most 1024 characters"),
    ("long salt", chat(cache_salt="x" * 1025), "cache_salt", "at most 1024 characters"),
    ("many biases", chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "at most 1024 items"),
    ("many stops", chat(stop=["a"] * 17), "stop", "at most 16"),
    ("logit_bias key", chat(logit_bias={"hello": 1}), "logit_bias", "must be token ids"),
    ("logit_bias value", chat(logit_bias={"1": 101}), "logit_bias", "less than or equal to 100"),
    ("top_p zero", chat(top_p=0), "top_p", "greater than 0"),
    ("min_tokens", chat(min_tokens=9, max_tokens=8), "min_tokens", "at most max_tokens (8)"),
    ("min_tokens beyond the engine", chat(min_tokens=2**31), "min_tokens", "less than 2147483648"),
    ("top_k beyond the engine", chat(top_k=2**31), "top_k", "less than 2147483648"),
    ("top_logprobs alone", chat(top_logprobs=2), "top_logprobs", "needs logprobs"),
    ("many logprobs", chat(logprobs=True, top_logprobs=21), "top_logprobs", "at most 20"),
    ("stream options", chat(stream_options={}), "stream_options", "needs stream"),
    ("speculation", chat(speculation={"method": "eagle"}), "speculation.method", "'ngram'"),
    ("prediction as text", chat(prediction="Hi"), "prediction", "should be an object"),
    ("prediction of another type", chat(prediction={"type": "text", "content": "a"}), "prediction.type",
     "'text' is not supported; allowed: 'content'"),
    ("prediction without content", chat(prediction={"type": "content"}), "prediction.content", "is required"),
    ("prediction with an image", chat(prediction={"type": "content", "content": [{"type": "image_url"}]}),
     "prediction.content[0].type", "'image_url' is not supported; allowed: 'text'"),
    ("long prediction", chat(prediction={"type": "content", "content": "x" * 4000}), "prediction", "longer"),
    ("1 MB prediction", chat(prediction={"type": "content", "content": LONG}), "prediction", "longer than"),
    ("template", chat(chat_template_kwargs={"fail": 1}), "messages", "told to fail"),
    ("continue a user", chat(continue_final_message=True), "continue_final_message", "'user'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "message"), [c[1:] for c in BAD_CHATS], ids=[c[0] for c in BAD_CHATS]
)
def test_a_bad_chat_request_is_a_400_that_names_the_field(
    url: str, body: Any, param: str | None, message: str
) -> None:
    error = error_of(post(url, CHAT, body), 400)
    assert (
        message in error["message"] and error["param"] == param and error["type"] == "invalid_request_error"
    )
    assert len(error["message"]) < 400
    assert post(url, CHAT, {"messages": HELLO, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"),
     ({"prompt": [[1], []]}, "prompt"),
     ({"prompt": [1, "a"]}, "prompt[0]"), ({"prompt": 5}, "prompt"),
     ({"prompt": "a", "suffix": "b"}, "suffix"),
     ({"prompt": ["a"] * 33, "n": 2}, "n"),
     ({"prompt": "a", "best_of": 2}, "best_of"), ({"prompt": "a", "messages": HELLO}, "messages")],
)  # fmt: skip
def test_a_bad_completion_request_is_a_400_that_names_the_field(url: str, body: Any, param: str) -> None:
    assert error_of(post(url, "/v1/completions", body), 400)["param"] == param


def test_an_unknown_model_is_a_404_for_every_route(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert raised.value.code == "model_not_found" and "smollm2-135m" in raised.value.message
    error_of(HTTP.get(url + "/v1/models/gpt-4"), 404)
    error_of(post(url, "/tokenize", {"model": "gpt-4", "prompt": "x"}), 404)


def test_a_stream_that_cannot_start_has_an_error_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="smollm2-135m", messages=HELLO, max_tokens=0, stream=True)


def test_unknown_routes_and_methods_use_the_common_body(url: str) -> None:
    assert error_of(HTTP.get(url + "/v2/nothing"), 404)["code"] == "route_not_found"
    reply = HTTP.get(url + CHAT)
    error_of(reply, 405)
    assert reply.headers["allow"] == "POST"


def test_a_10_mb_body_is_a_413(url: str) -> None:
    body = b'{"messages": "' + b"x" * 10_000_000 + b'"}'
    error_of(post(url, CHAT, body), 413)

    def pieces() -> Iterator[bytes]:  # no length is declared
        yield from (body[i : i + 65536] for i in range(0, len(body), 65536))

    error_of(HTTP.post(url + CHAT, content=pieces()), 413)


def test_generated_garbage_never_hurts_the_server(url: str) -> None:
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(b"\x00\xff garbage\r\n\r\n")
        head, _, body = sock.recv(1000).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "invalid_http"
    assert HTTP.get(url + "/health").status_code == 200


def test_a_body_that_was_announced_but_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "BODY_TIMEOUT", 0.05)

    async def never() -> Any:
        await asyncio.sleep(60)

    request = Request({"type": "http", "headers": [(b"content-length", b"10")]}, receive=never)
    with pytest.raises(ApiError) as caught:
        asyncio.run(http_edge.read_body(request, 100))
    assert (caught.value.status, caught.value.code) == (408, "body_timeout")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
fields = st.sampled_from([*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, "tools", "x"])


@given(st.dictionaries(fields, values, max_size=3), st.booleans())
def test_whatever_a_body_holds_it_is_a_request_or_an_error_that_names_a_field(
    body: dict[str, Any], chat: bool
) -> None:
    model = ChatCompletionRequest if chat else CompletionRequest
    preparer = Preparer(FakeTokenizer(), Limits("fake", MAX_MODEL_LEN, VOCAB_SIZE, 4, 4), 0)
    try:
        request = parse(model, json.dumps(body).encode())
        prepared = asyncio.run(preparer.chat(request) if chat else preparer.completion(request))  # type: ignore[arg-type]
    except ApiError as error:
        assert error.status in (400, 404) and error.message
        assert error.param is None or error.param.split(".")[0].split("[")[0] in {*body, "messages", "prompt"}
    else:
        assert all(0 <= p.seed < 2**64 for p in prepared.params if p.seed is not None)
