"""What parts the answers to a chat request may have: thoughts, content, tool calls."""

from __future__ import annotations

from outrider.entrypoints.messages import NamedTool, Tool
from outrider.entrypoints.parsers.choose import Formats
from outrider.entrypoints.parsers.message import Parsing
from outrider.entrypoints.parsers.reader import BLANKS
from outrider.entrypoints.parsers.tool_formats import Hermes
from outrider.entrypoints.protocol import ChatCompletionRequest


def offered_tools(request: ChatCompletionRequest) -> list[Tool]:
    """The tools that the model is told of."""
    if request.tool_choice == "none":
        return []
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        return [tool for tool in request.tools or [] if tool.function.name == name]
    return list(request.tools or [])


def must_call(request: ChatCompletionRequest) -> bool:
    return bool(request.tools) and (
        request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
    )


def parsing_for(request: ChatCompletionRequest, formats: Formats, prompt_end: str) -> Parsing | None:
    """How answers are taken apart; None where all of them is content."""
    tools = offered_tools(request)
    forced = must_call(request)
    # A grammar that forces a call leaves no room for thoughts, and writes Hermes' format for all models.
    reasoning = None if forced else formats.reasoning
    if reasoning is None and not tools:
        return None
    tool_format = Hermes if forced else formats.tools
    return Parsing(
        reasoning=reasoning,
        reasoning_is_open=reasoning is not None and prompt_end.rstrip(BLANKS).endswith(reasoning.begin),
        tool_format=tool_format if tools else None,
        tools={tool.function.name: tool.function.parameters or {} for tool in tools},
        parallel=request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool),
        only_calls=forced,
        make_id=formats.make_id,
    )
