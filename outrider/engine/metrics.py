"""What the engine counts. Plain numbers: how they are shown is the server's business."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from outrider.engine.draft_counts import DraftCounts
from outrider.engine.scheduler import StepResult
from outrider.engine.state import Request

_LATENCY = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_STEP = (
    0.001,
    0.002,
    0.003,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
)


class Histogram:
    """Counts of values up to each bound, not cumulative; the last is for what lies above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def snapshot(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


class EngineMetrics:
    """Counters and histograms of one engine since its start; times are of `time.monotonic`."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_finished: dict[str, int] = {}  # by finish reason
        self.draft_counts = DraftCounts()
        self.num_emitting_windows = 0  # a request's part of a step that gave it tokens
        self.time_to_first_token = Histogram(_LONG)
        self.inter_token_latency = Histogram(_LATENCY)
        self.time_per_output_token = Histogram(_LATENCY)
        self.e2e_request_latency = Histogram(_LONG)
        self.request_queue_time = Histogram(_LONG)
        self.step_duration = Histogram(_STEP)

    def observe_step(self, results: list[StepResult], begin: float, end: float) -> None:
        """Count a step that ran from `begin` to `end`."""
        self.step_duration.observe(end - begin)
        for result in results:
            request = result.request
            if not request.scheduled_time:
                request.scheduled_time = begin
                self.request_queue_time.observe(max(0.0, begin - request.arrival_time))
            if result.token_ids:
                self._observe_tokens(request, len(result.token_ids), end)
            if result.logits_row >= 0:
                self.num_emitting_windows += 1
                request.num_steps += 1
                if result.drafts.token_ids:
                    self.draft_counts.add(result.drafts, result.path)
                    request.draft_counts.add(result.drafts, result.path)
            if request.is_finished:
                self.observe_end(request, end)

    def observe_end(self, request: Request, now: float) -> None:
        """Count the end of a request, by itself or from outside."""
        assert request.finish_reason is not None
        reason = request.finish_reason.value
        self.num_finished[reason] = self.num_finished.get(reason, 0) + 1
        self.e2e_request_latency.observe(max(0.0, now - request.arrival_time))
        if request.num_output_tokens > 1:
            seconds = request.last_token_time - request.first_token_time
            self.time_per_output_token.observe(seconds / (request.num_output_tokens - 1))

    def _observe_tokens(self, request: Request, num_tokens: int, now: float) -> None:
        self.num_generation_tokens += num_tokens
        if request.first_token_time:
            # Tokens that came together share the time since the last ones.
            self.inter_token_latency.observe((now - request.last_token_time) / num_tokens, num_tokens)
        else:
            request.first_token_time = now
            self.num_prompt_tokens += request.num_prompt_tokens
            self.time_to_first_token.observe(max(0.0, now - request.arrival_time))
        request.last_token_time = now

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain lists, numbers and mappings; drafts by source."""
        drafts = self.draft_counts
        snapshot = {
            name: value.snapshot() if isinstance(value, Histogram) else value
            for name, value in vars(self).items()
            if value is not drafts
        }
        return snapshot | {
            "num_draft_steps": drafts.windows(),
            "num_draft_tokens": drafts.totals(accepted=False),
            "num_accepted_tokens": drafts.totals(accepted=True),
            "num_draft_tokens_per_position": drafts.per_position(accepted=False),
            "num_accepted_per_position": drafts.per_position(accepted=True),
        }
