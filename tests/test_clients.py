"""Clients that people use beside OpenAI's own: a chat, a stream and a tool call with each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import TEXT
from live_fake import running

SAID = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

# Their own warnings are theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running() as (address, _):
        yield address + "/v1"


def test_langchain(url: str) -> None:
    openai = pytest.importorskip("langchain_openai")
    chat = openai.ChatOpenAI(base_url=url, api_key="none", model="smollm2-135m", temperature=0, max_tokens=19)
    answer = chat.invoke([("system", "Be brief."), ("human", "Hello")])
    assert answer.content == TEXT[:19].decode()
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 19
    assert "".join(chunk.content for chunk in chat.stream("Hello")) == TEXT[:19].decode()
    called = chat.bind_tools([TOOL], max_tokens=200)
    question = ("human", "say: " + SAID)
    first = called.invoke([question])
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("get_weather", {"city": "Köln"})]
    streamed = None
    for chunk in called.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None and streamed.tool_calls[0]["args"] == {"city": "Köln"}
    result = {"role": "tool", "tool_call_id": first.tool_calls[0]["id"], "content": "say: It rains."}
    assert "It rains." in called.invoke([question, first, result]).content


def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would look for prices on the network
    litellm = pytest.importorskip("litellm")
    request: dict[str, Any] = {
        "model": "openai/smollm2-135m", "api_base": url, "api_key": "none", "temperature": 0,
        "max_tokens": 19, "messages": [{"role": "user", "content": "Hello"}],
    }  # fmt: skip
    answer = litellm.completion(**request)
    assert answer.choices[0].message.content == TEXT[:19].decode()
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 19
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**request, stream=True)]
    assert "".join(pieces) == TEXT[:19].decode()
    request |= {"messages": [{"role": "user", "content": "say: " + SAID}], "max_tokens": 200, "tools": [TOOL]}
    call = litellm.completion(**request).choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Köln"}')
