"""Tools, log-probabilities and mixed requests on the built-in model, over HTTP."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import openai
import pytest
from live_fake import CHAT, post

pytestmark = [pytest.mark.server, pytest.mark.model]

TOOLS: Any = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"], "additionalProperties": False,
        },
    }},
    {"type": "function", "function": {"name": "now", "description": "Get the time"}},
]  # fmt: skip
QUESTION: Any = [{"role": "user", "content": "What is the weather like in Paris, in Celsius?"}]


@pytest.fixture
def client(served_model: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=served_model + "/v1", api_key="none", max_retries=0)


def test_a_required_call_is_a_call_and_the_same_without_speculation(client: openai.OpenAI) -> None:
    request: Any = {
        "model": "smollm2-135m", "messages": QUESTION, "tools": TOOLS, "temperature": 0.8, "seed": 4,
        "max_tokens": 80,
    }  # fmt: skip
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        fields = {"tool_choice": choice, "parallel_tool_calls": False}
        answers = [
            client.chat.completions.create(**request, **fields, extra_body=extra).choices[0]
            for extra in ({}, {"speculation": "off"})
        ]
        calls = [
            [(c.function.name, c.function.arguments) for c in a.message.tool_calls or []] for a in answers
        ]  # type: ignore[union-attr]
        assert calls[0] == calls[1] and len(calls[0]) == 1
        assert answers[0].finish_reason == "tool_calls" and answers[0].message.content is None
        name, arguments = calls[0][0]
        values = json.loads(arguments)
        if choice is named:
            assert name == "get_weather" and set(values) == {"city", "unit"} and values["unit"] in "CF"
        text, names = "", []
        for chunk in client.chat.completions.create(**request, **fields, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                names += [call.function.name] if call.function and call.function.name else []
                text += (call.function.arguments or "") if call.function else ""
        assert (names, text) == ([name], arguments)


def test_results_of_tools_are_answered(client: openai.OpenAI) -> None:
    messages: Any = [*QUESTION]
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=messages, tools=TOOLS, tool_choice="required", max_tokens=80,
        temperature=0, parallel_tool_calls=False,
    )  # fmt: skip
    message = answer.choices[0].message
    assert message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 C, rain"}]
    final = client.chat.completions.create(
        model="smollm2-135m", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=24, temperature=0
    )
    assert final.choices[0].message.content and not final.choices[0].message.tool_calls


def test_logprobs_are_the_same_without_speculation(served_model: str) -> None:
    text = "one two three four five six seven eight. " * 4
    body = {"prompt": text, "temperature": 0, "max_tokens": 24, "logprobs": 4, "return_speculation": True}
    drafted = post(served_model, "/v1/completions", body).json()
    plain = post(served_model, "/v1/completions", body | {"speculation": "off"}).json()
    assert drafted["choices"][0]["logprobs"] == plain["choices"][0]["logprobs"]
    assert drafted["speculation"]["accepted_tokens"] > 0 == plain["speculation"]["draft_tokens"]


def test_scores_of_a_prompt_are_those_its_tokens_had_when_they_were_drawn(served_model: str) -> None:
    body = {"temperature": 0, "logprobs": 3, "return_token_ids": True}
    first = post(
        served_model, "/v1/completions", body | {"prompt": "Once upon a time", "max_tokens": 40}
    ).json()
    choice = first["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    echo = post(served_model, "/v1/completions", body | {"prompt": ids, "max_tokens": 1, "echo": True}).json()
    found = echo["choices"][0]["logprobs"]
    begin = len(choice["prompt_token_ids"])
    assert found["token_logprobs"][0] is None and len(found["tokens"]) == len(ids) + 1
    wanted = choice["logprobs"]
    assert found["token_logprobs"][begin:-1] == pytest.approx(wanted["token_logprobs"], abs=1e-5)
    for ours, drawn in zip(found["top_logprobs"][begin:-1], wanted["top_logprobs"], strict=True):
        assert ours == pytest.approx(drawn, abs=1e-5)


# --- requests with everything mixed -----------------------------------------------------------------------


def random_request(seed: int) -> dict[str, Any]:
    """A chat request with any features; the same for the same seed."""
    rng = random.Random(seed)

    def maybe(chance: float, **fields: Any) -> dict[str, Any]:
        return fields if rng.random() < chance else {}

    words = ["river", "seven", "Äpfel", "def f(x):", "the cat sat on the mat", "🙂", "{", "list"]
    text = " ".join(rng.choice(words) for _ in range(rng.randint(1, 30)))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Say something about: {text}"}],
        "max_tokens": rng.randint(1, 24), "temperature": rng.choice([0, 0, 0.7, 1.3]), "seed": rng.getrandbits(32),
        "return_token_ids": True,
        **maybe(0.2, top_k=rng.randint(1, 50)), **maybe(0.2, top_p=0.9), **maybe(0.2, min_p=0.05),
        **maybe(0.2, presence_penalty=1.0), **maybe(0.2, frequency_penalty=-0.5), **maybe(0.2, repetition_penalty=1.2),
        **maybe(0.1, logit_bias={"28": 5.0}), **maybe(0.1, min_tokens=1), **maybe(0.2, stop=[" the", "."]),
        **maybe(0.2, n=rng.randint(2, 3)), **maybe(0.3, logprobs=True, top_logprobs=rng.randint(0, 3)),
        **maybe(0.1, prompt_logprobs=1), **maybe(0.1, bad_words=["river"]), **maybe(0.1, ignore_eos=True),
        **maybe(0.2, prediction={"type": "content", "content": text}), **maybe(0.2, cache_salt=str(rng.randint(0, 2))),
        **maybe(0.2, priority=rng.randint(-1, 1)),
        **maybe(0.3, speculation={"method": rng.choice(["auto", "ngram", "suffix", "naive", "off"])}),
    }  # fmt: skip
    form = rng.random()
    if form < 0.1:
        body["response_format"] = {"type": "json_object"}
    elif form < 0.2:
        body["guided_choice"] = ["yes", "no", "it depends"]
    elif form < 0.3:
        body |= {"tools": TOOLS, "tool_choice": rng.choice(["auto", "required", "none"])}
    return body


def essence(answer: dict[str, Any]) -> list[Any]:
    """What must not depend on company: tokens, text, ends and log-probabilities."""
    assert "choices" in answer, answer
    return [
        (c["token_ids"], c["message"]["content"], c["finish_reason"], c["logprobs"], c.get("prompt_logprobs"),
         [(call["function"]["name"], call["function"]["arguments"]) for call in c["message"].get("tool_calls", [])])
        for c in answer["choices"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    "count", [32, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_random_requests_at_once_get_what_each_gets_alone(served_model: str, count: int) -> None:
    bodies = [random_request(seed) for seed in range(count)]

    async def ask(http: httpx.AsyncClient, gate: asyncio.Semaphore, body: dict[str, Any]) -> list[Any]:
        async with gate:
            return essence((await http.post(served_model + CHAT, json=body)).json())

    async def together(at_once: int) -> list[list[Any]]:
        async with httpx.AsyncClient(timeout=1200, limits=httpx.Limits(max_connections=64)) as http:
            gate = asyncio.Semaphore(at_once)
            return await asyncio.gather(*(ask(http, gate, body) for body in bodies))

    crowded = asyncio.run(together(32))
    alone = asyncio.run(together(1))
    for i, (one, other) in enumerate(zip(crowded, alone, strict=True)):
        assert one == other, f"request {i}: {json.dumps(bodies[i])}"
