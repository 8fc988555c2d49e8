"""The engine's side of a proposer: limits in, checked drafts out.

A proposer may be wrong about everything. Whatever it does (raise, return too much, return nonsense), no
token changes and no request ends: its drafts are dropped, the failure is counted and logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from outrider.engine.scheduler import Plan, StepResult
from outrider.engine.state import Request
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts, NoProposer, Proposer, draft_limit

logger = logging.getLogger(__name__)

_PROFIT_RATE = 0.02  # weight of a step in the profit that is shown


class DraftController(Protocol):
    """Decides how many of the proposed nodes are worth verifying."""

    def admit(
        self, proposals: Sequence[Drafts], num_requests: int, other_rows: int = 0, context: int = 0
    ) -> list[Drafts]: ...
    def observe_step(self, rows: int, context: int, seconds: float) -> None: ...
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
    ) -> None:
        """`plain_step` is what a step without drafts takes, of (requests, mean context)."""
        self.proposer = proposer
        self.controller = controller
        self.num_errors = 0
        self.is_active = not isinstance(proposer, NoProposer) and max_draft_tokens > 0
        self._method = method
        self._max_draft_tokens = max_draft_tokens
        self._vocab_size = vocab_size
        self._plain_step = plain_step
        self._logged: set[str] = set()
        self._plain_seconds = 0.0  # what recent steps' tokens would have taken without drafts, a step
        self._seconds = 0.0  # what they took

    def observe(self, results: Sequence[StepResult], hidden: Any) -> None:
        """Tell what became true in a step, and who has finished."""
        if not self.is_active:
            return
        self._guarded("observe", lambda: self.proposer.observe(results, hidden))
        for result in results:
            if result.request.is_finished:
                self.forget(result.request_id)

    def forget(self, request_id: str) -> None:
        """A request is gone, or starts over."""
        if self.is_active:
            self._guarded("forget", lambda: self.proposer.forget(request_id))

    def stats(self) -> dict[str, Any]:
        """What the proposer and the controller tell about themselves."""
        stats: dict[str, Any] = {
            "method": self._method,
            "proposer": self._guarded("stats", self.proposer.stats) or {},
        }
        if self._seconds > 0:
            stats["profit_ratio"] = self._plain_seconds / self._seconds
        if self.controller is not None:
            stats["controller"] = self._guarded("stats", self.controller.stats) or {}
        return stats

    def observe_step(self, plan: Plan, results: Sequence[StepResult], seconds: float) -> None:
        """Tell how long a step took, from planning to drafting."""
        if self.controller is None:
            return
        num_rows = sum(row.num_tokens for row in plan.rows)
        context = sum(row.start for row in plan.rows) // len(plan.rows)
        controller = self.controller
        self._guarded("controller", lambda: controller.observe_step(num_rows, context, seconds))
        if self._plain_step is not None and all(row.num_tokens == len(row.drafts) + 1 for row in plan.rows):
            num_steps = sum(len(result.token_ids) for result in results) / len(results)
            plain_seconds = num_steps * self._plain_step(len(results), context)
            self._plain_seconds += (plain_seconds - self._plain_seconds) * _PROFIT_RATE
            self._seconds += (seconds - self._seconds) * _PROFIT_RATE

    def propose(self, running: Sequence[Request], num_prompt_rows: int = 0) -> None:
        """Set the drafts of the running requests that are generating. About `num_prompt_rows` rows of
        prompts will stand beside them in the next step."""
        if not self.is_active:
            return
        generating = [request for request in running if request.is_caught_up]
        limited = [(request, limit) for request in generating if (limit := self._limit(request)) > 0]
        if not limited:
            return
        requests, limits = zip(*limited, strict=True)
        context = sum(request.num_tokens for request in generating) // len(generating)

        def propose() -> list[Drafts]:
            proposals = self._checked_proposals(requests, limits)
            if self.controller is None:
                return proposals
            return self.controller.admit(proposals, len(generating), num_prompt_rows, context)

        for request, drafts in zip(requests, self._guarded("propose", propose) or [], strict=False):
            request.drafts = drafts

    def _limit(self, request: Request) -> int:
        # The last token a request may get needs no draft: the model gives it anyway.
        limit = min(self._max_draft_tokens, request.stream.num_left - 1)
        override = draft_limit(request.params, self._method, limit)
        return override.max_tokens if override.wanted else 0

    def _checked_proposals(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Drafts]:
        proposals = self.proposer.propose(requests, limits)
        if len(proposals) != len(requests):
            raise ValueError(f"{len(requests)} requests need as many drafts, got {len(proposals)}")
        return [self._check(drafts, limit) for drafts, limit in zip(proposals, limits, strict=True)]

    def _check(self, drafts: Drafts, limit: int) -> Drafts:
        """The drafts, or none if they are not what a proposer may return."""
        if not drafts.token_ids:
            return NO_DRAFTS

        def check() -> Drafts:
            if len(drafts) > limit:
                raise ValueError(f"at most {limit} draft tokens are allowed here, got {len(drafts)}")
            drafts.check(self._vocab_size)
            return _first_path(drafts)

        return self._guarded("drafts", check) or NO_DRAFTS

    def _guarded(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            self.num_errors += 1
            if what not in self._logged:
                self._logged.add(what)
                logger.exception("the proposer failed (%s: %s); its drafts are dropped", what, error)
            return None


def _first_path(drafts: Drafts) -> Drafts:
    """The chain of first children: attention verifies one path for each request."""
    if drafts.is_chain:
        return drafts
    path: list[int] = []
    for node, parent in enumerate(drafts.parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return drafts.select(path)
