"""The engine's side of a proposer: limits in, checked drafts out.

A proposer may be wrong about everything. Whatever it does (raise, return too much, return nonsense, take
its time), no token changes and no request ends: its drafts are dropped, the failure is counted and logged
once, and a proposer that costs more than it gains is left alone for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from outrider.engine.draft_health import DraftHealth
from outrider.engine.scheduler import Plan, StepResult
from outrider.engine.state import Request
from outrider.spec_decode.proposer import (
    NO_DRAFTS,
    Drafts,
    NoProposer,
    Proposer,
    RequestView,
    ResultView,
    draft_limit,
)

_PROFIT_RATE = 0.02  # weight of a step in the profit that is shown
# Every step's time is looked at in the beginning, then one of so many: looking takes time too.
_CLOSE_STEPS, _SAMPLING = 64, 4


class DraftController(Protocol):
    """Decides how many of the proposed nodes are worth verifying, and how much drafting is."""

    def rests(self, request_id: str) -> bool: ...
    def begin_round(self, num_requests: int, other_rows: int, context: int) -> None: ...
    def choose_model_steps(
        self, requests: Sequence[RequestView], drafts: Sequence[Drafts]
    ) -> Sequence[int]: ...
    def admit(
        self,
        proposals: Sequence[Drafts],
        num_requests: int,
        other_rows: int = 0,
        context: int = 0,
        request_ids: Sequence[str] = (),
    ) -> list[Drafts]: ...
    @property
    def model_seconds(self) -> float: ...  # of this step's drafting, the part that ran a model
    def observe(self, results: Sequence[ResultView]) -> None: ...
    def observe_step(
        self,
        rows: int,
        context: int,
        seconds: float,
        drafting_seconds: float = 0.0,
        num_requests: int = 1,
        weight: int = 1,
    ) -> None: ...
    def observe_profit(self, ratio: float) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def stats(self) -> dict[str, Any]: ...


class Drafting:
    """Asks a proposer for drafts and keeps its failures away from the requests."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        method: str,
        max_draft_tokens: int,
        vocab_size: int,
        controller: DraftController | None = None,
        plain_step: Callable[[int, int], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`plain_step` is what a step without drafts takes, of (requests, mean context)."""
        self.proposer = proposer
        self.controller = controller
        self.health = DraftHealth()
        self.is_active = not isinstance(proposer, NoProposer) and max_draft_tokens > 0
        self._method = method
        self._max_draft_tokens = max_draft_tokens
        self._vocab_size = vocab_size
        self._plain_step = plain_step
        self._clock = clock
        self._drafting_seconds = 0.0  # of this step
        self._plain_seconds = 0.0  # what recent steps' tokens would have taken without drafts, a step
        self._seconds = 0.0  # what they took
        self._tokens = 0.0  # and gave
        self._drafting = 0.0  # seconds of them that went into drafting
        self._num_steps = 0
        if controller is not None and hasattr(proposer, "choose_model_steps"):
            proposer.choose_model_steps = controller.choose_model_steps

    @property
    def num_errors(self) -> int:
        return self.health.num_errors

    def observe(self, results: Sequence[StepResult], hidden: Any) -> None:
        """Tell what became true in a step, and who has finished."""
        if not self.is_active:
            return
        begin = self._clock()
        self.health.guarded("observe", self.proposer.observe, results, hidden)
        if self.controller is not None:
            self.health.guarded("controller", self.controller.observe, results)
        for result in results:
            if result.request.is_finished:
                self.forget(result.request_id)
        self._drafting_seconds = self._clock() - begin

    def forget(self, request_id: str) -> None:
        """A request is gone, or starts over."""
        if self.is_active:
            self.health.guarded("forget", self.proposer.forget, request_id)
            if self.controller is not None:
                self.controller.forget(request_id)

    def close(self) -> None:
        """The engine ends: let the proposer keep what it wants to keep."""
        close = getattr(self.proposer, "close", None)
        if close is not None:
            self.health.guarded("close", close)

    def stats(self) -> dict[str, Any]:
        """What the proposer and the controller tell about themselves."""
        stats: dict[str, Any] = {
            "method": self._method,
            "proposer": self.health.guarded("stats", self.proposer.stats) or {},
            "health": self.health.stats(),
        }
        if self._seconds > 0:
            stats["profit_ratio"] = ratio = self._plain_seconds / self._seconds
            stats["profit"] = {
                "ratio": ratio,
                "gain": ratio - 1.0,  # negative where speculation loses
                "tokens_per_second": self._tokens / self._seconds,
                "plain_tokens_per_second": self._tokens / self._plain_seconds,
                "drafting_share": self._drafting / self._seconds,
            }
        if self.controller is not None:
            stats["controller"] = self.health.guarded("controller", self.controller.stats) or {}
        return stats

    def observe_step(self, plan: Plan, results: Sequence[StepResult], seconds: float) -> None:
        """Tell how long a step took, from planning to drafting."""
        controller = self.controller
        if controller is None:
            return
        drafting, self._drafting_seconds = self._drafting_seconds, 0.0
        self._num_steps += 1
        weight = 1
        if self._num_steps > _CLOSE_STEPS:
            if self._num_steps % _SAMPLING:
                return
            weight = _SAMPLING
        rows, num = plan.rows, len(plan.rows)
        num_rows = sum([row.num_tokens for row in rows])
        context = sum([row.start for row in rows]) // num
        without_model = drafting - controller.model_seconds
        self.health.guarded(
            "controller", controller.observe_step, num_rows, context, seconds, drafting, num, weight
        )
        gained = 0.0
        if self._plain_step is not None and num_rows == num + sum(
            [len(row.drafts.token_ids) for row in rows]
        ):
            tokens = sum([len(result.token_ids) for result in results])
            plain_seconds = tokens / num * self._plain_step(num, context)
            self._observe_profit(plain_seconds, seconds, tokens, drafting)
            gained = plain_seconds - (seconds - without_model)
        if self.is_active:
            self.health.observe(without_model, gained, seconds)

    def _observe_profit(self, plain_seconds: float, seconds: float, tokens: int, drafting: float) -> None:
        rate = _PROFIT_RATE
        self._plain_seconds += (plain_seconds - self._plain_seconds) * rate
        self._seconds += (seconds - self._seconds) * rate
        self._tokens += (tokens - self._tokens) * rate
        self._drafting += (drafting - self._drafting) * rate
        if self.controller is not None and self._num_steps > _CLOSE_STEPS:
            self.controller.observe_profit(self._plain_seconds / self._seconds)

    def propose(self, running: Sequence[Request], num_prompt_rows: int = 0) -> None:
        """Set the drafts of the running requests that are generating. About `num_prompt_rows` rows of
        prompts will stand beside them in the next step."""
        if not self.is_active or not self.health.may_propose():
            return
        begin = self._clock()
        generating = [request for request in running if request.is_caught_up]
        asked = generating
        if self.controller is not None:
            rests = self.controller.rests
            asked = [request for request in generating if not rests(request.request_id)]
        limited = [(request, limit) for request in asked if (limit := self._limit(request)) > 0]
        if limited:
            requests, limits = zip(*limited, strict=True)
            self._propose(generating, requests, limits, num_prompt_rows)
        self._drafting_seconds += self._clock() - begin

    def _propose(
        self,
        generating: Sequence[Request],
        requests: Sequence[Request],
        limits: Sequence[int],
        num_prompt_rows: int,
    ) -> None:
        controller = self.controller
        if controller is None:
            admitted = self.health.guarded("propose", self._checked_proposals, requests, limits)
        else:
            num = len(generating)
            context = sum([request.num_tokens for request in generating]) // num
            controller.begin_round(num, num_prompt_rows, context)
            admitted = self.health.guarded("propose", self._checked_proposals, requests, limits)
            if admitted is not None:
                names = [request.request_id for request in requests]
                admitted = self.health.guarded(
                    "controller", controller.admit, admitted, num, num_prompt_rows, context, names
                )
        for request, drafts in zip(requests, admitted or [], strict=False):
            request.drafts = drafts

    def _limit(self, request: Request) -> int:
        # The last token a request may get needs no draft: the model gives it anyway.
        limit = min(self._max_draft_tokens, request.stream.num_left - 1)
        override = draft_limit(request.params, self._method, limit)
        return override.max_tokens if override.wanted else 0

    def _checked_proposals(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Drafts]:
        num_errors = self.health.num_errors
        try:
            proposals = self.proposer.propose(requests, limits)
            if len(proposals) != len(requests):
                raise ValueError(f"{len(requests)} requests need as many drafts, got {len(proposals)}")
            checked = [
                self._check(drafts, limit) if drafts.token_ids else NO_DRAFTS
                for drafts, limit in zip(proposals, limits, strict=True)
            ]
        except Exception:
            self.health.end_round(has_failed=True)
            raise
        self.health.end_round(has_failed=self.health.num_errors > num_errors)
        return checked

    def _check(self, drafts: Drafts, limit: int) -> Drafts:
        """The drafts, or none if they are not what a proposer may return."""

        def check() -> Drafts:
            if len(drafts) > limit:
                raise ValueError(f"at most {limit} draft tokens are allowed here, got {len(drafts)}")
            drafts.check(self._vocab_size)
            return drafts

        return self.health.guarded("drafts", check) or NO_DRAFTS
