"""Calls that must be made, as a grammar: Hermes' format with each tool's own schema for its arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.entrypoints.messages import Tool
from outrider.request import GrammarSpec

# As Python writes JSON: nothing is left open, so what must come is a free draft.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
MOST_CALLS = 16  # in one answer: a small model may not know when to stop
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def calls_grammar(tools: Sequence[Tool], *, parallel: bool) -> GrammarSpec:
    """One call of one of `tools`, or with `parallel` several."""
    begin, end = json.dumps("<tool_call>\n"), json.dumps("\n</tool_call>")
    more = f" ({json.dumps(chr(10))} one){{0,{MOST_CALLS - 1}}}" if parallel else ""
    rules = [f"start: one{more}", f"one: {begin} call {end}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        opening = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
        rules.append(f'call_{i}: {json.dumps(opening)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(_styled(tool))}")
    return GrammarSpec.grammar("\n".join(rules) + "\n")


def _styled(tool: Tool) -> dict[str, Any]:
    schema = tool.function.parameters
    schema = _NO_ARGUMENTS if schema is None else schema
    # OpenAI's rule: without `strict` a schema may use keywords that cannot be enforced.
    style = {**_STYLE, "lenient": tool.function.strict is not True}
    return {"type": "object", **schema, "x-guidance": style}
