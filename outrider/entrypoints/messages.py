"""The wire form of conversations: messages, tools, and calls of tools."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TOOLS = 128


class WireModel(BaseModel):
    """Base of all request models: no unknown field, no coercion, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(WireModel):
    type: Literal["text"]
    text: str


class Function(WireModel):
    """What a tool does and takes; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(WireModel):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionName(WireModel):
    name: str


class NamedTool(WireModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(WireModel):
    name: str
    arguments: str


class ToolCall(WireModel):
    """A call that an assistant made; `index` is what streams leave in it."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Arguments(dict[str, Any]):
    """A call's arguments for templates. Some join them to strings, most read them as a mapping: both work."""

    def __init__(self, text: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __reduce__(self) -> Any:
        return Arguments, (self._text, dict(self))

    def __deepcopy__(self, memo: Any) -> Arguments:
        return Arguments(self._text, json.loads(self._text))

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class Message(WireModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    # What OpenAI's client sends back of an answer, without meaning here.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: content is one string, arguments are mappings."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    function = call.function
    arguments: Any = function.arguments or "{}"
    try:
        values = json.loads(arguments)
        arguments = Arguments(arguments, values) if isinstance(values, dict) else arguments
    except (ValueError, RecursionError):
        pass  # a model may have written it: it is shown what it wrote
    named = {"type": "function", "function": {"name": function.name, "arguments": arguments}}
    return named if call.id is None else {"id": call.id, **named}
