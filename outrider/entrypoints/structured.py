"""What the fields of a request say about the form of its answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from outrider.entrypoints.answer_parts import must_call, offered_tools
from outrider.entrypoints.errors import bad_request
from outrider.entrypoints.protocol import ChatCompletionRequest, GenerationRequest, ResponseFormat
from outrider.entrypoints.tool_grammar import calls_grammar
from outrider.request import GrammarSpec
from outrider.sampling.grammar_source import GrammarError, check_grammar

_FORMAT_FIELDS = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers")}


async def grammar_of(request: GenerationRequest) -> GrammarSpec | None:
    """The grammar that a request asks for, checked; a 400 names the field and says what is wrong with it."""
    asked = _asked(request)
    if len(asked) > 1:
        names = " and ".join(asked)
        raise bad_request(f"{names} exclude each other: an answer has one form", next(iter(asked)))
    for param, spec in asked.items():
        try:
            # Beside the event loop: other streams do not wait for it.
            await asyncio.to_thread(check_grammar, spec)
        except GrammarError as error:
            raise bad_request(f"{param}: {error}", param, "invalid_grammar") from None
        return spec
    return None


def _asked(request: GenerationRequest) -> dict[str, GrammarSpec]:
    """Field -> grammar, for each field that asks for one."""
    asked: dict[str, GrammarSpec] = {}
    spec = _response_format(request.response_format)
    if spec is not None:
        asked["response_format"] = spec
    if request.guided_json is not None:
        asked["guided_json"] = GrammarSpec.json_schema(_schema(request.guided_json, "guided_json"))
    if request.guided_regex is not None:
        asked["guided_regex"] = GrammarSpec.regex(request.guided_regex)
    if request.guided_choice is not None:
        asked["guided_choice"] = GrammarSpec.choice(request.guided_choice)
    if request.guided_grammar is not None:
        asked["guided_grammar"] = GrammarSpec.grammar(request.guided_grammar)
    if isinstance(request, ChatCompletionRequest) and must_call(request):
        parallel = request.tool_choice == "required" and request.parallel_tool_calls is not False
        asked["tool_choice"] = calls_grammar(offered_tools(request), parallel=parallel)
    return asked


def _response_format(asked: ResponseFormat | None) -> GrammarSpec | None:
    if asked is None:
        return None
    wanted = _FORMAT_FIELDS.get(asked.type, ())
    for name in ("json_schema", "structures", "triggers"):
        value, path = getattr(asked, name), f"response_format.{name}"
        if name in wanted and not value:
            raise bad_request(f"{path} is required with type {asked.type!r}", path)
        if name not in wanted and value is not None:
            raise bad_request(f"{path} does not go with type {asked.type!r}", path)
    if asked.json_schema is not None:
        form = asked.json_schema
        schema = {} if form.schema_ is None else form.schema_
        # Who says so gets an answer in which what cannot be enforced is not; else it is an error.
        return GrammarSpec.json_schema(schema, lenient=form.strict is False)
    if asked.structures is not None:
        structures = [
            {"begin": each.begin, "schema": each.schema_, "end": each.end} for each in asked.structures
        ]
        return GrammarSpec.structural_tag(structures, asked.triggers or [])
    return GrammarSpec.json_object() if asked.type == "json_object" else None


def _schema(value: Any, param: str) -> Any:
    """A schema as given, or as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{param} is not valid JSON: {error}", param) from None
