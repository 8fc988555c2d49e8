"""Chat prompts against transformers, and templates that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_tokenizers import save, train_byte_level

from outrider.models.chat_template import ChatTemplateError
from outrider.models.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}\n"
    "    {%- if loop.first and message.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}\n"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMING = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} {{ eos_token }}{% endfor %}"
TOOLS = (
    "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}{{ tools is none }} {{ documents is none }}"
    "{%- for m in messages if m.role != 'tool' %}{% if loop.index > 3 %}{% break %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ m | tojson }}{% endfor %}"
    "{{ mood | default('none') }}"
)
MESSAGES = [
    {"role": "user", "content": " Grüße <b>\"quoted\"</b> & 日本 "},
    {"role": "assistant", "content": "Well\n"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": " and then  "},
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "description": "a 'ü'", "parameters": {"x": [1, None]}}}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = tmp_path_factory.mktemp("chat")
    ours = save(train_byte_level(), folder, eos_token="<|im_end|>", bos_token={"content": "<|im_start|>"})
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    return ours, theirs


@pytest.mark.parametrize("template", [CHATML, TRIMMING, TOOLS])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "tools": [TOOL], "mood": "grave"},
    ],
)
def test_prompts_equal_transformers(
    both: tuple[Tokenizer, Any], template: str, options: dict[str, Any]
) -> None:
    if template == TOOLS and options.get("continue_final_message"):
        return  # it stops before the last message, which both refuse: see below
    ours, theirs = both
    expected = theirs.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, **options)
    assert ours.apply_chat_template(MESSAGES, chat_template=template, **options) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("a\n{% for %}", "not valid Jinja: line 2"),
        ("{{ messages[99].content.x }}", "refused the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|refused"),
        ("{{ messages.append(1) }}", "unsafe|refused"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | tojson(indent=[]) }}", "failed"),
    ],
)
def test_a_template_that_fails_is_one_kind_of_error(
    both: tuple[Tokenizer, Any], template: str, message: str
) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        both[0].apply_chat_template(MESSAGES, chat_template=template)


def test_a_message_that_cannot_be_continued_is_an_error(both: tuple[Tokenizer, Any]) -> None:
    def refused(messages: list[Any], template: str, message: str, **options: Any) -> None:
        options = {"add_generation_prompt": False, "continue_final_message": True, **options}
        with pytest.raises(ChatTemplateError, match=message):
            both[0].apply_chat_template(messages, chat_template=template, **options)

    refused(MESSAGES, TOOLS, "drops the end of the last message")
    refused(MESSAGES, CHATML, "cannot be combined", add_generation_prompt=True)
    refused([], CHATML, "needs a last message")
    refused([{"role": "assistant", "content": None}], CHATML, "needs a last message")


def test_the_caller_s_messages_are_not_changed(both: tuple[Tokenizer, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    template = "{{ messages[0].content[0].text }}"
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert both[0].apply_chat_template(messages, chat_template=template, **options) == "hi"
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path) -> None:
    library = train_byte_level()
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(ChatTemplateError, match="no chat template; set one with --chat-template"):
        save(library, tmp_path).apply_chat_template(message)
    assert save(library, tmp_path, chat_template="one").apply_chat_template(message) == "one"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = save(library, tmp_path, chat_template=named)
    assert tokenizer.apply_chat_template(message) == "d"
    assert tokenizer.apply_chat_template(message, tools=[TOOL]) == "t"
    with pytest.raises(ChatTemplateError, match=r"\['rag'\]; none is the default"):
        save(library, tmp_path, chat_template=[{"name": "rag", "template": "r"}]).apply_chat_template(message)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert save(library, tmp_path, chat_template="one").apply_chat_template(message) == "file"
