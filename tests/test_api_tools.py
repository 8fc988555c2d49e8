"""Tools and reasoning over HTTP, with the real `openai` client; the fake model says what it is told to."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_fake import CHAT, HELLO, error_of, post, running

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather", "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running() as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def saying(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "smollm2-135m", "messages": [{"role": "user", "content": "say: " + text}], **fields}


def streamed(client: openai.OpenAI, request: dict[str, Any]) -> tuple[dict[str, Any], str, int]:
    """The message that a stream's deltas build, its finish reason and the number of chunks with arguments."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish, num_argument_chunks = "", 0
    for i, chunk in enumerate(client.chat.completions.create(**request, stream=True)):
        delta = chunk.choices[0].delta
        assert (delta.role == "assistant") == (i == 0)
        message["content"] += delta.content or ""
        message["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content", "")
        for call in delta.tool_calls or []:
            assert call.function is not None
            num_argument_chunks += 1
            if call.index == len(message["tool_calls"]):
                assert call.id and call.type == "function" and call.function.name
                message["tool_calls"].append([call.function.name, ""])
            message["tool_calls"][call.index][1] += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    return message, finish, num_argument_chunks


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [(CALL, None, [("get_weather", '{"city": "Köln"}')]),
     (f"Let me see.\n{CALL}\n{NOW}", "Let me see.", [("get_weather", '{"city": "Köln"}'), ("now", "{}")]),
     ("No call: <tool_cal", "No call: <tool_cal", [])],
)  # fmt: skip
def test_calls_are_read_streaming_or_not(client: openai.OpenAI, text: str, content: Any, calls: Any) -> None:
    request = saying(text, tools=TOOLS)
    choice = client.chat.completions.create(**request).choices[0]
    found = choice.message.tool_calls or []
    assert choice.message.content == content
    assert [(c.function.name, c.function.arguments) for c in found] == calls  # type: ignore[union-attr]
    assert len({c.id for c in found}) == len(calls) and all(c.id.startswith("call_") for c in found)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    message, finish, num_chunks = streamed(client, request)
    assert (message["content"], finish) == (content or "", choice.finish_reason)
    assert [tuple(call) for call in message["tool_calls"]] == calls
    assert num_chunks >= 5 * bool(calls), "arguments come in pieces"


def test_a_call_cut_off_by_the_limit_ends_with_length(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**saying(CALL, tools=TOOLS, max_tokens=60)).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "K'  # type: ignore[index, union-attr]


def test_choice_none_and_no_tools_leave_the_text_alone(client: openai.OpenAI) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = client.chat.completions.create(**saying(CALL, **fields)).choices[0]
        assert choice.message.content == CALL and choice.finish_reason == "stop"
        assert choice.message.tool_calls is None


def test_one_call_at_a_time_when_asked(client: openai.OpenAI) -> None:
    request = saying(f"{CALL}\n{NOW}", tools=TOOLS, parallel_tool_calls=False)
    calls = client.chat.completions.create(**request).choices[0].message.tool_calls
    assert calls is not None and [c.function.name for c in calls] == ["get_weather"]  # type: ignore[union-attr]


def test_tools_calls_and_results_reach_a_template_without_tools(url: str) -> None:
    conversation = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}},
            {"id": "2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "noon"}]},
    ]  # fmt: skip
    reply = post(url, "/tokenize", {"messages": conversation, "tools": TOOLS}).json()
    text = bytes(reply["tokens"]).decode()
    assert text.startswith("system: ") and text.count("<tools>") == 2
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert text.endswith(
        f"user: Weather?\nassistant: {CALL}\n{NOW}\n"
        "user: <tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
    )
    with_system = [{"role": "developer", "content": "Be brief."}, *conversation]
    text = bytes(post(url, "/tokenize", {"messages": with_system, "tools": TOOLS}).json()["tokens"]).decode()
    assert text.startswith("system: Be brief.\n\nYou may call") and text.count("system: ") == 1


def test_the_clients_own_message_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**saying(CALL, tools=TOOLS)).choices[0].message
    assert first.tool_calls is not None
    messages: Any = [*saying(CALL)["messages"], first]
    messages.append({"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "say: It rains."})
    choice = client.chat.completions.create(model="smollm2-135m", messages=messages, tools=TOOLS).choices[0]
    assert "It rains." in (choice.message.content or "")


def test_thoughts_come_apart_from_the_answer(client: openai.OpenAI) -> None:
    text = f"<think>\nKöln, then.\n</think>\n\nHere:\n{CALL}"
    request = saying(text, tools=TOOLS)
    answer = client.chat.completions.create(**request)
    message = answer.choices[0].message
    assert message.model_extra["reasoning_content"] == "Köln, then."  # type: ignore[index]
    assert message.content == "Here:" and len(message.tool_calls or []) == 1
    details = answer.usage.completion_tokens_details  # type: ignore[union-attr]
    assert details and details.reasoning_tokens == len("<think>\nKöln, then.\n</think>".encode())
    joined, finish, _ = streamed(client, request)
    assert (joined["reasoning_content"], joined["content"]) == ("Köln, then.", "Here:")
    assert finish == "tool_calls"


def test_thoughts_that_the_prompt_began_are_told_too(client: openai.OpenAI) -> None:
    request = {"model": "smollm2-135m", "messages": [], "extra_body": {
        "prompt_token_ids": list(b"say: Hm.</think>Yes."),
    }}  # fmt: skip
    assert client.chat.completions.create(**request).choices[0].message.content == "Hm.</think>Yes."  # type: ignore[call-overload]


def test_a_call_by_force_is_hermes_format_and_checked_first(url: str) -> None:
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "string", "pattern": "("}}}]
    body = {"messages": HELLO, "tools": bad, "tool_choice": "required"}
    assert error_of(post(url, CHAT, body), 400)["param"] == "tool_choice"
