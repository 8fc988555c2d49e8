"""The part of an answer in which a model thinks, told from what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.entrypoints.parsers.reader import BLANKS, Reader, Reading, Sink


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its thoughts, and perhaps the answer behind them."""

    begin: str
    end: str
    answer_begin: str = ""
    answer_end: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end, self.answer_begin, self.answer_end)))


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "ernie45": ReasoningFormat("<think>", "</think>", "<response>", "</response>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


class Edges:
    """Passes text on without the blanks at its start and at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""
        self._started = False

    def __call__(self, text: str) -> None:
        if not self._started:
            text = text.lstrip(BLANKS)
            self._started = bool(text)
        text = self._held + text
        end = len(text.rstrip(BLANKS))
        self._held = text[end:]
        if end:
            self._sink(text[:end])


def split_reasoning(
    reader: Reader, form: ReasoningFormat, *, is_inside: bool, reasoning: Sink, content: Sink
) -> Reading:
    """Send the thoughts to `reasoning` and the rest to `content`; `is_inside` when the prompt began them.

    Blanks around the thoughts are layout and are dropped. Only thoughts at the very start are told apart:
    the marks may be a topic of the answer.
    """
    if not is_inside:
        blanks = yield from reader.blanks()
        if not (yield from reader.literal(form.begin)):
            content(blanks)
            yield from reader.rest(content)
            return
    yield from reader.until((form.end,), Edges(reasoning))
    yield from reader.blanks()
    if not form.answer_begin or not (yield from reader.literal(form.answer_begin)):
        yield from reader.rest(content)
        return
    yield from reader.until((form.answer_end,), Edges(content))
    yield from reader.until((), _after_answer(content))


def _after_answer(content: Sink) -> Sink:
    """Tool calls may follow an answer; the blanks between are layout."""
    started = False

    def take(text: str) -> None:
        nonlocal started
        text = text if started else text.lstrip(BLANKS)
        started = started or bool(text)
        if text:
            content(text)

    return take


class ReasoningCount:
    """How many tokens of an answer were thoughts, the end mark included."""

    def __init__(self, form: ReasoningFormat, is_inside: bool) -> None:
        self._begin, self._end = form.begin.encode(), form.end.encode()
        self._tail = b""
        self._is_open: bool | None = True if is_inside else None  # None: not known yet
        self.num_tokens = 0
        self._num_undecided = 0

    def add(self, piece: bytes) -> None:
        """Take the bytes of one token."""
        if self._is_open is False:
            return
        self._tail += piece
        self._num_undecided += 1
        if self._is_open is None:
            start = self._tail.lstrip()
            if start.startswith(self._begin):
                self._is_open = True
            elif not self._begin.startswith(start):
                self._is_open = False
                return
        if self._is_open:
            self.num_tokens += self._num_undecided
            self._num_undecided = 0
            self._is_open = self._end not in self._tail
            self._tail = self._tail[-max(len(self._begin), len(self._end)) :]
