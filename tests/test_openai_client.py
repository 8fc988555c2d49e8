"""The official `openai` client, sync and async, through everything it offers for text, on the real model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.server, pytest.mark.model]

MODEL = "smollm2-135m"
TEXT = "The cat sat on the mat. The dog sat on the rug."
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"type": "integer", "maximum": 8}},
    "required": ["name", "legs"], "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {
    "type": "function", "function": {"name": "save", "description": "Save an animal", "parameters": SCHEMA}
}  # fmt: skip


def chat(content: str, **fields: Any) -> dict[str, Any]:
    request = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 24}
    return {"temperature": 0, "seed": 3, **request, **fields}


CASES: dict[str, dict[str, Any]] = {
    "chat": chat("Name a colour."),
    "sampled": chat("Name a colour.", temperature=0.9),
    "choices": chat("Name a colour.", temperature=0.9, n=2),
    "stop": chat("Count from one to ten.", stop=[","], max_tokens=48),
    "logprobs": chat("Name a colour.", logprobs=True, top_logprobs=2, max_tokens=6),
    "prediction": chat(f"Repeat: {TEXT}", prediction={"type": "content", "content": TEXT}),
    "json_schema": chat(
        "Describe a spider as JSON.", max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
    ),
    "tool": chat("Save a spider.", max_tokens=80, tools=[TOOL], tool_choice="required",
                 parallel_tool_calls=False),
}  # fmt: skip


def essence(answer: Any) -> list[Any]:
    """What a whole answer and the parts of a stream must have in common."""
    return [
        (
            choice.message.content or "",
            [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []],
            choice.finish_reason,
            [entry.token for entry in choice.logprobs.content] if choice.logprobs else [],
        )
        for choice in answer.choices
    ]


def joined(chunks: list[Any], n: int) -> list[Any]:
    parts: list[Any] = [["", [], None, []] for _ in range(n)]
    for chunk in chunks:
        for choice in chunk.choices:
            part = parts[choice.index]
            part[0] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    part[1].append((call.function.name, ""))
                name, arguments = part[1][call.index]
                part[1][call.index] = (name, arguments + (call.function.arguments or ""))
            part[2] = choice.finish_reason or part[2]
            part[3] += [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
    return [tuple(part) for part in parts]


def test_sync_and_async_streamed_and_not_with_and_without_drafts_are_the_same(served_model: str) -> None:
    options: Any = {"base_url": served_model + "/v1", "api_key": "none", "max_retries": 0}
    client = openai.OpenAI(**options)
    off = {"extra_body": {"speculation": "off"}}
    whole = {name: client.chat.completions.create(**case) for name, case in CASES.items()}
    wanted = {name: essence(answer) for name, answer in whole.items()}

    async def others() -> None:
        async with openai.AsyncOpenAI(**options) as many:

            async def stream(name: str) -> None:
                chunks = [c async for c in await many.chat.completions.create(**CASES[name], stream=True)]
                assert joined(chunks, CASES[name].get("n", 1)) == wanted[name], name

            async def plain(name: str) -> None:
                assert essence(await many.chat.completions.create(**CASES[name], **off)) == wanted[name], name

            await asyncio.gather(*map(stream, CASES), *map(plain, CASES))

    asyncio.run(others())
    assert all(text for text, *_ in wanted["choices"]) and len(wanted["choices"]) == 2
    assert "," not in wanted["stop"][0][0]
    assert len(wanted["logprobs"][0][3]) == 6
    assert set(json.loads(wanted["json_schema"][0][0])) == {"name", "legs"}
    ((name, arguments),) = wanted["tool"][0][1]
    assert name == "save" and set(json.loads(arguments)) == {"name", "legs"}
    assert wanted["tool"][0][2] == "tool_calls"


def test_text_completions(served_model: str) -> None:
    client = openai.OpenAI(base_url=served_model + "/v1", api_key="none", max_retries=0)
    request: Any = {"model": MODEL, "prompt": ["One, two,", "A, B,"], "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**request, logprobs=1, echo=True)
    texts = ["", ""]
    for chunk in client.completions.create(**request, stream=True, echo=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in whole.choices] == texts
    assert texts[0].startswith("One, two,") and texts[1].startswith("A, B,")
    for choice in whole.choices:
        assert choice.logprobs and choice.logprobs.tokens and choice.logprobs.token_logprobs
        assert "".join(choice.logprobs.tokens).startswith(choice.text)
        assert choice.logprobs.token_logprobs[0] is None  # type: ignore[comparison-overlap]
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**request, suffix="end")
    assert raised.value.param == "suffix"
