"""A world of known acceptance and costs, in which a controller can be held against every fixed choice.

Nothing is timed: steps and drafting take what the world says, on a clock of its own, with noise if asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.request import SamplingParams
from outrider.spec_decode.calibration import ROWS, Calibration
from outrider.spec_decode.controller import Controller
from outrider.spec_decode.cost import StepCost
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts

WRONG = 10**9  # a token no text holds


def like_cpu(rows: float) -> float:
    """Two cores: four rows cost 1.2, eight 1.7, then arithmetic is the limit."""
    return 1.0 + 0.07 * (rows - 1) + 0.09 * max(0.0, rows - 4)


def like_gpu(rows: float) -> float:
    """Nearly free rows for a long way."""
    return 1.0 + 0.004 * (rows - 1)


def steep(rows: float) -> float:
    """A row costs most of a step."""
    return 0.3 + 0.7 * rows


@dataclass(frozen=True)
class Kind:
    """A kind of text: how likely a model's draft is right, by depth, and how much that varies."""

    chances: tuple[float, ...] = (0.6, 0.5, 0.45, 0.4, 0.4, 0.35, 0.3, 0.3)
    spread: float = 2.0  # of a Beta distribution: chances * spread, (1 - chances) * spread
    honest: float = 1.0  # the drafter says chance ** honest: under 1 it is too sure of itself


CHAT = Kind()
EASY = Kind((0.85, 0.8, 0.8, 0.75, 0.75, 0.7, 0.7, 0.7), honest=1.5)
HOSTILE = Kind((0.03,) * 8, honest=0.4)


@dataclass
class Request:
    """One request of the world; its text is its positions."""

    request_id: str
    kind: Kind
    length: int = 10**9
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def token_ids(self) -> Sequence[int]:
        return range(self.num_tokens)


@dataclass
class Result:
    request_id: str
    token_ids: list[int]


@dataclass
class World:
    """What things cost."""

    step: Callable[[float], float] = like_cpu
    once: float = 0.04
    call: float = 0.1
    row: float = 0.01
    fed: float = 0.004
    max_steps: int = 8
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.now = 0.0
        self.num_fed: dict[str, int] = {}
        self.drafting_seconds = 0.0
        self.num_tokens = 0

    def clock(self) -> float:
        return self.now

    def controller(self) -> Controller:
        seconds = tuple(self.step(rows) for rows in ROWS)
        cost = StepCost(Calibration(ROWS, (0,), (seconds,)))
        return Controller(cost, max_model_steps=self.max_steps, clock=self.clock)

    def noisy(self, seconds: float) -> float:
        return seconds * (1.0 + self.noise * self.rng.random())

    def draft(self, request: Request, num: int) -> Drafts:
        """The model's chain, wrong from the first wrong token on."""
        tokens, survival, alive = [], [], 1.0
        for depth in range(num):
            mean, spread = request.kind.chances[depth], request.kind.spread
            chance = self.rng.betavariate(mean * spread, (1 - mean) * spread)
            alive *= min(max(chance, 1e-6), 0.999) ** request.kind.honest
            survival.append(alive)
            is_right = self.rng.random() < chance
            tokens.append(request.num_tokens + depth if is_right else WRONG)
        return Drafts.chain(tokens, survival, "mtp")

    def run_model(self, requests: Sequence[Request], steps: Sequence[int]) -> list[Drafts]:
        if any(steps):
            seconds = self.once + self.call * max(steps) + self.row * sum(steps)
            for request, num in zip(requests, steps, strict=True):
                if num:
                    behind = request.num_tokens - self.num_fed.get(request.request_id, 0)
                    self.num_fed[request.request_id] = request.num_tokens
                    seconds += self.fed * behind
            seconds = self.noisy(seconds)
            self.now += seconds
            self.drafting_seconds += seconds
        return [
            self.draft(request, num) if num else NO_DRAFTS
            for request, num in zip(requests, steps, strict=True)
        ]

    def verify(self, requests: Sequence[Request], drafts: Sequence[Drafts]) -> tuple[list[Result], float]:
        """A step: what every request goes on with, and how long it took."""
        results = []
        for request, draft in zip(requests, drafts, strict=True):
            accepted = 0
            while accepted < len(draft) and draft.token_ids[accepted] == request.num_tokens + accepted:
                accepted += 1
            tokens = list(range(request.num_tokens, request.num_tokens + accepted + 1))
            request.num_tokens += len(tokens)
            self.num_tokens += len(tokens)
            results.append(Result(request.request_id, tokens))
        seconds = self.noisy(self.step(len(requests) + sum(map(len, drafts))))
        self.now += seconds
        return results, seconds


def requests_of(kinds: Sequence[Kind]) -> list[Request]:
    return [Request(f"r{i}", kind) for i, kind in enumerate(kinds)]


def run_controlled(
    world: World,
    kinds: Sequence[Kind],
    num_rounds: int,
    change: Callable[[int, list[Request]], None] = lambda number, requests: None,
    controller: Controller | None = None,
) -> float:
    """Tokens per second under the controller. `change` may alter the requests before a round."""
    controller = controller or world.controller()
    requests = requests_of(kinds)
    drafts: list[Drafts] = [NO_DRAFTS] * len(requests)
    for number in range(num_rounds):
        change(number, requests)
        results, seconds = world.verify(requests, drafts)
        rows = len(requests) + sum(map(len, drafts))
        controller.observe(results)
        for i, request in enumerate(requests):
            if request.num_tokens >= request.length:
                controller.forget(request.request_id)
                requests[i] = Request(f"{request.request_id}+", request.kind, request.length)
        begin = world.now
        controller.begin_round(len(requests), 0, 0)
        asked = [request for request in requests if not controller.rests(request.request_id)]
        steps = controller.choose_model_steps(asked, [NO_DRAFTS] * len(asked))
        proposals = world.run_model(asked, steps)
        names = [request.request_id for request in asked]
        admitted = dict(zip(names, controller.admit(proposals, len(requests), 0, 0, names), strict=True))
        drafts = [admitted.get(request.request_id, NO_DRAFTS) for request in requests]
        drafting = world.now - begin
        controller.observe_step(rows, 0, seconds + drafting, drafting)
    return world.num_tokens / world.now


def run_fixed(world: World, kinds: Sequence[Kind], num_rounds: int, num_steps: int) -> float:
    """Tokens per second when everybody is drafted for, always so many steps, and all is verified."""
    requests = requests_of(kinds)
    drafts: list[Drafts] = [NO_DRAFTS] * len(requests)
    for _ in range(num_rounds):
        world.verify(requests, drafts)
        drafts = world.run_model(requests, [num_steps] * len(requests))
    return world.num_tokens / world.now


def best_fixed(make_world: Callable[[], World], kinds: Sequence[Kind], num_rounds: int) -> tuple[float, int]:
    """(tokens per second, steps) of the best fixed number."""
    world = make_world()
    return max((run_fixed(make_world(), kinds, num_rounds, k), k) for k in range(world.max_steps + 1))
