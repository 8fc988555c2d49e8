"""Whether a proposer can be trusted with the time of the requests.

One that raises or returns nonsense has its drafts dropped; one that goes on failing, or takes longer than
its drafts gain, is not asked for a while, each time twice as long. All of it is counted, and each kind of
failure is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_MOST_FAILURES = 8  # rounds in a row before a pause
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 4096  # rounds
_FREE_SHARE = 0.01  # of a step: what drafting may take without anything to show for it
_MOST_DEBT = 12.0  # plain steps that drafting may have lost before a pause
_MOST_LOST = 4.0  # plain steps that count as lost in a single one
_ROUNDS_OF_PROBATION = 512  # after a pause without another, the next one is short again


class DraftHealth:
    """Failures and lost time of one proposer."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}  # by what was asked
        self.num_pauses = 0
        self.last_error = ""
        self.pause_reason = ""
        self._failures = 0  # rounds in a row
        self._debt = 0.0  # seconds
        self._pause_left = 0
        self._next_pause = _FIRST_PAUSE
        self._rounds_since_pause = 0

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())

    @property
    def is_paused(self) -> bool:
        return self._pause_left > 0

    def guarded(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """What the call returns, or None when it fails."""
        try:
            return call(*args)
        except Exception as error:
            if what not in self.errors:
                logger.exception("the proposer failed (%s: %s); its drafts are dropped", what, error)
            self.errors[what] = self.errors.get(what, 0) + 1
            self.last_error = f"{what}: {type(error).__name__}: {error}"
            return None

    def may_propose(self) -> bool:
        """Whether the proposer is asked in this round."""
        if self._pause_left:
            self._pause_left -= 1
            return False
        self._rounds_since_pause += 1
        if self._rounds_since_pause == _ROUNDS_OF_PROBATION:
            self._next_pause = _FIRST_PAUSE
        return True

    def end_round(self, has_failed: bool) -> None:
        """A round of proposing is over."""
        self._failures = self._failures + 1 if has_failed else 0
        if self._failures >= _MOST_FAILURES:
            self._pause(f"it failed {self._failures} times in a row ({self.last_error})")

    def observe(self, drafting_seconds: float, gained_seconds: float, step_seconds: float) -> None:
        """A step of `step_seconds` spent so long on drafting, and was so much shorter for its drafts than the
        plain steps it replaced (0 if it was not)."""
        plain = max(step_seconds - drafting_seconds, 1e-6)
        lost = drafting_seconds - max(0.0, gained_seconds) - _FREE_SHARE * step_seconds
        # A single interruption by the machine is no reason to pause.
        self._debt = max(0.0, self._debt + min(lost, _MOST_LOST * plain))
        if self._debt > _MOST_DEBT * plain:
            self._pause(f"drafting took {self._debt:.3g} s more than its drafts gained")

    def _pause(self, reason: str) -> None:
        if not self.num_pauses:
            logger.warning("drafting is paused for %d steps: %s", self._next_pause, reason)
        self.num_pauses += 1
        self.pause_reason = reason
        self._pause_left = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._rounds_since_pause = self._failures = 0
        self._debt = 0.0

    def stats(self) -> dict[str, Any]:
        return {
            "errors": dict(self.errors),
            "last_error": self.last_error or None,
            "pauses": self.num_pauses,
            "paused_for_steps": self._pause_left,
            "pause_reason": self.pause_reason or None,
        }
