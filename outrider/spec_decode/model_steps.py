"""How many steps a drafting model should run, for whom, in this step.

Drafting with a model takes time before anyone knows how sure it will be of its drafts. What it will be
worth is told by a request's recent drafts: each is priced as it is made, in tokens gained less the time of
the rows that verify them, for every number of steps it could have had. Drafting then gets the number of
steps that gains most over the whole batch, after its own time is paid; a request whose drafts do not pay
for their rows is left out, and all are if drafting as a whole does not pay.

Where nothing is drafted nothing would be learned, so a small part of the time is spent on probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.spec_decode.cost import DraftCost, StepCost

# The sources that run a model to draft.
MODEL_SOURCES = frozenset({"mtp", "draft_model"})

# Conditional acceptance by depth that a drafter is taken to have before it is known.
_PRIOR = (0.6, 0.5, 0.45, 0.4, 0.4, 0.35, 0.35, 0.3)


class _Worth:
    """What drafting has been worth for one request, by number of steps; in tokens."""

    __slots__ = ("num_drafts", "values")

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.num_drafts = 0

    def add(self, values: Sequence[float], least_weight: float) -> None:
        self.num_drafts += 1
        weight = max(least_weight, 1.0 / (self.num_drafts + 1))
        self.values = [old + weight * (new - old) for old, new in zip(self.values, values, strict=True)]


class ModelSteps:
    """Chooses the model steps of each request."""

    PROBE_SHARE = 0.006  # of all time, catching up included
    PROBE_STEPS = 2  # how far a probe drafts
    PROBE_ROUNDS = 2  # a drafter that was off first has to catch up, so a single round tells little
    FED_AT_ONCE = 2  # tokens of a request that are fed as a matter of course
    PAID_OFF_IN = 64  # steps, or half of what may be left of the request
    MOST_SAVED = 4.0  # steps' time that probes may have saved up
    RATE = 0.1  # weight of a draft in its request's worth
    POOL_RATE = 0.04  # and in that of all requests, which new ones begin with
    GAIN_RATE = 0.05  # weight of a step in the gain over plain decoding
    REST = 6  # rounds that nothing is reconsidered after nothing was chosen for the same requests
    MIN_GAIN = 0.01  # of the tokens, to begin drafting; any gain will do to go on
    REFRESH = 8  # rounds between two looks at what is typical
    SHARE_TRIALS = 4.0  # how many drafts a depth's likeness to the one before is worth
    SHARE_MEMORY = 0.985  # of what is known of a depth, a draft: deeper ones are tried again now and then

    def __init__(self, cost: StepCost, draft_cost: DraftCost, max_steps: int) -> None:
        self.max_steps = max_steps
        self.margin = 0.0  # of the tokens: more gain that is asked for, as promised gains did not come
        self._cost = cost
        self._draft_cost = draft_cost
        self._prior = list((_PRIOR * 2)[:max_steps])
        self._shares = [[0.0, 0.0] for _ in range(max_steps)]  # by depth: weight, sum of s / s before
        self.typical = self._extended([], 0)  # survival by depth
        self._worths: dict[str, _Worth] = {}
        self._pool: _Worth | None = None
        self._gain = 1.0  # recent rate over that of plain decoding
        self._num_extra_rows = 0.0  # admitted lately, a step
        self._rate = 0.0  # tokens per second of this round
        self._prices = [0.0] * (max_steps + 1)  # of that many more rows in this round, in tokens
        self._rounds = 0
        self._resting: tuple[Sequence[str], int] = ((), 0)  # for whom, until which round
        self._num_steps = 0  # chosen last
        self._probe_seconds = 0.0  # what probes may still take
        self._probed: dict[str, int] = {}  # request -> rounds its probe still runs
        self._last_probe: dict[str, int] = {}  # request -> round

    # --- choosing ---

    def rests(self, request_ids: Sequence[str]) -> bool:
        """Whether nothing is chosen in this round without a look at it: looking takes time too."""
        whom, until = self._resting
        if self._rounds + 1 >= until or whom != request_ids:
            return False
        self._rounds += 1
        return True

    def begin_round(self, num_requests: int, num_rows: int, context: int) -> None:
        """Price the rows of a step of this shape: requests, rows without drafts and context."""
        self._rounds += 1
        others = num_rows + round(self._num_extra_rows * (num_requests - 1) / max(num_requests, 1))
        curve = self._cost.curve(context, others + self.max_steps)
        plain = curve[num_requests] + self._cost.of_requests(num_requests)
        self._rate = rate = self._gain * num_requests / plain
        before = curve[others]
        self._prices = [rate * (seconds - before) for seconds in curve[others : others + self.max_steps + 1]]

    def choose(
        self,
        request_ids: Sequence[str],
        needs: Sequence[float],
        behind: Sequence[int],
        num_left: Sequence[int],
        num_requests: int,
    ) -> tuple[list[int], bool]:
        """(steps of each request, whether this is nothing but a probe).

        `needs`: what free drafts leave to be gained, 0 to 1; `behind`: tokens that the model has to be fed
        before it can draft for a request; `num_left`: tokens that a request may still get.
        """
        pool = self._pool
        if pool is None:
            pool = self._pool = _Worth(self._priced(self._extended([], 0)))
        worths = []
        for name in request_ids:
            worth = self._worths.get(name)
            worths.append(pool.values if worth is None else worth.values)
        fed_token = self._rate * self._draft_cost.per_fed_token
        most = self.FED_AT_ONCE
        # Catching up from far behind has to be paid off before the request ends, which may be early.
        feeding = [
            fed_token
            * (num if num <= most else most + (num - most) / max(min(left / 2, self.PAID_OFF_IN), 1.0))
            for num, left in zip(behind, num_left, strict=True)
        ]
        num_steps, chosen, gain = self._best(worths, needs, feeding)
        least = self.margin + (0.0 if self._num_steps else self.MIN_GAIN)
        if gain <= least * num_requests:
            num_steps = 0
        self._num_steps = num_steps
        steps = [num_steps if is_chosen else 0 for is_chosen in chosen] if num_steps else [0] * len(needs)
        steps, is_probe = self._with_probe(request_ids, behind, steps)
        # Where free drafts do the work now, the next round may be different.
        if not is_probe and not num_steps and min(needs, default=1.0) > 0.5:
            self._resting = (request_ids, self._rounds + self.REST)
        return steps, is_probe

    def _best(
        self, worths: Sequence[Sequence[float]], needs: Sequence[float], feeding: Sequence[float]
    ) -> tuple[int, list[bool], float]:
        """(number of steps that gains most, for whom, gain in tokens)."""
        best: tuple[int, list[bool], float] = (0, [], 0.0)
        for num in range(1, self.max_steps + 1):
            # A request must pay for its own rows in the drafter, all together for its calls.
            rows = self._rate * self._draft_cost.per_row * num
            values = [
                need * worth[num] - fed - rows
                for worth, need, fed in zip(worths, needs, feeding, strict=True)
            ]
            gain = sum([value for value in values if value > 0.0])
            if gain > best[2]:
                gain -= self._rate * self._draft_cost.seconds(num, 0)
                if gain > best[2]:
                    best = (num, [value > 0.0 for value in values], gain)
        return best

    # --- probing ---

    def is_probing(self, request_id: str) -> bool:
        return request_id in self._probed

    def earn(self, seconds: float) -> None:
        """A step took so long: a part of that may go into probes."""
        self._probe_seconds = min(self._probe_seconds + self.PROBE_SHARE * seconds, self.MOST_SAVED * seconds)

    def spend(self, seconds: float) -> None:
        """Drafting that was a probe took so long."""
        self._probe_seconds -= seconds

    def _with_probe(
        self, request_ids: Sequence[str], behind: Sequence[int], steps: list[int]
    ) -> tuple[list[int], bool]:
        """Let one of those that get nothing be drafted for, if there is time for it."""
        if all(steps):
            return steps, False
        num = min(self.PROBE_STEPS, self.max_steps)
        is_alone = not any(steps)
        probed = self._probed
        chosen = [i for i, name in enumerate(request_ids) if probed and probed.get(name) and not steps[i]]
        if not chosen:
            cost = self._draft_cost.seconds(num, num) if is_alone else self._draft_cost.per_row * num
            if self._probe_seconds < cost * self.PROBE_ROUNDS:
                return steps, False
            idle = [i for i, num_steps in enumerate(steps) if not num_steps]
            # The least recent: new requests first, and of those whom little has to be read of.
            first = min(idle, key=lambda i: (self._last_probe.get(request_ids[i], -1), behind[i]))
            cost = cost * self.PROBE_ROUNDS + self._draft_cost.per_fed_token * behind[first]
            if self._probe_seconds < cost:
                return steps, False
            if not is_alone:
                self.spend(cost)
            chosen = [first]
            probed[request_ids[first]] = self.PROBE_ROUNDS
            self._last_probe[request_ids[first]] = self._rounds
        for i in chosen:
            steps[i] = num
            probed[request_ids[i]] -= 1
            if not probed[request_ids[i]]:
                del probed[request_ids[i]]
        return steps, is_alone

    # --- learning ---

    def record(self, request_id: str, survivals: Sequence[float], num_asked: int) -> None:
        """What a request's draft of `num_asked` steps looked like: survivals by depth, calibrated. A draft
        that ends before was given up by its source."""
        for depth in range(min(len(survivals), self.max_steps)):
            share = self._shares[depth]
            before = survivals[depth - 1] if depth else 1.0
            share[0] = share[0] * self.SHARE_MEMORY + 1.0
            share[1] = share[1] * self.SHARE_MEMORY + survivals[depth] / before
        for share in self._shares[len(survivals) :]:
            share[0] *= self.SHARE_MEMORY
            share[1] *= self.SHARE_MEMORY
        if self._rounds % self.REFRESH == 0:
            self.typical = self._extended([], 0)
        values = self._priced(self._extended(survivals, num_asked))
        assert self._pool is not None
        worth = self._worths.get(request_id)
        if worth is None:
            worth = self._worths[request_id] = _Worth(self._pool.values)
        worth.add(values, self.RATE)
        self._pool.add(values, self.POOL_RATE)

    def _extended(self, survivals: Sequence[float], num_asked: int) -> list[float]:
        """A draft as it might have gone on: as others did there, or like the depth before."""
        result = list(survivals[: self.max_steps])
        result += [0.0] * (min(num_asked, self.max_steps) - len(result))
        like = 0.0
        for depth in range(self.max_steps):
            weight, total = self._shares[depth]
            expected = 0.95 * like if like else self._prior[depth]
            like = (total + self.SHARE_TRIALS * expected) / (weight + self.SHARE_TRIALS)
            if depth >= len(result):
                result.append((result[-1] if result else 1.0) * like)
        return result

    def _priced(self, survivals: Sequence[float]) -> list[float]:
        """By number of steps: the tokens that the best beginning gains, less the price of its rows."""
        best, tokens = 0.0, 0.0
        values = [0.0]
        for alive, price in zip(survivals, self._prices[1:], strict=True):
            tokens += alive
            best = max(best, tokens - price)
            values.append(best)
        return values

    def observe_admission(self, gain: float, num_rows: int) -> None:
        """A step will give `gain` times the tokens per second of a plain one, with that many drafts."""
        self._gain += self.GAIN_RATE * (max(gain, 1.0) - self._gain)
        self._num_extra_rows += self.GAIN_RATE * (num_rows - self._num_extra_rows)

    def forget(self, request_id: str) -> None:
        self._worths.pop(request_id, None)
        self._probed.pop(request_id, None)
        self._last_probe.pop(request_id, None)

    def stats(self) -> dict[str, Any]:
        return {
            "model_steps": self._num_steps,
            "expected_survival": [round(value, 4) for value in self.typical],
            "worth_by_steps": [round(value, 4) for value in self._pool.values[1:]] if self._pool else [],
            "recent_gain": round(self._gain, 4),
            "probe_seconds_left": self._probe_seconds,
            "draft_cost": self._draft_cost.stats(),
        }
