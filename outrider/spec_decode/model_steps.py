"""How many steps a drafting model should run, for whom, in this step.

Drafting with a model takes time before anyone knows how sure it will be of its drafts. What it will be
worth is told by its recent drafts: their calibrated survivals stand for those to come. Per number of steps
the planner finds the rows that would then be verified and the rate of tokens per second that results; each
request then gets as many steps as pay for it, none if its own drafts have failed or free drafts already
do the work.

Where nothing is drafted nothing would be learned, so a small part of the time is spent on probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec_decode.cost import DraftCost, StepCost

# Conditional acceptance by depth that a drafter is taken to have before it is known. The first drafts stand
# for some that are sure and some that are not.
_PRIOR = (0.6, 0.5, 0.45, 0.4, 0.4, 0.35, 0.35, 0.3)
_PRIOR_SPREAD = (0.35, 1.0, 1.5)  # of the chance, capped


# The sources that run a model to draft.
MODEL_SOURCES = frozenset({"mtp", "draft_model"})


class _Worth(NamedTuple):
    """What drafting is worth in steps of one shape."""

    rate: float  # tokens per second of the best number of steps for everybody
    values: list[float]  # by number of steps: tokens gained for a request, less the time of their rows
    first: float  # chance that the first drafted token is accepted, mean


class ModelSteps:
    """Chooses the model steps of each request."""

    NUM_SAMPLES = 48  # recent drafts that stand for the next ones
    REFRESH = 32  # rounds that share an estimate
    PROBE_SHARE = 0.004  # of all time
    PROBE_STEPS = 2  # how far a probe drafts
    PROBE_ROUNDS = 2  # a drafter that was off first has to catch up, so a single round tells little
    SHARE_RATE = 0.05  # weight of a draft in the mean share of a depth
    MIN_GAIN = 0.01  # of the tokens, to begin drafting; any gain will do to go on

    def __init__(self, cost: StepCost, draft_cost: DraftCost, max_steps: int) -> None:
        self.max_steps = max_steps
        self._cost = cost
        self._draft_cost = draft_cost
        self._samples: NDArray[np.float64] = _first_samples(self.NUM_SAMPLES, max_steps)
        self._next_sample = 0
        self._shares = list((_PRIOR * 2)[:max_steps])  # conditional, by depth
        self._worths: dict[tuple[int, int, int], _Worth] = {}
        self._rounds = 0
        self._is_on = False
        self._probe_seconds = 0.0  # what probes may still take
        self._probed: dict[str, int] = {}  # request -> rounds its probe still runs
        self._last_probe: dict[str, int] = {}  # request -> round

    def record(self, survivals: Sequence[float], num_asked: int) -> None:
        """What a request's draft of `num_asked` steps looked like, by depth; calibrated, but not shifted by
        the request. A draft that ends before was given up by its source."""
        row = self._samples[self._next_sample]
        self._next_sample = (self._next_sample + 1) % self.NUM_SAMPLES
        alive = 1.0
        for depth in range(self.max_steps):
            if depth < len(survivals):
                before, alive = alive, survivals[depth]
                self._shares[depth] += self.SHARE_RATE * (alive / before - self._shares[depth])
            elif depth < num_asked:
                alive = 0.0
            else:  # not drafted: as others fared there
                alive *= self._shares[depth]
            row[depth] = alive

    def earn(self, seconds: float) -> None:
        """A step took so long: a part of that may go into probes."""
        self._probe_seconds = min(self._probe_seconds + self.PROBE_SHARE * seconds, 64 * seconds)

    def spend(self, seconds: float) -> None:
        """Drafting that was a probe took so long."""
        self._probe_seconds -= seconds

    def forget(self, request_id: str) -> None:
        self._probed.pop(request_id, None)
        self._last_probe.pop(request_id, None)

    def choose(
        self,
        request_ids: Sequence[str],
        needs: Sequence[float],
        factors: Sequence[float],
        shape: tuple[int, int, int],
    ) -> tuple[list[int], bool]:
        """(steps of each request, whether this is a probe).

        `needs`: what free drafts leave to be gained, 0 to 1; `factors`: on the odds of each request's
        drafts; `shape`: the next step's requests, rows without drafts and context.
        """
        self._rounds += 1
        if self._rounds % self.REFRESH == 0:
            self._worths.clear()
        worth = self._worth(*shape)
        weights = [need * _scale(worth.first, factor) for need, factor in zip(needs, factors, strict=True)]
        steps, gain = self._best(weights, worth)
        if gain <= (0.0 if self._is_on else self.MIN_GAIN * shape[0]):
            steps = [0] * len(weights)
        self._is_on = any(steps)
        return self._with_probe(request_ids, steps)

    def _best(self, weights: Sequence[float], worth: _Worth) -> tuple[list[int], float]:
        """The number of steps, and whom to run it for, that gains most; in tokens."""
        best_steps, best_gain, best_least = 0, 0.0, 0.0
        for num in range(1, self.max_steps + 1):
            value = worth.values[num]
            if value <= 0.0:
                continue
            # A request must pay for its own rows, all together for the calls.
            least = worth.rate * self._draft_cost.per_row * num / value
            chosen = [weight for weight in weights if weight > least]
            cost = self._draft_cost.seconds(num, num * len(chosen)) if chosen else 0.0
            gain = sum(chosen) * value - worth.rate * cost
            if gain > best_gain:
                best_steps, best_gain, best_least = num, gain, least
        return [best_steps if best_steps and weight > best_least else 0 for weight in weights], best_gain

    def _with_probe(self, request_ids: Sequence[str], steps: list[int]) -> tuple[list[int], bool]:
        """Let one of those that get nothing be drafted for, if there is time for it."""
        if all(steps) or not self.max_steps:
            return steps, False
        num = min(self.PROBE_STEPS, self.max_steps)
        running = [i for i, name in enumerate(request_ids) if self._probed.get(name) and not steps[i]]
        if not running:
            alone = not any(steps)
            cost = self._draft_cost.seconds(num, num) if alone else self._draft_cost.per_row * num
            if self._probe_seconds < cost * self.PROBE_ROUNDS:
                return steps, False
            idle = [i for i, num_steps in enumerate(steps) if not num_steps]
            chosen = min(idle, key=lambda i: self._last_probe.get(request_ids[i], -1))
            self._probed[request_ids[chosen]] = self.PROBE_ROUNDS
            self._last_probe[request_ids[chosen]] = self._rounds
            running = [chosen]
        is_probe = not any(steps)
        steps = list(steps)
        for i in running:
            steps[i] = num
            self._probed[request_ids[i]] -= 1
            if not is_probe:
                self.spend(self._draft_cost.per_row * num)
        return steps, is_probe

    def _worth(self, num_requests: int, num_rows: int, context: int) -> _Worth:
        """For this shape of step, from the recent drafts."""
        key = (num_requests, num_rows // 8, context // StepCost.CONTEXT_STEP)
        worth = self._worths.get(key)
        if worth is None:
            worth = self._worths[key] = self._estimate(num_requests, num_rows, context)
        return worth

    def _estimate(self, num_requests: int, num_rows: int, context: int) -> _Worth:
        curve = np.asarray(self._cost.curve(context, num_rows + num_requests * self.max_steps))
        at = np.arange(len(curve))
        plain = float(curve[num_rows])
        part = num_requests / self.NUM_SAMPLES  # requests that a sample stands for
        options = []
        rate = num_requests / plain
        for num in range(1, self.max_steps + 1):
            # The likeliest nodes first: what admission would take, over many steps.
            nodes = np.sort(self._samples[:, :num], axis=None)[::-1]
            tokens = np.concatenate(([0.0], np.cumsum(nodes))) * part
            seconds = np.interp(num_rows + np.arange(len(tokens)) * part, at, curve)
            drafting = self._draft_cost.seconds(num, num * num_requests)
            rate = max(rate, float(np.max((num_requests + tokens) / (seconds + drafting))))
            options.append((tokens, seconds))
        values = [0.0] + [
            float(np.max(tokens - rate * (seconds - plain))) / num_requests for tokens, seconds in options
        ]
        return _Worth(rate, values, float(np.mean(self._samples[:, 0])) if self.max_steps else 0.0)

    def stats(self) -> dict[str, Any]:
        return {
            "is_drafting": self._is_on,
            "expected_survival": [round(float(mean), 4) for mean in self._samples.mean(axis=0)],
            "draft_cost": self._draft_cost.stats(),
        }


def _first_samples(num: int, max_steps: int) -> NDArray[np.float64]:
    rows = []
    for i in range(num):
        spread = _PRIOR_SPREAD[i % len(_PRIOR_SPREAD)]
        shares = [min(0.95, chance * spread) for chance in (_PRIOR * 2)[:max_steps]]
        rows.append(np.cumprod(shares))
    return np.array(rows).reshape(num, max_steps)


def _scale(first: float, factor: float) -> float:
    """How a request's factor on the odds changes what its drafts are worth."""
    if factor == 1.0 or not 0.0 < first < 1.0:
        return 1.0
    odds = first / (1.0 - first) * factor
    return float((odds / (1.0 + odds) / first) ** 1.5)
