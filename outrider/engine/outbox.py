"""Increments on their way to the readers: sent at once when somebody waits for them, else a few together.

Waking the reader's process for every token takes time from the next step where both share the cores. A
step of a small model is over in a few milliseconds, far below what a reader can see, so increments that
follow each other that fast travel together. First tokens and ends never wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from outrider.request import RequestOutput


class Outbox:
    """Holds increments for at most `interval_s` plus one short step."""

    def __init__(
        self,
        send: Callable[[list[RequestOutput]], None],
        *,
        interval_s: float = 0.008,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._interval_s = interval_s
        self._clock = clock
        self._held: dict[str, RequestOutput] = {}
        self._last_sent = clock()

    def add(self, outputs: Iterable[RequestOutput], *, can_wait: bool) -> None:
        """Take the increments of a step. `can_wait`: the next step will be short, so they may go with its."""
        held = self._held
        for output in outputs:
            earlier = held.get(output.request_id)
            held[output.request_id] = output if earlier is None else merge(earlier, output)
            is_first = output.num_output_tokens == len(output.token_ids)
            if is_first or output.finish_reason is not None:
                can_wait = False
        if held and not (can_wait and self._clock() - self._last_sent < self._interval_s):
            self.flush()

    def flush(self) -> None:
        """Send what is held."""
        if self._held:
            outputs = list(self._held.values())
            self._held.clear()
            self._send(outputs)
            self._last_sent = self._clock()


def merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two increments of a request as one; its totals and its end are those of the later."""
    later.token_ids = earlier.token_ids + later.token_ids
    later.text = earlier.text + later.text
    later.sources = earlier.sources + later.sources
    if earlier.logprobs is not None or later.logprobs is not None:
        later.logprobs = (earlier.logprobs or []) + (later.logprobs or [])
    return later
