"""What clients may send: OpenAI's request shapes with Outrider's extensions, checked to the letter.

Nothing is ignored in silence. A field that is unknown, misspelt, of the wrong type or out of range is
an error that names it; so is a field of the OpenAI API that this version does not serve, unless its
value asks for nothing (`"tools": null`).
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field

from outrider.entrypoints.errors import ApiError, bad_request
from outrider.entrypoints.messages import MAX_TOOLS, Message, TextPart, Tool, ToolChoice, WireModel

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_BIASED_TOKENS = 1024

# Fields of the OpenAI API and its dialects that this version does not serve -> values that ask for nothing.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "structural_tag": (),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}

TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(WireModel):
    include_usage: bool | None = None


class Speculation(WireModel):
    """Per-request override; it changes the speed, never the tokens."""

    method: Literal["auto", "mtp", "ngram", "suffix", "draft_model", "naive", "off"] | None = None
    max_draft_tokens: Annotated[int, Field(ge=0, le=32)] | None = None


class Prediction(WireModel):
    """What the answer will mostly be, as when a text is sent to be changed a little."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class JsonSchema(WireModel):
    """A schema as OpenAI's `response_format` carries it."""

    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None  # false: keywords that cannot be enforced are ignored


class TagStructure(WireModel):
    """A stretch of an answer between two fixed texts."""

    begin: Annotated[str, Field(min_length=1)]
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    end: str = ""


class ResponseFormat(WireModel):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Annotated[list[TagStructure], Field(max_length=128)] | None = None
    triggers: Annotated[list[StopString], Field(max_length=128)] | None = None


class GenerationRequest(WireModel):
    """What chat and completion requests share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[str, Field(max_length=MAX_STOP_LENGTH)] | list[StopString] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, Field(max_length=MAX_BIASED_TOKENS)
    ] = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[StopString], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    speculation: Literal["off"] | Speculation | None = None
    prediction: Prediction | None = None
    return_speculation: bool | Literal["detailed"] | None = None
    prompt_token_ids: list[TokenId] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=4096)] | None = None
    guided_grammar: str | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(default_factory=list)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(WireModel):
    """Body of POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(WireModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class AbortRequest(WireModel):
    """Body of POST /v1/abort_requests: ids as answered, or all."""

    request_ids: list[str] | None = None
    abort_all: bool | None = None


Body = TypeVar("Body", bound=WireModel)


def parse(model: type[Body], body: bytes) -> Body:
    """`body` as `model`, or an `ApiError` that names the field at fault."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(
            f"the request body is not valid UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}",
            code="invalid_utf8",
        ) from None
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        served = _without_neutral(model, body, error)
        if served is not None:
            return served
        raise _explain(model, error) from None


def _without_neutral(model: type[Body], body: bytes, error: pydantic.ValidationError) -> Body | None:
    """The request without unserved fields whose values ask for nothing; None if others are at fault."""
    unknown = [e for e in error.errors() if e["type"] == "extra_forbidden" and len(e["loc"]) == 1]
    neutral = [e["loc"][0] for e in unknown if _asks_for_nothing(str(e["loc"][0]), e["input"])]
    if not neutral or not issubclass(model, GenerationRequest):
        return None
    import json

    content = json.loads(body)
    for name in neutral:
        content.pop(name, None)
    return parse(model, json.dumps(content).encode())


def _asks_for_nothing(name: str, value: Any) -> bool:
    return name in UNSERVED and (value is None or value in UNSERVED[name])


def _explain(model: type[WireModel], error: pydantic.ValidationError) -> ApiError:
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return bad_request(
            f"the request body is not valid JSON: {first['ctx']['error']}", code="invalid_json"
        )
    if not first["loc"]:
        return bad_request("the request body must be a JSON object", code="invalid_json")
    part = next((e for e in errors if e["loc"][-1] == "type" and e["type"] == "literal_error"), None)
    if part is not None:
        param = _field_path(part["loc"])
        return bad_request(
            f"{param} {_shown(part['input'])} is not supported; allowed: {part['ctx']['expected']}",
            param,
            "unsupported_field",
        )
    unknown = next((e for e in errors if e["type"] == "extra_forbidden"), None)
    if unknown is not None:
        return _unknown_field(model, unknown)
    if first["type"] == "missing":
        param = _field_path(first["loc"])
        return bad_request(f"{param} is required", param, "missing_required_parameter")
    nearest = _nearest_branch([e for e in errors if e["loc"][0] == first["loc"][0]])
    param = _field_path(nearest[0]["loc"])
    reasons = list(dict.fromkeys(e["msg"][0].lower() + e["msg"][1:] for e in nearest))
    return bad_request(f"{param}: {', or '.join(reasons)}; got {_shown(nearest[0]['input'])}", param)


def _nearest_branch(errors: list[Any]) -> list[Any]:
    """The errors worth showing of a field.

    A union reports the errors of each of its branches. The branch that got inside with the fewest
    errors is what was meant; where none got inside, each says what it takes.
    """
    branches: dict[tuple[Any, ...], list[Any]] = {}
    for error in errors:
        loc = error["loc"]
        tags = [i for i, part in enumerate(loc) if _is_branch(part)]
        branches.setdefault(loc[: tags[-1] + 1] if tags else (), []).append(error)
    inside = [b for prefix, b in branches.items() if not prefix or len(b[0]["loc"]) > len(prefix)]
    if inside:
        return min(inside, key=len)[:1]
    return [e for e in errors if _field_path(e["loc"]) == _field_path(errors[0]["loc"])]


def _is_branch(part: int | str) -> bool:
    """Whether a part of pydantic's location names a branch of a union."""
    return isinstance(part, str) and (
        not part.isidentifier()
        or part in ("str", "int", "float", "bool", "StreamOptions", "Speculation", "NamedTool")
    )


def _unknown_field(model: type[WireModel], error: Any) -> ApiError:
    param = _field_path(error["loc"])
    name = str(error["loc"][-1])
    if name in UNSERVED or name in ("tool_calls", "function_call", "refusal"):
        return bad_request(
            f"{param} is not supported by this version of Outrider", param, "unsupported_field"
        )
    close = difflib.get_close_matches(name, model.model_fields, n=1)
    hint = f"; did you mean {close[0]!r}?" if close and len(error["loc"]) == 1 else ""
    return bad_request(f"unknown field {param!r}{hint}", param, "unknown_field")


def _field_path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` from pydantic's location, without the names of union branches."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif path and _is_branch(part):
            continue
        else:
            path += f".{part}" if path else part
    return path


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
