"""The HTTP edge, with the real `openai` client over a live server whose engine is a fake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine import MAX_MODEL_LEN, TEXT
from live_fake import CHAT, HELLO, HTTP, error_of, num_running, post, running, wait_for_none_running


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running() as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


# --- answers -------------------------------------------------------------------------------------


def test_a_chat_completion_has_the_shape_openai_documents(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=HELLO, temperature=0, max_tokens=19
    )
    assert answer.choices[0].message.content == TEXT[:19].decode()
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None and answer.usage.completion_tokens == 19
    assert answer.usage.prompt_tokens == len("user: Hello\n") == answer.usage.total_tokens - 19
    assert answer.usage.prompt_tokens_details and answer.usage.completion_tokens_details
    assert answer.system_fingerprint and answer.system_fingerprint.startswith("outrider-")


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_joins_to_the_answer_that_is_not_streamed(client: openai.OpenAI, n: int) -> None:
    request: Any = {"model": "smollm2-135m", "messages": HELLO, "max_tokens": 60, "seed": 5, "n": n}
    whole = client.chat.completions.create(**request)
    texts = [""] * n
    finishes: list[Any] = [None] * n
    chunks = list(
        client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            assert (choice.delta.role == "assistant") == (texts[choice.index] == "")
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert not chunks[-1].choices and chunks[-1].usage == whole.usage
    assert len(set(texts)) == n


def test_a_stream_never_splits_a_character(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="smollm2-135m", prompt="x", temperature=0, max_tokens=120, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    assert all("�" not in piece for piece in pieces[:-1])
    assert "".join(pieces).encode()[: len(TEXT)] == TEXT


def test_a_seed_repeats_an_answer_and_a_request_without_one_reports_its_own(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> tuple[str, int]:
        answer = client.completions.create(model="smollm2-135m", prompt="x", max_tokens=30, **more)
        return answer.choices[0].text, answer.model_extra["seed"]  # type: ignore[index]

    text, seed = ask()
    assert ask(seed=seed) == (text, seed)
    other, other_seed = ask()
    assert other_seed != seed and other != text
    assert ask(seed=-3) == ask(seed=-3)


def test_choices_of_one_request_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    two = client.completions.create(model="smollm2-135m", prompt=["a", "b"], max_tokens=30, seed=1, n=2)
    texts = [choice.text for choice in two.choices]
    assert len(set(texts)) == 4 and [choice.index for choice in two.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model="smollm2-135m", prompt="b", max_tokens=30, seed=1)
    assert alone.choices[0].text == texts[2]


def test_stop_strings_end_the_answer_before_them(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=HELLO, temperature=0, stop=["fox", "lazy"], max_tokens=200
    )
    assert answer.choices[0].message.content == "The quick brown "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == "fox"  # type: ignore[index]


def test_logprobs_come_in_the_shape_of_each_api(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="smollm2-135m", messages=HELLO, temperature=0, max_tokens=22, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and [bytes(entry.bytes or []) for entry in content] == [
        bytes([b]) for b in TEXT[:22]
    ]
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    text = client.completions.create(
        model="smollm2-135m", prompt="x", temperature=0, max_tokens=22, logprobs=3
    )
    logprobs = text.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens[:3] == ["T", "h", "e"]  # type: ignore[index]
    assert logprobs.text_offset == [*range(21), 20]  # type: ignore[comparison-overlap]
    assert logprobs.top_logprobs[0] == {"T": -0.5, "a": -1.5, "bytes:\\xc3": -2.5}  # type: ignore[index]
    streamed = client.chat.completions.create(
        model="smollm2-135m",
        messages=HELLO,
        temperature=0,
        max_tokens=22,
        logprobs=True,
        top_logprobs=2,
        stream=True,
    )
    joined = [e for chunk in streamed for e in (chunk.choices[0].logprobs.content or [])]  # type: ignore[union-attr]
    assert joined == content


def test_completions_take_text_ids_and_lists_of_both(client: openai.OpenAI) -> None:
    def ask(prompt: Any) -> list[str]:
        answer = client.completions.create(model="smollm2-135m", prompt=prompt, max_tokens=8, seed=1)
        return [choice.text for choice in answer.choices]

    assert ask("ab") == ask([97, 98]) == ask(["ab"]) == ask([[97, 98]])
    assert ask(["ab", "c"]) == ask([[97, 98], [99]]) == ask("ab") + ask("c")


def test_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    request: Any = {"model": "smollm2-135m", "prompt": "2+2", "temperature": 0, "max_tokens": 3, "echo": True}
    assert client.completions.create(**request).choices[0].text == "2+2The"
    assert "".join(c.choices[0].text for c in client.completions.create(**request, stream=True)) == "2+2The"


def test_an_echo_with_logprobs_has_those_of_the_prompt(client: openai.OpenAI) -> None:
    request: Any = {
        "model": "smollm2-135m", "prompt": ["2+2", "é"], "temperature": 0, "max_tokens": 3, "echo": True,
        "logprobs": 1,
    }  # fmt: skip
    choices = client.completions.create(**request).choices
    found = choices[0].logprobs
    assert found is not None and found.tokens == [*"2+2The"] and found.text_offset == [0, 1, 2, 3, 4, 5]
    assert found.token_logprobs == [None, -3.5, -3.5, -0.5, -0.5, -0.5]
    assert found.top_logprobs == [None, {"a": -0.5, "+": -3.5}, {"a": -0.5, "2": -3.5},
                                  {"T": -0.5}, {"h": -0.5}, {"e": -0.5}]  # fmt: skip
    streams: list[Any] = [[], []]
    for chunk in client.completions.create(**request, stream=True):
        choice = chunk.choices[0]
        streams[choice.index] += zip(choice.logprobs.text_offset, choice.logprobs.token_logprobs, strict=True)  # type: ignore[union-attr, arg-type]
    for choice, streamed in zip(choices, streams, strict=True):
        whole: Any = choice.logprobs
        assert list(zip(whole.text_offset, whole.token_logprobs, strict=True)) == streamed


def test_logprobs_of_the_prompt_come_by_id(url: str) -> None:
    body = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 1}
    answer = post(url, "/v1/completions", body | {"prompt": "ab"}).json()
    best = {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}
    own = {"98": {"logprob": -3.5, "rank": 3, "decoded_token": "b"}}
    assert answer["choices"][0]["prompt_logprobs"] == [None, best | own]
    chat = post(url, CHAT, body | {"messages": HELLO}).json()
    assert len(chat["choices"][0]["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_speculation_is_reported_when_asked_for(url: str) -> None:
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
    assert "speculation" not in post(url, CHAT, body).json()
    answer = post(url, CHAT, body | {"return_speculation": "detailed", "return_token_ids": True}).json()
    assert answer["speculation"]["by_source"] == {
        "ngram": {k: answer["speculation"][k] for k in ("draft_tokens", "accepted_tokens")}
    }
    assert len(answer["choices"][0]["token_sources"]) == 12
    assert "".join(answer["choices"][0]["token_strs"]) == answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["token_ids"] == list(TEXT[:12])
    assert bytes(answer["choices"][0]["prompt_token_ids"]) == b"user: Hello\n"
    header = HTTP.post(url + CHAT, json=body | {"stream": True}, headers={"X-Outrider-Speculation": "1"})
    events = [json.loads(line[6:]) for line in header.text.split("\n\n") if line.startswith("data: {")]
    assert events[-1]["speculation"] == answer["speculation"] and "speculation" not in events[0]


def test_a_stream_tells_the_servers_clock_when_asked_to(url: str) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "temperature": 0, "stream": True}

    def choices(headers: dict[str, str]) -> list[dict[str, Any]]:
        text = HTTP.post(url + CHAT, json=body, headers=headers).text
        return [
            json.loads(line[6:])["choices"][0] for line in text.split("\n\n") if line.startswith("data: {")
        ]

    times = [choice["arrival_time"] for choice in choices({"X-Outrider-Timing": "1"})]
    assert times[0] > 0 and times == sorted(times)
    assert not any("arrival_time" in choice for choice in choices({}))


def test_fields_that_ask_for_nothing_are_no_error(url: str) -> None:
    neutral = {
        "tools": None,
        "tool_choice": "none",
        "functions": [],
        "response_format": {"type": "text"},
        "store": False,
        "n": None,
    }
    assert post(url, CHAT, {"messages": HELLO, "max_tokens": 3, **neutral}).status_code == 200


def test_text_parts_and_all_roles_reach_the_template(url: str) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "T", "tool_call_id": "1"},
    ]
    reply = post(url, "/tokenize", {"messages": messages, "return_token_strs": True}).json()
    assert "".join(reply["token_strs"]) == (
        "system: S\nuser: ab\nassistant: \nuser: <tool_response>\nT\n</tool_response>\n"
    )
    assert reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == MAX_MODEL_LEN


def test_tokenize_and_detokenize_are_inverse(url: str) -> None:
    ids = post(url, "/tokenize", {"prompt": "Grüße"}).json()["tokens"]
    assert post(url, "/detokenize", {"tokens": ids}).json() == {"prompt": "Grüße"}


def test_the_model_is_listed_and_pages_are_there(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]
    assert client.models.retrieve("smollm2-135m").model_extra["max_model_len"] == MAX_MODEL_LEN  # type: ignore[index]
    for path in (
        "/",
        "/docs",
        "/openapi.json",
        "/health",
        "/ping",
        "/version",
        "/metrics",
        "/v1/speculation",
    ):
        assert HTTP.get(url + path).status_code == 200, path
    schemas = HTTP.get(url + "/openapi.json").json()["components"]["schemas"]
    assert "logit_bias" in schemas["ChatCompletionRequest"]["properties"]


def test_metrics_speak_prometheus(url: str) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {
        family.name: family for family in text_string_to_metric_families(HTTP.get(url + "/metrics").text)
    }
    assert all(name.startswith("outrider:") for name in families)
    step = {s.labels.get("le"): s.value for s in families["outrider:step_duration_seconds"].samples}
    assert (step["0.1"], step["1.0"], step["+Inf"]) == (3, 5, 6)
    success = families["outrider:request_success"].samples
    assert {s.labels["finished_reason"]: s.value for s in success} == {"stop": 2, "length": 0}


# --- many clients, leaving clients ------------------------------------------------------------------


def test_fifty_clients_at_once_each_get_their_own_answer(url: str) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.completions.create(
            model="smollm2-135m", prompt=f"prompt {i}", max_tokens=40, seed=i, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(one(client, i) for i in range(50)))
            assert [await one(client, i) for i in range(0, 50, 10)] == together[::10]
        return together

    assert len(set(asyncio.run(everyone()))) == 50


@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_a_stream_frees_its_request(url: str, client: openai.OpenAI, n: int) -> None:
    stream = client.completions.create(model="smollm2-135m", prompt="slow", n=n, stream=True)
    next(iter(stream))
    assert num_running(url) == n
    stream.close()
    wait_for_none_running(url)


def test_a_client_that_leaves_without_a_stream_frees_its_request(url: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(url + CHAT, json={"messages": [{"role": "user", "content": "slow"}]}, timeout=0.3)
    wait_for_none_running(url)


def test_requests_can_be_aborted_by_id(url: str, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="smollm2-135m", prompt="slow", stream=True)
    chunks = iter(stream)
    first = next(chunks)
    assert post(url, "/v1/abort_requests", {"request_ids": [first.id, "cmpl-0"]}).json() == {
        "aborted": [first.id]
    }
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "abort"
    error_of(post(url, "/v1/abort_requests", {}), 400)
    wait_for_none_running(url)
