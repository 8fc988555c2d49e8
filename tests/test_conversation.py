"""Conversations with tools as templates see them, in whatever way a template reads a call's arguments."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import ServerConfig
from outrider.entrypoints.conversation import render, template_has_tools
from outrider.entrypoints.parsers.reasoning import REASONING_FORMATS
from outrider.entrypoints.parsers.tool_formats import TOOL_FORMATS
from outrider.entrypoints.protocol import ChatCompletionRequest
from outrider.models import chat_template

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1, "y": "ü"}'}}
MESSAGES: Any = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "c1", "content": "R"},
]
FUNCTION = {"name": "f", "parameters": {"type": "object"}, "strict": True}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}{{ tools or '' }}"


class Templated:
    """A tokenizer that is its template."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        flags = {k: options.pop(k) for k in ("add_generation_prompt", "continue_final_message")}
        return chat_template.render(self.chat_template, messages, variables=options, **flags)


def rendered(template: str, **fields: Any) -> str:
    request = ChatCompletionRequest.model_validate({"messages": MESSAGES, **fields})
    return render(Templated(template), request, request.tools or [])


@pytest.mark.parametrize(
    ("expression", "text"),
    [("{{ c.function.arguments | tojson }}", '{"x": 1, "y": "ü"}'),
     ("{{ '<' + c.function.arguments + '>' }}", '<{"x": 1, "y": "ü"}>'),
     ("{{ '<' ~ c.function.arguments ~ '>' }}", '<{"x": 1, "y": "ü"}>'),
     ("{{ c.function.arguments }}", '{"x": 1, "y": "ü"}'),
     ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}", "x=1;y=ü;"),
     ("{{ c.function.arguments is mapping }}{{ c.function.arguments is string }}", "TrueFalse"),
     ("{{ c.function.arguments.y }}{{ c.id }}{{ c.function.name }}", "üc1f")],
)  # fmt: skip
def test_arguments_may_be_read_as_text_or_as_a_mapping(expression: str, text: str) -> None:
    assert rendered(LOOP.replace("%s", expression)) == text


def test_arguments_that_are_no_json_stay_what_the_model_wrote() -> None:
    broken = {**CALL, "function": {"name": "f", "arguments": '{"x": '}}
    messages = [MESSAGES[0], {**MESSAGES[1], "tool_calls": [broken]}]
    assert rendered(LOOP.replace("%s", "{{ c.function.arguments }}"), messages=messages) == '{"x": '
    assert '"arguments": {"x": }' in rendered("{{ messages[1].content }}", messages=messages)


def test_a_template_with_tools_is_given_them_and_the_names_of_results() -> None:
    template = "{{ tools | tojson }}{{ messages[2].name }}{{ messages[1].reasoning_content }}"
    text = rendered(template, tools=TOOLS)
    assert text == '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]fHm.'
    assert rendered("{{ tools is none }}") == "True"


def test_whether_a_template_knows_tools_is_told_from_its_code() -> None:
    assert template_has_tools("{%- if tools %}x{% endif %}") and template_has_tools("{{ tools | tojson }}")
    assert not template_has_tools("I use tools. {{ messages }} {{ toolset }}")
    assert template_has_tools({"default": "{{ messages }}", "tool_use": "{{ tools }}"})
    assert not template_has_tools(None)


def test_every_format_can_be_named_in_the_configuration() -> None:
    fields = ServerConfig.__dataclass_fields__
    assert set(fields["tool_call_parser"].metadata["choices"]) == {"auto", *TOOL_FORMATS}
    assert set(fields["reasoning_parser"].metadata["choices"]) == {"auto", "none", *REASONING_FORMATS}
