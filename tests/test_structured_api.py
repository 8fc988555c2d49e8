"""Structured output over HTTP: what is taken, what is refused and why, and answers of the real model."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from live_fake import CHAT, HELLO, error_of, post, running

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pet": {"enum": ["cat", "dog", "none"]},
    },
    "required": ["name", "age", "pet"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running() as (address, _):
        yield address


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "unknown format",
        {"response_format": {"type": "yaml"}},
        "response_format.type",
        "not supported; allowed",
    ),
    ("no type", {"response_format": {}}, "response_format.type", "is required"),
    ("no schema", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    (
        "schema without its type",
        {"response_format": {"type": "json_object", "json_schema": {"name": "x"}}},
        "response_format.json_schema",
        "does not go with type 'json_object'",
    ),
    ("wrong schema", {"response_format": schema_format([1])}, "response_format.json_schema.schema", "valid"),
    ("unknown keyword", {"response_format": schema_format({"type": "objekt"})}, "response_format", "objekt"),
    (
        "keyword that is not supported",
        {"response_format": schema_format({"type": "array", "uniqueItems": True}, strict=True)},
        "response_format",
        "keywords that are not supported: uniqueItems",
    ),
    ("bad pattern", {"guided_json": {"type": "string", "pattern": "("}}, "guided_json", "unclosed group"),
    ("no such ref", {"guided_json": {"$ref": "#/nope"}}, "guided_json", "'/nope' does not exist"),
    ("foreign ref", {"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json", "does not fetch"),
    (
        "impossible",
        {"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}},
        "guided_json",
        "minimum (5) is greater than maximum (3)",
    ),
    ("schema as broken text", {"guided_json": '{"type":'}, "guided_json", "not valid JSON"),
    ("schema of nothing", {"guided_json": False}, "guided_json", "must be an object"),
    ("unknown style", {"guided_json": {"x-guidance": {"blank": 1}}}, "guided_json", "unknown option blank"),
    ("huge schema", {"guided_json": {"enum": ["y" * 200_000]}}, "guided_json", "at most 131072 are allowed"),
    ("bad regex", {"guided_regex": "a("}, "guided_regex", "unclosed group"),
    ("look-around", {"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ("long regex", {"guided_regex": "a" * 9000}, "guided_regex", "at most 8192 are allowed"),
    ("no choice", {"guided_choice": []}, "guided_choice", "at least 1 item"),
    ("empty choice", {"guided_choice": ["a", ""]}, "guided_choice", "must not be empty"),
    ("bad grammar", {"guided_grammar": "start: missing"}, "guided_grammar", "unknown name"),
    ("broken GBNF", {"guided_grammar": 'root ::= ("a" | '}, "guided_grammar", "Expected ')'"),
    (
        "two forms",
        {"guided_regex": "a", "guided_choice": ["b"]},
        "guided_regex",
        "guided_regex and guided_choice exclude each other",
    ),
    (
        "tag without its trigger",
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
                "triggers": ["<g"],
            }
        },
        "response_format",
        "starts with none of the triggers",
    ),
    (
        "tag without triggers",
        {"response_format": {"type": "structural_tag", "structures": [{"begin": "<f>"}]}},
        "response_format.triggers",
        "is required",
    ),
]


@pytest.mark.server
@pytest.mark.parametrize(("fields", "param", "reason"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_what_cannot_be_enforced_is_a_400_with_the_reason(
    url: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    error = error_of(post(url, CHAT, {"messages": HELLO, **fields}), 400)
    assert error["param"] == param
    assert reason in error["message"]
    assert len(error["message"]) < 700


@pytest.mark.server
@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [{"required": [f"k{i}{j}"], "properties": {f"k{i}{j}": {"type": "string"}}}
                              for j in range(3)]} for i in range(9)]},
        {"type": "string", "pattern": "^(" * 2000 + "a" + ")*" * 2000},
        {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"},
        {"enum": [f"value {i}" for i in range(5000)]},
        {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
        {"type": "array", "minItems": 10**9},
    ],
    ids=["product", "deep pattern", "circle", "many", "nested repeats", "endless"],
)  # fmt: skip
def test_no_schema_keeps_others_waiting(url: str, schema: Any) -> None:
    begin = time.monotonic()
    reply = post(url, CHAT, {"messages": HELLO, "guided_json": schema})
    assert reply.status_code in (200, 400)
    assert time.monotonic() - begin < 5


# --- with the real model ---


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=16)
    age: int = pydantic.Field(ge=0, le=120)


real = [pytest.mark.server, pytest.mark.model]


def ask(url: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Describe a person as JSON."}]
    request = {"messages": messages, "max_tokens": 100, "temperature": 0, **fields}
    reply = post(url, CHAT, request)
    assert reply.status_code == 200, reply.text
    return reply.json()


class TestTheRealModel:
    pytestmark = real

    def test_a_schema_is_kept_at_every_method_alike(self, served_model: str) -> None:
        form = schema_format(PERSON, strict=True)
        for temperature in (0, 0.8):
            answers = [
                ask(served_model, response_format=form, temperature=temperature, seed=5, speculation=method)
                for method in ("off", {"method": "auto"}, {"method": "auto", "max_draft_tokens": 3})
            ]
            texts = [answer["choices"][0]["message"]["content"] for answer in answers]
            jsonschema.validate(json.loads(texts[0]), PERSON)
            assert texts[0] == texts[1] == texts[2]
            assert answers[0]["choices"][0]["finish_reason"] == "stop"

    def test_the_official_client_parses_a_model_class(self, served_model: str) -> None:
        client = openai.OpenAI(base_url=served_model + "/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.parse(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "Describe a person."}],
            response_format=Person,
            max_tokens=100,
            temperature=0,
        )
        person = answer.choices[0].message.parsed
        assert isinstance(person, Person)

    def test_a_stream_joins_to_the_same_json(self, served_model: str) -> None:
        client = openai.OpenAI(base_url=served_model + "/v1", api_key="none", max_retries=0)
        form: Any = schema_format(PERSON)
        stream = client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "Describe a person as JSON."}],
            response_format=form,
            max_tokens=100,
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == ask(served_model, response_format=form)["choices"][0]["message"]["content"]

    def test_json_mode_and_guided_fields(self, served_model: str) -> None:
        def text_of(**fields: Any) -> str:
            choice = ask(served_model, **fields)["choices"][0]
            assert choice["finish_reason"] == "stop"
            return str(choice["message"]["content"])

        assert isinstance(json.loads(text_of(response_format={"type": "json_object"})), dict)
        assert re.fullmatch(r"[A-Z][a-z]{2,9} [0-9]{3}", text_of(guided_regex=r"[A-Z][a-z]{2,9} [0-9]{3}"))
        assert text_of(guided_choice=["yes", "no", "not at all (really?)"]) in (
            "yes",
            "no",
            "not at all (really?)",
        )
        assert text_of(guided_grammar='root ::= "It is " ("hot" | "cold") "."') in (
            "It is hot.",
            "It is cold.",
        )
        assert jsonschema.validate(json.loads(text_of(guided_json=json.dumps(PERSON))), PERSON) is None

    def test_a_structural_tag_is_kept(self, served_model: str) -> None:
        tag = {
            "type": "structural_tag",
            "structures": [
                {"begin": '<age of="me">', "schema": {"type": "integer", "maximum": 99}, "end": "</age>"}
            ],
            "triggers": ["<age"],
        }
        # A bias makes the model write the trigger's first letter at once.
        ids = post(served_model, "/tokenize", {"prompt": "<", "add_special_tokens": False}).json()["tokens"]
        answer = ask(served_model, response_format=tag, logit_bias={str(ids[0]): 30}, max_tokens=24)
        assert answer["choices"][0]["message"]["content"].startswith("<")
        free = ask(served_model, response_format=tag, max_tokens=24)
        assert free["choices"][0]["finish_reason"] in ("stop", "length")

    def test_bounds_that_leave_nothing_are_a_400_that_names_them(self, served_model: str) -> None:
        request = {"messages": HELLO, "guided_choice": ["zz"], "bad_words": ["z", "zz"], "max_tokens": 8}
        error = error_of(post(served_model, CHAT, request), 400)
        assert "bad_words" in error["message"] and error["code"] == "nothing_allowed"

    def test_requests_with_and_without_a_grammar_share_steps(self, served_model: str) -> None:
        client = openai.AsyncOpenAI(base_url=served_model + "/v1", api_key="none", max_retries=0)

        async def one(i: int) -> str:
            form: Any = schema_format(PERSON) if i % 2 else {"type": "text"}
            answer = await client.chat.completions.create(
                model="smollm2-135m",
                messages=[{"role": "user", "content": f"Describe person {i % 4}."}],
                response_format=form,
                max_tokens=60,
                temperature=0.7,
                seed=i % 4,
            )
            return answer.choices[0].message.content or ""

        async def everyone() -> list[str]:
            return list(await asyncio.gather(*(one(i) for i in range(12))))

        texts = asyncio.run(everyone())
        assert texts[:4] == texts[4:8] == texts[8:]
        for text in texts[1::2]:
            jsonschema.validate(json.loads(text), PERSON)
