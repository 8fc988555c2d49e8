"""Which formats a model writes in, told by its chat template, and what a request's answers need."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from outrider.entrypoints.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from outrider.entrypoints.parsers.tool_format import ToolFormat
from outrider.entrypoints.parsers.tool_formats import TOOL_FORMATS

# The first mark that a template holds decides; the more special ones come first.
_TOOL_MARKS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("<|eot_id|>", "llama3_json"),
)
_REASONING_MARKS = (
    ("[THINK]", "mistral"),
    ("<response>", "ernie45"),
    ("<think>", "think"),
    ("</think>", "think"),
)


@dataclass(frozen=True)
class Formats:
    """A model's formats. Without a tool format of its own it is told of tools in Hermes' format."""

    tools: type[ToolFormat]
    tools_name: str
    reasoning: ReasoningFormat | None
    template_has_tools: bool

    @property
    def make_id(self) -> Callable[[], str]:
        """Mistral's templates refuse ids that are not nine letters and digits."""
        return _short_id if self.tools_name == "mistral" else _long_id


def choose_formats(template: str, *, template_has_tools: bool, tools: str, reasoning: str) -> Formats:
    """The formats named, or for "auto" those that the template speaks; reasoning may be "none"."""
    if tools == "auto":
        known = next((name for mark, name in _TOOL_MARKS if mark in template), "hermes")
        tools = known if template_has_tools else "hermes"
    if reasoning == "auto":
        reasoning = next((name for mark, name in _REASONING_MARKS if mark in template), "none")
    return Formats(TOOL_FORMATS[tools], tools, REASONING_FORMATS.get(reasoning), template_has_tools)


def _short_id() -> str:
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


def _long_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]
