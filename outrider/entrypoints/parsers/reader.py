"""Text that comes in pieces, read as if it were all there.

Formats are written as generators over a `Reader`: wherever one needs text that has not come, it yields
and goes on when it has. What a format finds depends on the text alone, never on how it was cut, so a
step that brings five tokens cannot lose what a step of one would have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

Reading = Generator[None, str | None, Any]  # is sent pieces of text, and None at the end
Sink = Callable[[str], None]

BLANKS = " \t\r\n"
_SCALAR_ENDS = frozenset(",}]" + BLANKS)


def drop(text: str) -> None:
    """A sink for what belongs to a format and to nobody else."""


class Reader:
    """What has come and has not been read."""

    def __init__(self) -> None:
        self._text = ""
        self._has_ended = False

    def fill(self) -> Reading:
        """Wait for more text; False when there is none."""
        if not self._has_ended:
            piece = yield
            if piece is not None:
                self._text += piece
                return True
            self._has_ended = True
        return False

    def peek(self) -> Reading:
        """The next character, left where it is; "" at the end."""
        while not self._text:
            if not (yield from self.fill()):
                return ""
        return self._text[0]

    def blanks(self) -> Reading:
        """Read over blanks; returns them."""
        read = ""
        while True:
            rest = self._text.lstrip(BLANKS)
            read += self._text[: len(self._text) - len(rest)]
            self._text = rest
            if rest or not (yield from self.fill()):
                return read

    def literal(self, expected: str) -> Reading:
        """Read `expected` if it comes next; True if it did. Otherwise nothing is read."""
        while len(self._text) < len(expected) and expected.startswith(self._text):
            if not (yield from self.fill()):
                return False
        if not self._text.startswith(expected):
            return False
        self._text = self._text[len(expected) :]
        return True

    def until(self, markers: Sequence[str], sink: Sink) -> Reading:
        """Read to the first of `markers` and over it; the text before it goes to `sink` as it comes.

        Returns the marker, or None when the text ends without one. No marker may hold another.
        """
        while True:
            found = [(start, m) for m in markers if (start := self._text.find(m)) >= 0]
            if found:
                start, marker = min(found)
                before, self._text = self._text[:start], self._text[start + len(marker) :]
                sink(before)
                return marker
            end = len(self._text) - _num_held_back(self._text, markers)
            before, self._text = self._text[:end], self._text[end:]
            sink(before)
            if not (yield from self.fill()):
                before, self._text = self._text, ""
                sink(before)
                return None

    def unread(self, text: str) -> None:
        """Put `text` back in front."""
        self._text = text + self._text

    def rest(self, sink: Sink) -> Reading:
        """Read all there is to come."""
        yield from self.until((), sink)

    def json_value(self, sink: Sink) -> Reading:
        """Read one JSON value, as it is spelt; True if it is whole. What is wrong inside it stays in it."""
        yield from self.blanks()
        first = yield from self.peek()
        if first == '"':
            return (yield from self._json_string(sink))
        if first not in ("{", "["):
            return (yield from self._json_scalar(sink))
        depth = 0
        while True:
            for at, char in enumerate(self._text):
                if char == '"':
                    self._pass(at, sink)
                    break
                depth += (char in "{[") - (char in "}]")
                if depth == 0:
                    self._pass(at + 1, sink)
                    return True
            else:
                self._pass(len(self._text), sink)
                if not (yield from self.fill()):
                    return False
                continue
            if not (yield from self._json_string(sink)):
                return False

    def json_text(self) -> Reading:
        """Read one JSON value; its text."""
        pieces: list[str] = []
        yield from self.json_value(pieces.append)
        return "".join(pieces)

    def _json_string(self, sink: Sink) -> Reading:
        at, escaped = 1, False  # the opening quote is there
        while True:
            while at < len(self._text):
                char = self._text[at]
                at += 1
                if char == '"' and not escaped:
                    self._pass(at, sink)
                    return True
                escaped = char == "\\" and not escaped
            self._pass(at, sink)
            at = 0
            if not (yield from self.fill()):
                return False

    def _json_scalar(self, sink: Sink) -> Reading:
        while True:
            end = next((i for i, char in enumerate(self._text) if char in _SCALAR_ENDS), None)
            if end is not None:
                self._pass(end, sink)
                return True
            self._pass(len(self._text), sink)
            if not (yield from self.fill()):
                return True

    def _pass(self, count: int, sink: Sink) -> None:
        sink(self._text[:count])
        self._text = self._text[count:]


def _num_held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a marker."""
    for length in range(min(len(text), max(map(len, markers), default=0)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
