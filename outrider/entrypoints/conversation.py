"""From messages and tools to the text of a prompt.

Templates that know of tools are given them. Others, the built-in model's among them, are told of tools by
the system message and shown calls and results as text, in Hermes' format; `docs/features/tools.md` has
the wording.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from outrider.entrypoints.errors import bad_request
from outrider.entrypoints.messages import Message, NamedTool, Tool, ToolChoice

TOOL_PROMPT = """You may call one or more functions to help with the user's request.

The functions are described by JSON schemas inside <tools></tools>:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""

_RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "chat_template", "tools")


class ChatRequest(Protocol):
    """What requests with a conversation share."""

    @property
    def messages(self) -> list[Message] | None: ...
    @property
    def tools(self) -> list[Tool] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


class ChatTokenizer(Protocol):
    chat_template: Any

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str: ...


def template_text(chat_template: str | Mapping[str, str] | None) -> str:
    """All that a template may write, as one text to search in."""
    if isinstance(chat_template, Mapping):
        return "\n".join(chat_template.values())
    return chat_template or ""


def template_has_tools(chat_template: str | Mapping[str, str] | None) -> bool:
    """Whether a template reads the variable `tools`."""
    return re.search(r"\{[{%][^}]*\btools\b", template_text(chat_template)) is not None


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> None:
    """Refuse tools and choices that contradict each other."""
    names = [tool.function.name for tool in tools or []]
    double = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if double is not None:
        raise bad_request(f"tools: two functions have the name {double!r}", "tools")
    if not names and choice not in (None, "none", "auto"):
        raise bad_request("tool_choice needs tools", "tool_choice")
    if not names and parallel is not None:
        raise bad_request("parallel_tool_calls needs tools", "parallel_tool_calls")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise bad_request(
            f"tool_choice: there is no tool {choice.function.name!r}; tools has {', '.join(names)}",
            "tool_choice",
        )


def render(tokenizer: ChatTokenizer, request: ChatRequest, tools: Sequence[Tool]) -> str:
    """The prompt of a conversation in which `tools` may be called."""
    messages: list[Message] = request.messages or []
    _check(request, messages)
    resume = bool(request.continue_final_message)
    extra = dict(request.chat_template_kwargs or {})
    for name in _RESERVED:
        if name in extra:
            raise bad_request(f"chat_template_kwargs must not hold {name!r}", "chat_template_kwargs")
    prompt_turn = not resume if request.add_generation_prompt is None else request.add_generation_prompt
    prepared = [message.for_template() for message in messages]
    if any(message.tool_calls or message.role == "tool" for message in messages) or tools:
        if template_has_tools(tokenizer.chat_template):
            _name_results(prepared)
            extra |= {"tools": [tool.for_template() for tool in tools]} if tools else {}
        else:
            prepared = _as_text(prepared, tools)
    try:
        return tokenizer.apply_chat_template(
            prepared, add_generation_prompt=prompt_turn, continue_final_message=resume, **extra
        )
    except Exception as error:  # templates may fail in any way, and they fail on the client's input
        raise bad_request(f"the chat template refuses these messages: {error}", "messages") from None


def _check(request: ChatRequest, messages: list[Message]) -> None:
    if not messages:
        raise bad_request("messages must hold at least one message", "messages", "missing_required_parameter")
    if request.continue_final_message and request.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    if request.continue_final_message and messages[-1].role != "assistant":
        raise bad_request(
            f"continue_final_message needs a final assistant message, got {messages[-1].role!r}",
            "continue_final_message",
        )
    for i, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            raise bad_request(
                f"messages[{i}].tool_calls: only an assistant calls tools", f"messages[{i}].tool_calls"
            )


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Some templates want a result to name its function; the API only links it to the call."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message:
            name = names.get(message.get("tool_call_id", ""))
            message |= {} if name is None else {"name": name}


def _as_text(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in the system message, calls and results as text."""
    result: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if result and result[-1]["role"] == "user" and result[-1].get("_results"):
                result[-1]["content"] += "\n" + text  # results of parallel calls are one turn
            else:
                result.append({"role": "user", "content": text, "_results": True})
            continue
        calls = message.pop("tool_calls", ())
        texts = [message["content"]] if message["content"] else []
        texts += [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls]
        result.append({**message, "content": "\n".join(texts)})
    if tools:
        described = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
        text = TOOL_PROMPT.format(tools=described)
        if result[0]["role"] == "system":
            result[0]["content"] += "\n\n" + text
        else:
            result.insert(0, {"role": "system", "content": text})
    return [{k: v for k, v in message.items() if k != "_results"} for message in result]


def _call_text(function: dict[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {function["arguments"]}}}'
