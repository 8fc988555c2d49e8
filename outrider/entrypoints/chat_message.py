"""The assistant message of an answer: as OpenAI's clients read it, whole or in deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.entrypoints.parsers.message import Delta, MessageParser, Parsing
from outrider.entrypoints.parsers.reasoning import ReasoningCount
from outrider.request import FinishReason


class ChatMessage:
    """Takes the text of one choice as it comes."""

    def __init__(self, parsing: Parsing, token_bytes: Sequence[bytes]) -> None:
        self._parser = MessageParser(parsing)
        self._token_bytes = token_bytes
        self._reasoning_count: ReasoningCount | None = None
        if parsing.reasoning is not None:
            self._reasoning_count = ReasoningCount(parsing.reasoning, parsing.reasoning_is_open)

    def feed(self, text: str, token_ids: Sequence[int], is_last: bool) -> Delta:
        """What an increment adds to the message."""
        if self._reasoning_count is not None:
            for token_id in token_ids:
                self._reasoning_count.add(self._token_bytes[token_id])
        delta = self._parser.feed(text)
        if is_last:
            _append(delta, self._parser.finish())
        return delta

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reasoning_count is None else self._reasoning_count.num_tokens

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """The reason as the API names it: an answer that ends with calls waits for their results."""
        if reason is FinishReason.STOP and self._parser.num_calls:
            return "tool_calls"
        return reason


def _append(delta: Delta, more: Delta) -> None:
    delta.content += more.content
    delta.reasoning += more.reasoning
    for call in more.calls:
        if delta.calls and delta.calls[-1].index == call.index:
            delta.calls[-1].arguments += call.arguments
        else:
            delta.calls.append(call)


def delta_fields(delta: Delta, is_first: bool) -> dict[str, Any]:
    """`delta` of a chunk."""
    fields: dict[str, Any] = {"role": "assistant"} if is_first else {}
    if delta.content or not (delta.reasoning or delta.calls):
        fields["content"] = delta.content
    elif is_first:
        fields["content"] = None
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.calls:
        fields["tool_calls"] = [
            {"index": call.index, "function": {"arguments": call.arguments}}
            if call.id is None
            else {
                "index": call.index, "id": call.id, "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in delta.calls
        ]  # fmt: skip
    return fields


def message_fields(delta: Delta) -> dict[str, Any]:
    """`message` of a whole answer, from all its text in one delta."""
    fields: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
        fields["content"] = delta.content or None
    if delta.calls:
        fields["content"] = delta.content or None
        fields["tool_calls"] = [
            {
                "id": call.id, "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in delta.calls
        ]  # fmt: skip
    return fields
