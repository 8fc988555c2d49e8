"""From what a source believes of its drafts to what has become of such drafts.

A source gives each node a raw survival. Its share, the survival divided by the parent's, is the source's
guess that the node is accepted once its parent is. The table keeps, per source, depth and coarse bucket
of that guess, how often it came true, and turns guesses into odds that did. A request then shifts the odds
of a source's drafts for it, because requests differ: a drafter may be good for one and useless for another.

What is learned comes from every proposal, verified or not: the tokens that the request went on with tell
which drafted nodes were right as far as they reach. So estimates recover without verifying bad drafts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from outrider.spec_decode.proposer import Drafts

# Depths that share an estimate: 0, 1, 2, 3-4, 5-8, 9-16, 17 and more.
_GROUPS = (0, 1, 2, 3, 3, *[4] * 4, *[5] * 8, 6)
_GROUP_NAMES = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")
_LAST_DEPTH = len(_GROUPS) - 1
# Where one bucket of guesses ends and the next begins.
_EDGES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.97)
_NUM_BUCKETS = len(_EDGES) + 1
_NUM_CELLS = len(_GROUP_NAMES) * _NUM_BUCKETS
_MOST = 0.995  # certainty is not to be had


class _Source:
    """The cells of one source, and the factor on the odds that each stands for."""

    __slots__ = ("accepted", "factors", "guessed", "touched", "trials")

    def __init__(self) -> None:
        self.trials = [0.0] * _NUM_CELLS
        self.accepted = [0.0] * _NUM_CELLS
        self.guessed = [0.0] * _NUM_CELLS  # sum of the guesses
        self.factors = [1.0] * _NUM_CELLS
        self.touched: set[int] = set()


class RequestOdds:
    """One request's factor on the odds of one source's drafts.

    A Kalman filter over its logarithm: quick while little is known of the request, steady later.
    """

    DOUBT, DRIFT = 0.3, 0.006  # of the variance: at first, and an outcome, as text changes
    LIMIT = 4.0  # of the logarithm

    __slots__ = ("factor", "log", "variance")

    def __init__(self) -> None:
        self.log = 0.0
        self.variance = self.DOUBT
        self.factor = 1.0

    def observe(self, chance: float, was_accepted: bool) -> None:
        """A node that was given this chance did or did not come true."""
        information = chance * (1.0 - chance)
        self.variance /= 1.0 + self.variance * information
        self.log += self.variance * (was_accepted - chance)
        self.log = max(-self.LIMIT, min(self.LIMIT, self.log))
        self.variance += self.DRIFT
        self.factor = math.exp(self.log)

    def relax(self, share: float) -> None:
        """Go back towards knowing nothing, by that share."""
        self.log *= 1.0 - share
        self.factor = math.exp(self.log)


class AcceptanceTable:
    """Turns raw survivals into calibrated ones."""

    PRIOR_TRIALS = 12.0  # how many outcomes the source's own word is worth
    MEMORY = 300.0  # outcomes of a cell after which an old one counts 1/e
    REFRESH = 16  # rounds between two looks at what was learned; fewer at first

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}
        self._rounds = 0

    def calibrate(self, drafts: Drafts, shifts: dict[str, RequestOdds] | None = None) -> list[float]:
        """Survival of each node of a draft, never above its parent's."""
        if not drafts.is_chain:
            return self._calibrate_tree(drafts, shifts)
        alive = before = 1.0
        result: list[float] = []
        source_name, factors, shift = "", [], 1.0
        for depth, (raw, name) in enumerate(zip(drafts.survival, drafts.source, strict=True)):
            if name != source_name:
                source_name, factors, shift = name, *self._of(name, shifts)
            guess = raw / before
            before = raw
            alive *= _shifted(guess, factors[_cell(guess, depth)] * shift)
            result.append(alive)
        return result

    def _calibrate_tree(self, drafts: Drafts, shifts: dict[str, RequestOdds] | None) -> list[float]:
        result: list[float] = []
        depths: list[int] = []
        raws, parents, names = drafts.survival, drafts.parents, drafts.source
        for node, parent in enumerate(parents):
            depth, before, alive = 0, 1.0, 1.0
            if parent >= 0:
                depth, before, alive = depths[parent] + 1, raws[parent], result[parent]
            depths.append(depth)
            factors, shift = self._of(names[node], shifts)
            guess = raws[node] / before
            result.append(alive * _shifted(guess, factors[_cell(guess, depth)] * shift))
        return result

    def _of(self, name: str, shifts: dict[str, RequestOdds] | None) -> tuple[list[float], float]:
        """A source's factors, and a request's on top."""
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source()
        shift = shifts.get(name) if shifts else None
        return source.factors, shift.factor if shift is not None else 1.0

    def observe(self, drafts: Drafts, token_ids: Sequence[int], shifts: dict[str, RequestOdds]) -> None:
        """A request went on with these tokens after `drafts` had been proposed for it."""
        drafted, parents, raws = drafts.token_ids, drafts.parents, drafts.survival
        reached = {-1: 0}  # node on the path that came true -> tokens up to it
        for node, parent in enumerate(parents):
            depth = reached.get(parent)
            if depth is None or depth >= len(token_ids):
                if parent == node - 1 and drafts.is_chain:
                    break  # nothing below is known either
                continue
            was_accepted = drafted[node] == token_ids[depth]
            guess = raws[node] / raws[parent] if parent >= 0 else raws[node]
            self._count(drafts.source[node], guess, depth, was_accepted, shifts)
            if was_accepted:
                reached[node] = depth + 1

    def _count(
        self, name: str, guess: float, depth: int, was_accepted: bool, shifts: dict[str, RequestOdds]
    ) -> None:
        self._of(name, None)
        source = self._sources[name]
        cell = _cell(guess, depth)
        keep = 1.0 - 1.0 / self.MEMORY
        source.trials[cell] = source.trials[cell] * keep + 1.0
        source.accepted[cell] = source.accepted[cell] * keep + was_accepted
        source.guessed[cell] = source.guessed[cell] * keep + guess
        source.touched.add(cell)
        shift = shifts.get(name)
        if shift is None:
            shift = shifts[name] = RequestOdds()
        shift.observe(_shifted(guess, source.factors[cell] * shift.factor), was_accepted)

    def end_round(self) -> None:
        """A step is over. Now and then this makes what was learned count."""
        self._rounds += 1
        if self._rounds % (self.REFRESH if self._rounds > 64 else 4) == 0:
            for source in self._sources.values():
                for cell in source.touched:
                    source.factors[cell] = self._factor(source, cell)
                source.touched.clear()

    def _factor(self, source: _Source, cell: int) -> float:
        """The factor on the odds: the cell's own record, shrunk to that of its depth, shrunk to none."""
        first = cell - cell % _NUM_BUCKETS
        depth = slice(first, first + _NUM_BUCKETS)
        trials, accepted = sum(source.trials[depth]), sum(source.accepted[depth])
        by_depth = _correction(trials, accepted, sum(source.guessed[depth]), self.PRIOR_TRIALS, 1.0)
        return _correction(
            source.trials[cell], source.accepted[cell], source.guessed[cell], self.PRIOR_TRIALS, by_depth
        )

    def mean(self, name: str, depth: int) -> tuple[float, float]:
        """(outcomes, share accepted) of a source's nodes at a depth whose parents were accepted."""
        source = self._sources.get(name)
        if source is None:
            return 0.0, 0.0
        first = _GROUPS[min(depth, _LAST_DEPTH)] * _NUM_BUCKETS
        trials = sum(source.trials[first : first + _NUM_BUCKETS])
        return trials, sum(source.accepted[first : first + _NUM_BUCKETS]) / trials if trials else 0.0

    def stats(self) -> dict[str, Any]:
        """Per source and depth: outcomes, acceptance, and the curve from guess to what came true."""
        return {name: _table_of(source) for name, source in self._sources.items() if any(source.trials)}


def _table_of(source: _Source) -> list[dict[str, Any]]:
    rows = []
    for group, depth in enumerate(_GROUP_NAMES):
        cells = range(group * _NUM_BUCKETS, (group + 1) * _NUM_BUCKETS)
        trials = sum(source.trials[c] for c in cells)
        if trials < 0.5:
            continue
        curve = [
            {
                "guessed": round(source.guessed[c] / source.trials[c], 4),
                "accepted": round(source.accepted[c] / source.trials[c], 4),
                "outcomes": round(source.trials[c], 1),
            }
            for c in cells
            if source.trials[c] >= 0.5
        ]
        accepted = sum(source.accepted[c] for c in cells) / trials
        rows.append(
            {"depth": depth, "outcomes": round(trials, 1), "accepted": round(accepted, 4), "curve": curve}
        )
    return rows


def _cell(guess: float, depth: int) -> int:
    return _GROUPS[min(depth, _LAST_DEPTH)] * _NUM_BUCKETS + bisect_right(_EDGES, guess)


def _shifted(chance: float, factor: float) -> float:
    """The chance after its odds were multiplied."""
    if factor == 1.0:
        return chance
    chance = min(chance, _MOST)
    odds = chance * factor
    return odds / (odds + 1.0 - chance)


def _correction(trials: float, accepted: float, guessed: float, prior: float, before: float) -> float:
    """The factor on the odds that explains the outcomes, `prior` outcomes worth of `before` added."""
    if trials < 0.5:
        return before
    guess = min(max(guessed / trials, 1e-4), _MOST)
    expected = _shifted(guess, before)
    share = (accepted + prior * expected) / (trials + prior)
    share = min(max(share, 1e-4), _MOST)
    return share * (1.0 - guess) / ((1.0 - share) * guess)
