"""How answers look in a terminal: tokens in the colour of their source, figures, and what Ctrl-C does."""

from __future__ import annotations

import codecs
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

RESET, DIM, BOLD = "\x1b[0m", "\x1b[2m", "\x1b[1m"
COLOURS = {
    "model": "", "mtp": "\x1b[35m", "ngram": "\x1b[32m", "suffix": "\x1b[36m", "predicted": "\x1b[33m",
    "grammar": "\x1b[93m", "draft_model": "\x1b[34m", "phrases": "\x1b[96m",
    "mtp_second": "\x1b[95m",
}  # fmt: skip
OTHER = "\x1b[94m"


class TokenWriter:
    """Writes tokens in the colour of their source, in whole characters."""

    def __init__(self, tokenizer: Any, colour: bool) -> None:
        self._table = tokenizer.token_bytes()
        self._special = tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._colour = colour

    def write(self, token_ids: Sequence[int], sources: Sequence[str]) -> None:
        for token_id, source in zip(token_ids, sources, strict=True):
            piece = b"" if token_id in self._special else self._table[token_id]
            text = plain(self._decoder.decode(piece))
            sys.stdout.write(coloured(text, source) if self._colour else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line of its own, dimmed."""
        sys.stdout.write(f"\n{DIM}{text}{RESET}\n" if self._colour else f"\n{text}\n")
        sys.stdout.flush()


def plain(text: str) -> str:
    """Without control characters: what a model writes must not steer the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def coloured(text: str, source: str) -> str:
    """Text in the colour of a source; the model's own stays as it is."""
    colour = COLOURS.get(source, OTHER)
    return f"{colour}{text}{RESET}" if colour and text else text


def legend() -> str:
    """The sources in their colours."""
    return " ".join(coloured(source, source) for source in COLOURS if source != "model")


def speed(last: Any, first_count: int, seconds: float) -> float | None:
    """Tokens per second from the first increment to the last; None when there was only one."""
    count = last.num_output_tokens - first_count
    return count / seconds if count > 0 and seconds > 0 else None


def figures(last: Any, first_count: int, wait_s: float, seconds: float, colour: bool) -> str:
    """Speed and acceptance of an answer, in a line."""
    if last is None:
        return "no tokens"
    parts = []
    if (rate := speed(last, first_count, seconds)) is not None:
        parts.append(f"{rate:.1f} tokens/s")
    parts += [f"{last.num_output_tokens} tokens", f"first after {wait_s:.2f} s"]
    stats = last.speculation
    if stats is not None and stats.draft_tokens:
        parts.append(f"{stats.mean_acceptance_length:.2f} tokens a step")
        for source, (drafted, accepted) in stats.by_source.items():
            # The colour ends all attributes, so the rest of the line is dimmed anew.
            name = coloured(source, source) + DIM if colour else source
            parts.append(f"{name} {accepted}/{drafted} accepted")
    return ", ".join(parts)


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """In the block Ctrl-C only sets what the yielded function tells, so that no engine step is broken off.

    A second Ctrl-C interrupts as usual.
    """
    stopped = False

    def note(number: int, frame: Any) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: stopped
    finally:
        signal.signal(signal.SIGINT, before)
