"""How likely is a drafted token to be accepted? Estimates that learn from what was verified.

A source sorts its drafts into classes (n-gram matching: by the length of the match). Per class and depth
the table keeps the share of tokens accepted among those whose predecessors were, shrunk to a prior that
it starts from and goes back to when nothing is seen. A request then shifts the odds of everything drafted
for it, because requests differ more than classes do: text that copies its prompt, and text that does not.

Estimates only steer how much is verified. They never change a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_DEPTH = 32
# Depths that share an estimate: 0, 1, 2, 3, 4-5, 6-8, 9-13, 14 and more.
_GROUP = [0, 1, 2, 3, 4, 4, *[5] * 3, *[6] * 5, *[7] * (MAX_DEPTH - 14)]
_NUM_GROUPS = 8


class SurvivalTable:
    """Acceptance by class and depth, shared by all requests of an engine."""

    PRIOR_TRIALS = 16.0  # how many observations the prior is worth
    MEMORY = 400.0  # observations of a cell after which an old one counts 1/e
    REFRESH = 16  # rounds between two looks at the table by its readers
    FORGETTING = 0.99  # of all evidence, at each refresh: unseen classes return to their priors

    def __init__(self, priors: Sequence[float]) -> None:
        """`priors[c]`: the share of class c's tokens that is accepted once their predecessors are."""
        self._priors = tuple(priors)
        self._trials = [[0.0] * _NUM_GROUPS for _ in priors]
        self._accepted = [[0.0] * _NUM_GROUPS for _ in priors]
        self._rounds = 0
        self._odds: list[list[float]] = []
        self._refresh()

    def probability(self, klass: int, depth: int) -> float:
        """Chance that a token at `depth` (from 0) is accepted, given that those before it are."""
        group = _GROUP[min(depth, MAX_DEPTH - 1)]
        trials, accepted = self._trials[klass][group], self._accepted[klass][group]
        return (accepted + self.PRIOR_TRIALS * self._priors[klass]) / (trials + self.PRIOR_TRIALS)

    def odds(self, klass: int) -> list[float]:
        """p / (1 - p) for each depth below MAX_DEPTH, as of the last refresh."""
        return self._odds[klass]

    def observe(self, klass: int, num_accepted: int, was_rejected: bool) -> None:
        """A chain of this class had `num_accepted` tokens accepted and then, perhaps, one rejected."""
        for depth in range(num_accepted + was_rejected):
            group = _GROUP[min(depth, MAX_DEPTH - 1)]
            keep = 1.0 - 1.0 / self.MEMORY
            self._trials[klass][group] = self._trials[klass][group] * keep + 1.0
            self._accepted[klass][group] = self._accepted[klass][group] * keep + (depth < num_accepted)

    def end_round(self) -> None:
        """A step is over. Now and then this makes what was learned visible in `odds`."""
        self._rounds += 1
        if self._rounds % self.REFRESH == 0:
            self._refresh()

    def _refresh(self) -> None:
        for cells in (*self._trials, *self._accepted):
            cells[:] = [value * self.FORGETTING for value in cells]
        self._odds = []
        for klass in range(len(self._priors)):
            by_group = [self.probability(klass, _GROUP.index(group)) for group in range(_NUM_GROUPS)]
            self._odds.append([by_group[group] / (1.0 - by_group[group]) for group in _GROUP])


class RequestShift:
    """One request's factor on the odds: above 1 where its drafts fare better than the table says."""

    RATE = 0.25  # step along the gradient of the log-likelihood
    LIMIT = 3.0  # of the factor's logarithm
    FORGETTING = 0.99  # per round: a request that was given up is tried again

    __slots__ = ("_log", "factor")

    def __init__(self) -> None:
        self._log = 0.0
        self.factor = 1.0

    def relax(self) -> None:
        """A round passes."""
        if self._log:
            self._set(self._log * self.FORGETTING)

    def observe(self, odds: Sequence[float], num_accepted: int, was_rejected: bool) -> None:
        """The outcome of a chain whose tokens had these odds by the table."""
        surprise = 0.0
        for depth in range(min(num_accepted + was_rejected, MAX_DEPTH)):
            shifted = odds[depth] * self.factor
            surprise += (depth < num_accepted) - shifted / (1.0 + shifted)
        self._set(self._log + self.RATE * max(-1.0, min(1.0, surprise)))

    def _set(self, log: float) -> None:
        self._log = max(-self.LIMIT, min(self.LIMIT, log))
        self.factor = math.exp(self._log)
