"""Replays recorded token streams through drafters and the controller: speculation without a model.

Under the law the tokens of a request do not depend on how they were drafted, so a recording tells what any
plan would have got right. Time is what the recorded calibration says a step takes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.config import SpeculativeConfig
from outrider.engine.draft_counts import DraftCounts
from outrider.request import SamplingParams
from outrider.sampling.verifier import verify
from outrider.spec_decode.calibration import Calibration
from outrider.spec_decode.controller import Controller
from outrider.spec_decode.cost import StepCost
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts, Parts, make_proposer

MOST_DRAFTS = 32  # a request and step
_SHOWN_POSITIONS = 8
NOT_A_TOKEN = -1  # what was not drawn, because the request had ended


@dataclass(frozen=True)
class Stream:
    """One recorded request."""

    id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    cache_salt: str = ""


@dataclass(frozen=True)
class Recording:
    """Streams, and what a step of the model that wrote them takes."""

    model: str
    calibration: Calibration
    streams: list[Stream]

    def write(self, path: Path) -> None:
        """JSON lines, the first of which describes the others."""
        of = self.calibration
        steps = {"rows": of.rows, "contexts": of.contexts, "seconds": of.seconds}
        lines = [{"model": self.model, "calibration": steps}, *map(vars, self.streams)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Recording:
        try:
            header, *rest = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            steps = header["calibration"]
            calibration = calibration_of(steps)
            return cls(header["model"], calibration, [Stream(**line) for line in rest])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no recording of `benchmark_drafts.py record` ({error})") from None


def calibration_of(steps: dict[str, Any]) -> Calibration:
    """From the mapping that `/v1/speculation` and recordings hold."""
    rows, contexts = tuple(steps["rows"]), tuple(steps["contexts"])
    return Calibration(rows, contexts, tuple(map(tuple, steps["seconds"])))


@dataclass
class Request:
    """A recorded request on its way to its end, as proposers see it."""

    request_id: str
    stream: Stream
    token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    drafts: Drafts = NO_DRAFTS

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.stream.prompt_token_ids)

    @property
    def cache_salt(self) -> str:
        return self.stream.cache_salt

    @property
    def ahead(self) -> list[int]:
        """The tokens that are to come."""
        return self.stream.output_token_ids[len(self.token_ids) - self.num_prompt_tokens :]


@dataclass
class Result:
    """What one step brought a request."""

    request: Request
    token_ids: list[int]
    drafts: Drafts
    path: list[int]

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass
class Report:
    """What a plan would have done."""

    name: str
    concurrency: int
    num_steps: int = 0
    num_windows: int = 0  # a request's part of a step
    num_tokens: int = 0
    seconds: float = 0.0  # of all steps
    plain_seconds: float = 0.0  # of the same streams without drafts
    hindsight_seconds: float = 0.0  # had only the drafts been verified that were right
    drafting_seconds: float = 0.0  # measured here, in Python
    counts: DraftCounts = field(default_factory=DraftCounts)

    def figures(self) -> dict[str, Any]:
        drafted, accepted = self.counts.per_position(False), self.counts.per_position(True)
        return {
            "plan": self.name,
            "concurrency": self.concurrency,
            "tokens": self.num_tokens,
            "tokens_per_step": self.num_tokens / self.num_windows,
            "speed_up": self.plain_seconds / self.seconds,
            "hindsight_speed_up": self.plain_seconds / self.hindsight_seconds,
            "drafting_us_per_step": 1e6 * self.drafting_seconds / self.num_steps,
            "acceptance": {
                source: [_ratio(a, d) for a, d in zip(accepted[source], places, strict=True)]
                for source, places in drafted.items()
            },
            "draft_tokens": {source: sum(places) for source, places in drafted.items()},
            "accepted_tokens": {source: sum(places) for source, places in accepted.items()},
        }


class _Replay:
    """One plan over one recording."""

    def __init__(self, recording: Recording, config: SpeculativeConfig, parts: Parts, report: Report) -> None:
        self.cost = StepCost(recording.calibration)
        self.proposer = make_proposer(config, parts)
        self.controller = Controller(self.cost) if config.adaptive else None
        self.report = report
        self.limit = config.num_speculative_tokens or MOST_DRAFTS
        self.waiting = [
            Request(str(i), stream, list(stream.prompt_token_ids))
            for i, stream in enumerate(recording.streams)
            if stream.output_token_ids
        ][::-1]
        self.running: list[Request] = []

    def run(self, clock: Callable[[], float]) -> None:
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.report.concurrency:
                self.running.append(self.waiting.pop())
            seconds, rows, context = self.step()
            begin = clock()
            self.learn_and_draft(seconds, rows, context)
            self.report.drafting_seconds += clock() - begin

    def step(self) -> tuple[float, int, int]:
        """Verify everybody's drafts; (seconds, rows, mean context) of the step."""
        report, num = self.report, len(self.running)
        context = sum(len(request.token_ids) for request in self.running) // num
        self.results = [_verified(request) for request in self.running]
        rows = num + sum(len(request.drafts) for request in self.running)
        curve = self.cost.curve(context, rows)
        tokens = sum(len(result.token_ids) for result in self.results)
        right = sum(len(result.path) for result in self.results)
        report.num_steps += 1
        report.num_windows += num
        report.num_tokens += tokens
        report.seconds += curve[rows]
        report.hindsight_seconds += curve[num + right]
        return curve[rows], rows, context

    def learn_and_draft(self, seconds: float, rows: int, context: int) -> None:
        """What the engine's drafting does between two steps."""
        proposer, controller = self.proposer, self.controller
        proposer.observe(self.results, None)
        if controller is not None:
            controller.observe(self.results)
            controller.observe_step(rows, context, seconds)
        for request in [request for request in self.running if not request.ahead]:
            self.running.remove(request)
            proposer.forget(request.request_id)
            if controller is not None:
                controller.forget(request.request_id)
        if not self.running:
            return
        for request in self.running:
            request.drafts = NO_DRAFTS
        limits = [min(self.limit, len(request.ahead) - 1) for request in self.running]
        if controller is None:
            drafted = proposer.propose(self.running, limits)
        else:
            num = len(self.running)
            controller.begin_round(num, 0, context)
            proposals = proposer.propose(self.running, limits)
            names = [request.request_id for request in self.running]
            drafted = controller.admit(proposals, num, 0, context, names)
        for request, drafts in zip(self.running, drafted, strict=True):
            request.drafts = drafts


def _verified(request: Request) -> Result:
    """Walk a request's drafts along what is to come, exactly as the engine does."""
    ahead, drafts = request.ahead, request.drafts
    sampled = [ahead[0]]
    for depth in drafts.depths():
        # Off the right path a draw is never looked at.
        sampled.append(ahead[depth + 1] if depth + 1 < len(ahead) else NOT_A_TOKEN)
    walk = verify(drafts, sampled)
    kept = walk.token_ids[: len(ahead)]
    request.token_ids += kept
    return Result(request, kept, drafts, walk.path[: len(kept)])


def replay(
    recording: Recording,
    speculative: dict[str, Any],
    parts: Parts,
    *,
    concurrency: int = 1,
    name: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> Report:
    """What the plan `speculative` would have done with `concurrency` of the streams at once."""
    report = Report(name or json.dumps(speculative), concurrency)
    run = _Replay(recording, SpeculativeConfig(**speculative), parts, report)
    count = report.counts.add
    verified = run.step

    def counted() -> tuple[float, int, int]:
        done = verified()
        for result in run.results:
            if result.drafts.token_ids:
                count(result.drafts, result.path)
        return done

    run.step = counted  # type: ignore[method-assign]
    run.run(clock)
    report.plain_seconds = plain_seconds(recording, concurrency)
    return report


def plain_seconds(recording: Recording, concurrency: int) -> float:
    """What the streams take without drafts, so many at once."""
    report = Report("plain", concurrency)
    _Replay(recording, SpeculativeConfig(method="off"), Parts(), report).run(time.perf_counter)
    return report.seconds


class _Oracle(_Replay):
    """A drafter that is always right and takes no time, with the number of drafts that pays most."""

    def learn_and_draft(self, seconds: float, rows: int, context: int) -> None:
        self.running = [request for request in self.running if request.ahead]
        num = len(self.running)
        if not num:
            return
        lefts = [len(request.ahead) - 1 for request in self.running]
        curve = self.cost.curve(context, num * (MOST_DRAFTS + 1))
        totals = [num + sum(min(k, left) for left in lefts) for k in range(MOST_DRAFTS + 1)]
        best = max(range(MOST_DRAFTS + 1), key=lambda k: totals[k] / curve[totals[k]])
        for request in self.running:
            ahead = request.ahead[: min(best, len(request.ahead) - 1)]
            request.drafts = Drafts.chain(ahead, [1.0] * len(ahead), "oracle")


def oracle(recording: Recording, concurrency: int) -> float:
    """Speed-up of a drafter that is always right and costs nothing: what no plan can pass."""
    report = Report("oracle", concurrency)
    _Oracle(recording, SpeculativeConfig(method="off"), Parts(), report).run(time.perf_counter)
    return plain_seconds(recording, concurrency) / report.seconds


def best_first(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Figures of the reports, by concurrency and then speed-up."""
    figures = [report.figures() for report in reports]
    return sorted(figures, key=lambda one: (one["concurrency"], -one["speed_up"]))


def acceptance_text(figures: dict[str, Any]) -> str:
    """Per source: accepted of drafted, and acceptance by position."""
    parts = []
    for source, drafted in figures["draft_tokens"].items():
        places = " ".join(f"{rate:.2f}" for rate in figures["acceptance"][source][:_SHOWN_POSITIONS])
        parts.append(f"{source} {figures['accepted_tokens'][source]}/{drafted} ({places})")
    return ", ".join(parts) or "nothing drafted"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
