"""How many drafted tokens are worth verifying, over the whole batch.

Every step takes the proposed nodes of all requests in order of survival and admits the number that gives
the most expected tokens per second:

    (number of requests + sum of the admitted survivals) / T(rows)

`T` comes from a calibration and is corrected by what steps really take. Zero drafts is always a candidate.
Under the law any choice is safe: it changes when tokens come, never which.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from typing import Any

from outrider.spec_decode.calibration import Calibration, interpolate
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts


class StepCost:
    """T(rows, context): the calibrated curve, bent by what was observed.

    The correction is a factor for each stretch between calibrated row counts, on top of one for all: a
    machine that became slower as a whole changes no decision.
    """

    RATE = 0.08  # weight of a new observation in the common factor
    BEND_RATE = 0.02  # and in that of its own row count
    MOST_SURPRISE = 0.25  # of the logarithm; a step that the machine interrupted must not bend the curve
    REFRESH = 32  # observations between two looks at the correction
    CONTEXT_STEP = 256  # contexts that share a curve

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._common = 0.0
        self._bends = [1.0] * len(calibration.rows)
        self._num_observed = 0
        self._plain: dict[int, list[float]] = {}  # by context step, without correction
        self._curves: dict[int, list[float]] = {}

    def curve(self, context: int, num_rows: int) -> list[float]:
        """Seconds of a step with 0.. at least `num_rows` rows; never decreasing."""
        step = context // self.CONTEXT_STEP
        curve = self._curves.get(step)
        if curve is None or len(curve) <= num_rows:
            plain = self._plain_curve(step, num_rows)
            curve = [seconds * self._factor(rows) for rows, seconds in enumerate(plain)]
            for rows in range(1, len(curve)):
                curve[rows] = max(curve[rows], curve[rows - 1])
            self._curves[step] = curve
        return curve

    def _plain_curve(self, step: int, num_rows: int) -> list[float]:
        plain = self._plain.get(step)
        if plain is None or len(plain) <= num_rows:
            length = max(128, 2 * num_rows)
            plain = self._plain[step] = self._calibration.curve(step * self.CONTEXT_STEP, length)
        return plain

    def _factor(self, rows: int) -> float:
        """The correction at `rows`, linear between the calibrated counts so that the curve has no steps."""
        known = self._calibration.rows
        return math.exp(self._common) * interpolate(known, self._bends, min(rows, known[-1]))

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """A step with this many rows took so long."""
        known = self._calibration.rows
        if not 1 <= rows <= 2 * known[-1] or not seconds > 0:
            return  # a long prompt's step says nothing about verifying
        plain = self._plain_curve(context // self.CONTEXT_STEP, rows)[rows]
        surprise = math.log(seconds / plain / self._factor(rows))
        surprise = max(-self.MOST_SURPRISE, min(self.MOST_SURPRISE, surprise))
        nearest = min(range(len(known)), key=lambda i: abs(known[i] - rows))
        self._common += self.RATE * surprise
        self._bends[nearest] *= math.exp(self.BEND_RATE * surprise)
        self._num_observed += 1
        if self._num_observed % self.REFRESH == 0:
            self._curves.clear()

    def stats(self) -> dict[str, Any]:
        return {
            "rows": list(self._calibration.rows),
            "contexts": list(self._calibration.contexts),
            "seconds": [list(row) for row in self._calibration.seconds],
            "correction": [round(self._factor(rows), 4) for rows in self._calibration.rows],
            "observed_steps": self._num_observed,
        }


class Controller:
    """Chooses which proposed nodes are verified."""

    NUM_REMEMBERED = 64  # decisions, for people to look at

    def __init__(self, cost: StepCost, *, adaptive: bool = True, min_gain: float = 0.01) -> None:
        """`adaptive=False`: verify exactly what was proposed.

        To start verifying, speculation must promise `min_gain` more tokens per second than plain decoding;
        to go on, any gain will do. So the batch does not flicker between two shapes that are equally good.
        """
        self._cost = cost
        self._adaptive = adaptive
        self._min_gain = min_gain
        self._is_speculating = False
        self._decisions: deque[tuple[int, int, int, float]] = deque(maxlen=self.NUM_REMEMBERED)

    def admit(
        self, proposals: Sequence[Drafts], num_requests: int, other_rows: int = 0, context: int = 0
    ) -> list[Drafts]:
        """What to verify of each proposal: the proposal itself, a part of it, or nothing.

        `num_requests` will get a token without drafts (those without a proposal count too); `other_rows` are
        rows of the step beside them, such as a prompt's; `context` is their mean length.
        """
        num_proposed = sum(map(len, proposals))
        if not self._adaptive or num_proposed == 0:
            return list(proposals)
        if len(proposals) == 1 and proposals[0].is_chain:
            # Survival only falls along a chain: it is in order as it stands.
            survival = proposals[0].survival
            num = self._best_number(survival, num_proposed, num_requests, other_rows, context)
            return [proposals[0].first(num) if num else NO_DRAFTS]
        # Merged only as far as nodes are worth a look.
        ordered: list[tuple[float, int, int]] = []

        def by_survival() -> Iterator[float]:
            for node in merge(*map(_in_order, range(len(proposals)), proposals)):
                ordered.append(node)
                yield -node[0]

        num = self._best_number(by_survival(), num_proposed, num_requests, other_rows, context)
        chosen: list[list[int]] = [[] for _ in proposals]
        for _, i, node in ordered[:num]:
            chosen[i].append(node)
        return [_part(drafts, nodes) for drafts, nodes in zip(proposals, chosen, strict=True)]

    def _best_number(
        self, survival: Iterable[float], num_nodes: int, num_requests: int, other_rows: int, context: int
    ) -> int:
        """How many of the nodes, given in falling order of survival, give the most tokens per second."""
        base = num_requests + other_rows
        seconds = self._cost.curve(context, base + num_nodes)
        plain = best = num_requests / seconds[base]
        needed = plain if self._is_speculating else plain * (1.0 + self._min_gain)
        chosen = 0
        tokens = float(num_requests)
        for num, alive in enumerate(survival, start=1):
            tokens += alive
            step = seconds[base + num]
            rate = tokens / step
            if rate > best:
                best, chosen = rate, num
            elif (tokens + alive * (num_nodes - num)) / step <= best:
                break  # nothing after this survives better, and no step with more rows is shorter
        if best <= needed:
            chosen, best = 0, plain
        self._is_speculating = chosen > 0
        self._decisions.append((num_requests, num_nodes, chosen, best / plain if plain else 1.0))
        return chosen

    def observe_step(self, rows: int, context: int, seconds: float) -> None:
        """A step with this many rows took so long, from planning to drafting."""
        self._cost.observe(rows, context, seconds)

    def stats(self) -> dict[str, Any]:
        return {
            "adaptive": self._adaptive,
            "cost": self._cost.stats(),
            "decisions": [
                {
                    "requests": requests,
                    "proposed": proposed,
                    "admitted": admitted,
                    "expected_gain": round(gain, 3),
                }
                for requests, proposed, admitted, gain in self._decisions
            ],
        }


def _in_order(request: int, drafts: Drafts) -> Iterable[tuple[float, int, int]]:
    """(-survival, request, node) in order; of equals the parent comes first, as its index is lower."""
    nodes = ((-alive, request, node) for node, alive in enumerate(drafts.survival))
    return nodes if drafts.is_chain else sorted(nodes)


def _part(drafts: Drafts, nodes: list[int]) -> Drafts:
    if not nodes:
        return NO_DRAFTS
    return drafts.first(len(nodes)) if drafts.is_chain else drafts.select(sorted(nodes))
