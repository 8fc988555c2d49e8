"""What models write, in any cut: the same reasoning, content and calls, and no text lost."""

# ruff: noqa: E501 (tables of what models write)
from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.entrypoints.parsers.choose import choose_formats
from outrider.entrypoints.parsers.message import MessageParser, Parsing
from outrider.entrypoints.parsers.reasoning import REASONING_FORMATS, ReasoningCount
from outrider.entrypoints.parsers.tool_formats import TOOL_FORMATS

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "note": {"type": "object", "properties": {"text": {"type": "string"}}},
}
Answer = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, calls


def parsed(pieces: list[str], tool: str | None, reasoning: str | None = None, **options: Any) -> Answer:
    counter = itertools.count()
    form = REASONING_FORMATS[reasoning] if reasoning else None
    parser = MessageParser(
        Parsing(form, tool_format=TOOL_FORMATS[tool] if tool else None, tools=TOOLS,
                make_id=lambda: str(next(counter)), **options)
    )  # fmt: skip
    content, thoughts = "", ""
    calls: dict[int, list[str]] = {}
    for delta in [*map(parser.feed, pieces), parser.finish()]:
        content, thoughts = content + delta.content, thoughts + delta.reasoning
        for call in delta.calls:
            assert (call.name is not None) == (call.id is not None) == (call.index not in calls)
            if call.name is not None:
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments
    assert list(calls) == list(range(len(calls)))
    return content, thoughts, [(name, arguments) for name, arguments in calls.values()]


W = '{"city": "Köln \\"{[<tool_call>", "days": 2}'  # braces and marks inside strings are text
ONE = [("get_weather", W)]
TWO = [("get_weather", W), ("note", '{"text": "hi"}')]
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
WIRES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>', "", ONE),
    ("hermes", f'Let me look.\n<tool_call>{{"arguments": {W}, "name": "get_weather"}}</tool_call>', "Let me look.", ONE),
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>\n<tool_call>\n'
     '{"name": "note", "arguments": {"text": "hi"}}\n</tool_call>\n', "", TWO),
    ("hermes", f'<tool_call>[{{"name": "get_weather", "arguments": {W}}}, '
     '{"name": "note", "arguments": {"text": "hi"}}]</tool_call>', "", TWO),
    ("hermes", '<tool_call>{"name": "note", "arguments": "{\\"text\\": \\"hi\\"}"}</tool_call>', "", TWO[1:]),
    ("hermes", '<tool_call>{"name": "note"}</tool_call> done', " done", [("note", "{}")]),
    ("hermes", '<tool_call>{"name": "note", "arguments": {"text": "hi"}}', "", TWO[1:]),
    ("hermes", '<tool_call>{"name": "note", "arguments": {"text": "h', "", [("note", '{"text": "h')]),
    ("ernie45", f'\n<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>\n', "", ONE),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {W}}}', "", ONE),
    ("llama3_json", f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {W}}}; '
     '{"name": "note", "parameters": {"text": "hi"}}', "", TWO),
    ("mistral", f'Hm. [TOOL_CALLS][{{"name": "get_weather", "arguments": {W}}}, '
     '{"name": "note", "arguments": {"text": "hi"}, "id": "123456789"}]', "Hm.", TWO),
    ("mistral", f'[TOOL_CALLS]get_weather{W}[TOOL_CALLS]note[CALL_ID]abc[ARGS]{{"text": "hi"}}', "", TWO),
    ("deepseek_v3", "Ok. " + DEEPSEEK.format(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{W}\n```<｜tool▁call▁end｜>\n"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n{"text": "hi"}\n```<｜tool▁call▁end｜>'
    ), "Ok.", TWO),
    ("deepseek_v3", DEEPSEEK.format(
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>note<｜tool▁sep｜>{"text": "hi"}<｜tool▁call▁end｜>'
    ), "", TWO),
    ("glm45", '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln "{[<tool_call></arg_value>\n'
     "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
     "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>hi</arg_value>\n</tool_call>", "", TWO),
    ("qwen3_coder", '<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln "{[<tool_call>\n</parameter>\n'
     "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
     "<tool_call>\n<function=note>\n<parameter=text>\nhi\n</parameter>\n</function>\n</tool_call>", "", TWO),
]  # fmt: skip


def cuts(text: str) -> list[list[str]]:
    return [[text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]]


@pytest.mark.parametrize(("tool", "text", "content", "calls"), WIRES)
def test_each_familys_calls_are_read(
    tool: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in cuts(text):
        assert parsed(pieces, tool) == (content, "", calls)


@pytest.mark.parametrize("tool", TOOL_FORMATS)
@pytest.mark.parametrize(
    "text", ["", " ", "Hello!\n", "a < b and <tool", "{", '{"answer": 42}', '[{"name": "x"}]', "name{1}\n\n",
             "  <b>bold</b>\n", '{"name": "unknown", "parameters": {}} and more', "{'name': 'note'}"],
)  # fmt: skip
def test_what_is_no_call_is_content_to_the_last_blank(tool: str, text: str) -> None:
    for pieces in cuts(text):
        assert parsed(pieces, tool) == (text, "", [])


@pytest.mark.parametrize("text", ["<tool_call>nonsense</tool_call> x", '<tool_call>{"nme": 1}</tool_call>',
                                  '<tool_call>{"name" 1}', "<tool_call>", '<tool_call>{"name": "no'])  # fmt: skip
def test_a_broken_call_is_shown_as_it_is(text: str) -> None:
    for pieces in cuts(text):
        content, _, calls = parsed(pieces, "hermes")
        assert content == text.replace("</tool_call>", "") and not calls


fragments = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "note", "arguments": {"text": "hi"}}', '"', "\\", "{", "}", "[", "]",
     ",", ":", " ", "\n", "note", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<arg_key>", "</arg_key>", "<arg_value>",
     "</arg_value>", "<function=note>", "<parameter=text>", "</parameter>", "</function>", "<think>", "</think>",
     "<response>", "</response>", "ü", "🙂", '"name"', '"arguments"', "5", "<", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
     "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "function", "```json\n"]
)  # fmt: skip


@given(
    st.lists(fragments, max_size=12).map("".join), st.lists(st.integers(1, 7), max_size=60),
    st.sampled_from([*TOOL_FORMATS, None]), st.sampled_from([*REASONING_FORMATS, None]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_no_cut_changes_what_is_read(
    text: str, sizes: list[int], tool: str | None, reasoning: str | None, is_open: bool, parallel: bool
) -> None:
    if tool is None and reasoning is None:
        return
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    pieces.append(text[at:])
    options: dict[str, Any] = {"reasoning_is_open": is_open, "parallel": parallel}
    assert parsed(pieces, tool, reasoning, **options) == parsed([text], tool, reasoning, **options)


THOUGHTS: list[tuple[str, str, bool, str, str]] = [
    ("think", "<think>\nHm, <b>.\n</think>\n\nYes.", False, "Yes.", "Hm, <b>."),
    ("think", "Hm.\n</think>\n\nYes.\n", True, "Yes.\n", "Hm."),
    ("think", " Yes <think>no</think>", False, " Yes <think>no</think>", ""),
    ("think", "<think>Hm, no en", False, "", "Hm, no en"),
    ("think", "<think>\n\n</think>\n\nYes", False, "Yes", ""),
    ("ernie45", "<think>\nHm.\n</think>\n\n<response>\nYes.\n</response>\n", False, "Yes.", "Hm."),
    ("ernie45", "Hm.</think>Yes.", True, "Yes.", "Hm."),
    ("mistral", "[THINK]Hm.[/THINK]Yes.", False, "Yes.", "Hm."),
]


@pytest.mark.parametrize(("form", "text", "is_open", "content", "thoughts"), THOUGHTS)
def test_thoughts_are_told_from_the_answer(
    form: str, text: str, is_open: bool, content: str, thoughts: str
) -> None:
    for pieces in cuts(text):
        assert parsed(pieces, None, form, reasoning_is_open=is_open) == (content, thoughts, [])


def test_the_end_of_thinking_and_a_call_may_come_in_one_piece() -> None:
    text = 'Hm <tool_call>.</think>\n<tool_call>{"name": "note", "arguments": {"text": "hi"}}</tool_call>'
    for pieces in cuts(text):
        answer = parsed(pieces, "hermes", "think", reasoning_is_open=True)
        assert answer == ("", "Hm <tool_call>.", TWO[1:])


def test_without_parallel_calls_there_is_one() -> None:
    text = WIRES[2][1]
    assert parsed([text], "hermes", parallel=False) == ("", "", ONE)


def test_arguments_come_while_they_are_written() -> None:
    parser = MessageParser(Parsing(tool_format=TOOL_FORMATS["hermes"], tools=TOOLS, make_id=lambda: "1"))
    shown = [parser.feed(char) for char in WIRES[0][1]]
    first = next(i for i, delta in enumerate(shown) if delta.calls)
    assert shown[first].calls[0].name == "get_weather"
    begin, end = WIRES[0][1].index(W), WIRES[0][1].index(W) + len(W)
    assert [d.calls[0].arguments for d in shown[begin:end]] == list(W)


def test_values_take_the_type_of_the_schema() -> None:
    text = "<tool_call>note\n<arg_key>text</arg_key><arg_value>5</arg_value><arg_key>x</arg_key><arg_value>[1, 2]</arg_value></tool_call>"
    ((_, arguments),) = parsed([text], "glm45")[2]
    assert json.loads(arguments) == {"text": "5", "x": [1, 2]}


@pytest.mark.parametrize(
    ("pieces", "is_open", "count"),
    [(["<th", "ink>", "a", "b</think>", "c"], False, 4), (["a", "</think>", "c"], True, 2), (["x", "<think>"], False, 0),
     (["<think>", "a"], False, 2), ([" ", "<think>", "a</thi", "nk> c", "d"], False, 4)],
)  # fmt: skip
def test_tokens_of_thoughts_are_counted(pieces: list[str], is_open: bool, count: int) -> None:
    counter = ReasoningCount(REASONING_FORMATS["think"], is_open)
    for piece in pieces:
        counter.add(piece.encode())
    assert counter.num_tokens == count


@pytest.mark.parametrize(
    ("template", "has_tools", "tools", "reasoning"),
    [("[TOOL_CALLS]", True, "mistral", None), ("<｜tool▁calls▁begin｜></think>", True, "deepseek_v3", "</think>"),
     ("<tool_call><arg_key><think>", True, "glm45", "</think>"), ("<tool_call>", True, "hermes", None),
     ("<tool_call><function=", True, "qwen3_coder", None), ("<|eot_id|>", True, "llama3_json", None),
     ("<think><response>", True, "hermes", "</think>"), ("<|im_start|>", False, "hermes", None)],
)  # fmt: skip
def test_formats_are_chosen_from_the_template(
    template: str, has_tools: bool, tools: str, reasoning: str | None
) -> None:
    found = choose_formats(template, template_has_tools=has_tools, tools="auto", reasoning="auto")
    assert found.tools_name == tools and (found.reasoning.end if found.reasoning else None) == reasoning
    assert len(found.make_id()) == (9 if tools == "mistral" else 29)
    forced = choose_formats(template, template_has_tools=has_tools, tools="glm45", reasoning="none")
    assert forced.tools_name == "glm45" and forced.reasoning is None
