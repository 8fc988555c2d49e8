"""How many drafted tokens are worth verifying, over the whole batch, and how many are worth drafting.

Every step takes the proposed nodes of all requests in order of survival and admits the number that gives
the most expected tokens per second:

    (number of requests + sum of the admitted survivals) / (T(rows) + time that drafting took)

where the time of prompts that are read in the same step is left out.
`T` comes from a calibration and is corrected by what steps really take; survivals come from the sources and
are corrected by what became of their drafts. Where drafting itself runs a model, the controller says before
that for how many steps. Zero drafts is always a candidate.
Under the law any choice is safe: it changes when tokens come, never which.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from outrider.spec_decode.acceptance import AcceptanceTable, RequestOdds
from outrider.spec_decode.cost import DraftCost, StepCost
from outrider.spec_decode.model_steps import MODEL_SOURCES, ModelSteps
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts, RequestView, ResultView


class _Tracked:
    """What is kept of one request."""

    __slots__ = ("num_empty", "num_fed", "num_looks", "proposal", "shifts", "value")

    def __init__(self, value: float) -> None:
        self.proposal = NO_DRAFTS  # of the last round, whatever was admitted of it
        self.shifts: dict[str, RequestOdds] = {}  # by source
        self.num_fed = 0  # its length when a model last drafted for it
        self.num_empty = 0  # times in a row that the model was asked and gave nothing
        self.num_looks = 0  # rounds in which it was drafted for
        self.value = value  # what that gained lately, a round: tokens, less the time of their rows


class _Round:
    """One step's drafting, from `begin_round` to `admit`."""

    __slots__ = ("chosen_at", "context", "is_probe", "num_fed", "num_requests", "num_rows", "steps")

    def __init__(self, num_requests: int, num_rows: int, context: int) -> None:
        self.num_requests = num_requests
        self.num_rows = num_rows  # without drafts
        self.context = context
        self.steps: dict[str, int] = {}  # request -> model steps, where there are any
        self.num_fed = 0  # tokens that the model was fed for them
        self.is_probe = False
        self.chosen_at = 0.0


class Controller:
    """Chooses what is drafted by a model and which proposed nodes are verified."""

    NUM_REMEMBERED = 64  # decisions, for people to look at
    USUAL_RATE = 0.02  # and in what it gains in general
    FIRST_LOOKS = 4  # rounds in which a request is drafted for in any case
    MARGIN = 1.5  # of what looking takes: of several estimates the best one looks better than it is
    LOSS = 0.985  # of the plain rate: under this, more gain is asked for
    MARGIN_STEP, MOST_MARGIN, MARGIN_MEMORY = 0.01, 0.3, 0.995
    PERIOD = 8  # steps between two looks where they do not pay
    VALUE_RATE = 0.15  # weight of a round in what looking gains and takes
    MOST_LOOK_COST = 1.0  # tokens; an interruption by the machine is not what looking takes
    MOST_FED = 512  # tokens of a request that a model is fed in one step
    MOST_EMPTY = 8  # times in a row that a model may be asked for nothing, as it catches up with a prompt
    PLAIN_CONTEXT = 128  # of the step that drafting costs are guessed from

    def __init__(
        self,
        cost: StepCost,
        *,
        adaptive: bool = True,
        min_gain: float = 0.01,
        max_model_steps: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`adaptive=False`: verify exactly what was proposed.

        To start verifying, speculation must promise `min_gain` more tokens per second than plain decoding;
        to go on, any gain will do. So the batch does not flicker between two shapes that are equally good.
        """
        self._cost = cost
        self._adaptive = adaptive
        self._min_gain = min_gain
        self._clock = clock
        self._table = AcceptanceTable()
        curve = cost.curve(self.PLAIN_CONTEXT, 9)
        self._draft_cost = DraftCost(curve[1], (curve[9] - curve[1]) / 8)
        self._model_steps = ModelSteps(cost, self._draft_cost, max_model_steps)
        self._requests: dict[str, _Tracked] = {}
        self._is_speculating = False
        self._margin = 0.0  # of gain that is asked for because promised gains did not come
        self._num_rounds = self._num_steps = 0
        self._price = 0.0  # of a row that was admitted last, in tokens
        self._num_looked_for = 0  # requests, in this step
        self._usual_value = 1.0  # of looking, over all requests: what new ones begin with
        self._look_cost = 0.0  # of drafting for a request without its model, in tokens
        self._round = _Round(0, 0, 0)
        self.model_seconds = 0.0  # of this round's drafting, the part that ran a model
        self._decisions: deque[tuple[int, int, int, int, float]] = deque(maxlen=self.NUM_REMEMBERED)

    # --- before drafting ---

    def rests(self, request_id: str) -> bool:
        """Whether nothing is to be drafted for a request in this step. Looking for drafts takes time too:
        where it gains less than it takes, it is done in every PERIOD-th step only, for all such requests
        in the same one."""
        tracked = self._requests.get(request_id)
        if (
            tracked is None
            or tracked.value >= self.MARGIN * self._look_cost
            or tracked.num_looks < self.FIRST_LOOKS
        ):
            return False
        return self._num_steps % self.PERIOD > 0 and not self._model_steps.is_probing(request_id)

    def begin_round(self, num_requests: int, other_rows: int, context: int) -> None:
        """Drafting for a step begins: `num_requests` will get a token without drafts, `other_rows` are rows
        of the step beside them, such as a prompt's; `context` is the requests' mean length."""
        self._num_rounds += 1
        self.model_seconds = 0.0
        self._table.end_round()
        self._round = _Round(num_requests, num_requests + other_rows, context)

    def choose_model_steps(self, requests: Sequence[RequestView], drafts: Sequence[Drafts]) -> list[int]:
        """How many steps a drafting model should run for each request, given the free drafts it has."""
        model_steps, this = self._model_steps, self._round
        names = [request.request_id for request in requests]
        if not names or model_steps.rests(names):
            return [0] * len(names)
        tracked = [self._track(name) for name in names]
        needs = [
            self._need(free, one.shifts) if free.token_ids else 1.0
            for free, one in zip(drafts, tracked, strict=True)
        ]
        model_steps.begin_round(this.num_requests, this.num_rows, this.context)
        lengths = [len(request.token_ids) for request in requests]
        behind = [
            min(length - one.num_fed, self.MOST_FED) for length, one in zip(lengths, tracked, strict=True)
        ]
        left = [_num_left(request, length) for request, length in zip(requests, lengths, strict=True)]
        steps, this.is_probe = model_steps.choose(names, needs, behind, left, this.num_requests)
        for i, num in enumerate(steps):
            if num:
                this.steps[names[i]] = num
                this.num_fed += behind[i]
                tracked[i].num_fed = lengths[i]
        this.chosen_at = self._clock()
        return steps

    def _need(self, free: Drafts, shifts: dict[str, RequestOdds]) -> float:
        """What free drafts leave for a model to gain, 0 to 1: the part of its usual gain at depths where they
        are likely to fail."""
        typical = self._model_steps.typical
        alive = self._table.calibrate(free, shifts)
        covered = 0.0
        for depth, value in zip(range(len(alive)) if free.is_chain else free.depths(), alive, strict=False):
            if depth < len(typical):
                covered += value * typical[depth]
        return max(0.0, 1.0 - covered / sum(typical)) if typical else 0.0

    def _track(self, request_id: str) -> _Tracked:
        tracked = self._requests.get(request_id)
        if tracked is None:
            tracked = self._requests[request_id] = _Tracked(self._usual_value)
        return tracked

    # --- after drafting ---

    def admit(
        self,
        proposals: Sequence[Drafts],
        num_requests: int,
        other_rows: int = 0,
        context: int = 0,
        request_ids: Sequence[str] = (),
    ) -> list[Drafts]:
        """What to verify of each proposal: the proposal itself, a part of it, or nothing.

        The numbers are those of `begin_round`; `request_ids` name the requests proposed for, so that each
        is judged by its own record.
        """
        self._num_looked_for = len(request_ids)
        if self._round.steps:
            self._end_model_drafting(proposals, request_ids)
        num_proposed = sum(map(len, proposals))
        if not self._adaptive or num_proposed == 0:
            self._note_values(request_ids, [0.0] * len(request_ids))
            return list(proposals)
        alive = self._calibrated(proposals, request_ids)
        if len(proposals) == 1 and proposals[0].is_chain:
            # Survival only falls along a chain: it is in order as it stands.
            num = self._best_number(alive[0], num_proposed, num_requests, other_rows, context)
            self._note_values(request_ids, [sum(alive[0][:num]) - num * self._price])
            return [proposals[0].first(num) if num else NO_DRAFTS]
        # Of equals the parent comes first, as its index is lower.
        ordered = [(-value, i, node) for i, values in enumerate(alive) for node, value in enumerate(values)]
        ordered.sort()
        survival = [-entry[0] for entry in ordered]
        num = self._best_number(survival, num_proposed, num_requests, other_rows, context)
        chosen: list[list[int]] = [[] for _ in proposals]
        values = [0.0] * len(proposals)
        for negative, i, node in ordered[:num]:
            chosen[i].append(node)
            values[i] -= negative + self._price
        self._note_values(request_ids, values)
        return [_part(drafts, nodes) for drafts, nodes in zip(proposals, chosen, strict=True)]

    def _note_values(self, request_ids: Sequence[str], values: Sequence[float]) -> None:
        for name, value in zip(request_ids, values, strict=False):
            tracked = self._track(name)
            tracked.num_looks += 1
            tracked.value += self.VALUE_RATE * (value - tracked.value)
            self._usual_value += self.USUAL_RATE * (value - self._usual_value)

    def _calibrated(self, proposals: Sequence[Drafts], request_ids: Sequence[str]) -> list[list[float]]:
        calibrate = self._table.calibrate
        if not request_ids:
            return [calibrate(drafts) for drafts in proposals]
        result: list[list[float]] = []
        for name, drafts in zip(request_ids, proposals, strict=True):
            if drafts.token_ids:
                tracked = self._track(name)
                tracked.proposal = drafts
                result.append(calibrate(drafts, tracked.shifts))
            else:
                result.append([])
        return result

    def _end_model_drafting(self, proposals: Sequence[Drafts], request_ids: Sequence[str]) -> None:
        """Note what drafting took and what its drafts look like."""
        this = self._round
        self.model_seconds = max(0.0, self._clock() - this.chosen_at)
        self._draft_cost.observe(
            max(this.steps.values()), sum(this.steps.values()), this.num_fed, self.model_seconds
        )
        if this.is_probe:
            self._model_steps.spend(self.model_seconds)
        for name, drafts in zip(request_ids, proposals, strict=True):
            num = this.steps.get(name, 0)
            if not num:
                continue
            tracked = self._track(name)
            tracked.num_empty = 0 if drafts.token_ids else tracked.num_empty + 1
            survivals = _model_path(drafts, self._table.calibrate(drafts, tracked.shifts))
            if survivals or tracked.num_empty > self.MOST_EMPTY:
                self._model_steps.record(name, survivals, num)

    def _best_number(
        self, survival: Iterable[float], num_nodes: int, num_requests: int, other_rows: int, context: int
    ) -> int:
        """How many of the nodes, given in falling order of survival, give the most tokens per second."""
        base, requests = num_requests + other_rows, self._cost.of_requests(num_requests)
        seconds = self._cost.curve(context, base + num_nodes)
        # Time that the rows do not change. A prompt's is spent in any case: counted in, it would make tokens
        # look rare and rows cheap, while the same rows in the next steps would bring more.
        beside = requests + self.model_seconds - (seconds[base] - seconds[num_requests])
        plain = best = num_requests / (seconds[base] + beside)
        needed = plain * (1.0 + self._margin + (0.0 if self._is_speculating else self._min_gain))
        chosen = 0
        tokens = float(num_requests)
        for num, alive in enumerate(survival, start=1):
            tokens += alive
            step = seconds[base + num] + beside
            rate = tokens / step
            if rate > best:
                best, chosen = rate, num
            elif (tokens + alive * (num_nodes - num)) / step <= best:
                break  # nothing after this survives better, and no step with more rows is shorter
        if best <= needed:
            chosen, best = 0, plain
        self._is_speculating = chosen > 0
        self._price = best * (seconds[base + chosen] - seconds[base]) / chosen if chosen else 0.0
        gain = best * (seconds[num_requests] + requests) / num_requests
        self._model_steps.observe_admission(gain, chosen)
        self._remember(num_requests, num_nodes, chosen, gain)
        return chosen

    def _remember(self, num_requests: int, num_proposed: int, num_admitted: int, gain: float) -> None:
        steps = max(self._round.steps.values(), default=0)
        self._decisions.append((num_requests, steps, num_proposed, num_admitted, gain))

    # --- after the step ---

    def observe(self, results: Sequence[ResultView]) -> None:
        """Learn what became of the last proposals, verified or not."""
        self._num_steps += 1
        self._num_looked_for = 0
        for result in results:
            tracked = self._requests.get(result.request_id)
            if tracked is not None and tracked.proposal.token_ids and result.token_ids:
                self._table.observe(tracked.proposal, result.token_ids, tracked.shifts)
                tracked.proposal = NO_DRAFTS

    def observe_step(
        self,
        rows: int,
        context: int,
        seconds: float,
        drafting_seconds: float = 0.0,
        num_requests: int = 1,
        weight: int = 1,
    ) -> None:
        """A step with this many rows took so long from planning to drafting, drafting included. It stands for
        `weight` steps."""
        without = seconds - drafting_seconds
        self._cost.observe(rows, context, without, num_requests)
        self._model_steps.earn(weight * seconds)
        if self._num_looked_for and without > 0.0:
            looking = max(drafting_seconds - self.model_seconds, 0.0) / self._num_looked_for
            cost = min(looking * num_requests / without, self.MOST_LOOK_COST)
            self._look_cost += self.VALUE_RATE * (cost - self._look_cost)
        self.model_seconds = 0.0

    def observe_profit(self, ratio: float) -> None:
        """Lately tokens came at `ratio` times the rate of plain decoding. Where that is a loss, what was
        promised was too much: more has to be promised from now on, for a while."""
        if ratio < self.LOSS:
            self._margin = min(self._margin + self.MARGIN_STEP, self.MOST_MARGIN)
        else:
            self._margin *= self.MARGIN_MEMORY
        self._model_steps.margin = self._margin

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._requests.pop(request_id, None)
        self._model_steps.forget(request_id)

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = {
            "adaptive": self._adaptive,
            "margin": round(self._margin, 4),
            "look_cost_tokens": round(self._look_cost, 5),
            "resting_requests": sum(
                one.value < self.MARGIN * self._look_cost and one.num_looks >= self.FIRST_LOOKS
                for one in self._requests.values()
            ),
            "cost": self._cost.stats(),
            "acceptance": self._table.stats(),
            "decisions": [
                {
                    "requests": requests,
                    "model_steps": steps,
                    "proposed": proposed,
                    "admitted": admitted,
                    "expected_gain": round(gain, 3),
                }
                for requests, steps, proposed, admitted, gain in self._decisions
            ],
        }
        if self._model_steps.max_steps:
            stats["model_drafting"] = self._model_steps.stats()
        return stats


def _num_left(request: RequestView, length: int) -> int:
    """The most tokens a request may still get; of one without a bound, many."""
    most = request.params.max_tokens
    return 1024 if most is None else max(most - (length - request.num_prompt_tokens), 1)


def _model_path(drafts: Drafts, alive: Sequence[float]) -> list[float]:
    """Survivals along the likeliest path that a model drafted; empty if free drafts hold the same nodes."""
    last = -1
    for node, name in enumerate(drafts.source[: len(alive)]):
        if name in MODEL_SOURCES and (last < 0 or drafts.parents[node] == last):
            last = node
    return [alive[node] for node in (*drafts.ancestors(last), last)] if last >= 0 else []


def _part(drafts: Drafts, nodes: list[int]) -> Drafts:
    if not nodes:
        return NO_DRAFTS
    return drafts.first(len(nodes)) if drafts.is_chain else drafts.select(sorted(nodes))
