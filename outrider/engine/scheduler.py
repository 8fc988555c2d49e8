"""Who runs how many tokens in the next step.

Requests have no phases. Each has tokens that the model has not seen yet, be they prompt, output or
drafts, and the scheduler hands out the step's token budget until it is used up or the cache is full.
Requests stand in one order, by arrival and priority; the first of them can always go on, because the
last ones give their blocks back when blocks run out and are computed again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.state import Request
from outrider.request import FinishReason
from outrider.sampling.verifier import Walk
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One request's part of a step: its next `num_tokens` tokens, the last of them drafts."""

    request: Request
    start: int  # position of the first
    num_tokens: int
    drafts: Drafts
    has_logits: bool  # whether it reaches the end of the request's tokens, and so gets new ones


@dataclass(frozen=True, slots=True)
class Plan:
    """Who runs in a step."""

    rows: tuple[PlanRow, ...]
    preempted: tuple[Request, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became true of one request in a step."""

    request: Request
    token_ids: list[int]  # new and final; empty while its prompt is being read
    drafts: Drafts  # what was verified
    path: list[int]  # the accepted nodes of `drafts` that are among `token_ids`, root first
    logits_row: int  # first of its rows in the step's logits, -1 when it had none
    first_row: int = 0  # of its rows in the step
    start: int = 0  # position of that row's token
    num_tokens: int = 0  # how many rows it had; the last len(drafts) are those of the drafts

    @property
    def request_id(self) -> str:
        return self.request.request_id


class Scheduler:
    """Continuous batching over one cache."""

    # A lower priority number goes first, but only for so many steps: after `PATIENCE` steps of waiting a
    # request stands like one of the next better priority that has just arrived, so nobody waits forever.
    PATIENCE = 1000
    # False, for who wants to see preemptions: requests are admitted although those that run could not grow.
    leaves_room = True

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_logits: int | None = None,
        enable_chunked_prefill: bool = True,
        max_prompt_tokens_beside_decode: int = 512,
    ) -> None:
        """`max_num_logits` bounds a step's rows of logits (None: by the tokens alone);
        `max_prompt_tokens_beside_decode` how long a step may keep generating requests waiting."""
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({max_num_seqs}), "
                f"got {max_num_batched_tokens}"
            )
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_logits = max_num_logits if max_num_logits is not None else max_num_batched_tokens
        if self.max_num_logits < max_num_seqs:
            raise ValueError(
                f"max_num_logits must be at least max_num_seqs ({max_num_seqs}), got {max_num_logits}"
            )
        self.enable_chunked_prefill = enable_chunked_prefill
        self.max_prompt_tokens_beside_decode = max_prompt_tokens_beside_decode
        self.running: list[Request] = []  # by rank
        self.waiting: list[Request] = []  # by rank
        self.num_preemptions = 0
        self._num_steps = 0
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def capacity(self) -> int:
        """The most tokens one request can ever have computed."""
        return self.kv_cache.num_blocks * self.kv_cache.block_size

    def num_prompt_tokens_next(self) -> int:
        """About how many tokens of prompts will stand beside the generating requests in the next step."""
        num_tokens = sum(r.num_tokens - r.num_computed_tokens for r in self.running if not r.is_caught_up)
        if self.waiting and len(self.running) < self.max_num_seqs:
            num_tokens += self.waiting[0].num_tokens
        return min(num_tokens, self.max_prompt_tokens_beside_decode)

    def add(self, request: Request) -> None:
        """Let `request` wait for its turn. It must fit into an empty cache to its last token."""
        self._num_arrivals += 1
        request.rank = (self._num_steps + self.PATIENCE * request.priority, self._num_arrivals)
        insort(self.waiting, request, key=_rank)

    def cancel(self, request: Request) -> None:
        """End an unfinished request at once and take its blocks back."""
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self.kv_cache.release(request)
        request.drafts = NO_DRAFTS
        request.finish(FinishReason.ABORT)

    def schedule(self) -> Plan:
        """The next step. Empty only when nothing is left to do (or no block could be had just now)."""
        self._num_steps += 1
        preempted: list[Request] = []
        self._make_way(preempted)
        budget = _Budget(self)
        rows = self._schedule_running(budget, preempted)
        # After a preemption the cache is full: admitting now would only preempt again.
        if not preempted or not rows:
            self._admit_waiting(budget, rows)
        return Plan(tuple(rows), tuple(preempted))

    def update(self, plan: Plan, walks: Sequence[Walk | None]) -> list[StepResult]:
        """Take a step's outcome: each row's walk, None for rows without logits.

        Appends the tokens, lowers progress by what was rejected, publishes full blocks, releases what
        has finished. The only place where a request ends by itself.
        """
        results: list[StepResult] = []
        logits_row = first_row = 0
        for row, walk in zip(plan.rows, walks, strict=True):
            request = row.request
            request.num_computed_tokens += row.num_tokens
            request.drafts = NO_DRAFTS
            if walk is None:
                self.kv_cache.commit(request)
                results.append(
                    StepResult(request, [], NO_DRAFTS, [], -1, first_row, row.start, row.num_tokens)
                )
                first_row += row.num_tokens
                continue
            request.num_computed_tokens -= len(row.drafts) - len(walk.path)
            kept = request.append(walk.token_ids)
            self.kv_cache.commit(request)
            if request.is_finished:
                self.running.remove(request)
                self.kv_cache.release(request)
            path = walk.path[: len(kept)]
            results.append(
                StepResult(request, kept, row.drafts, path, logits_row, first_row, row.start, row.num_tokens)
            )
            logits_row += len(row.drafts) + 1
            first_row += row.num_tokens
        return results

    def look_ahead(self, request: Request, num_tokens: int) -> int:
        """Let a drafter write behind the tokens of a running request, up to `num_tokens` in all. Gives blocks
        only where every other running request could still have one; returns for how many tokens there are
        slots."""
        kv_cache = self.kv_cache
        num_missing = kv_cache.num_blocks_for(num_tokens) - len(request.block_table)
        if num_missing > 0 and num_missing + len(self.running) - 1 <= kv_cache.num_free_blocks:
            kv_cache.allocate(request, num_tokens)
        return len(request.block_table) * kv_cache.block_size

    def check(self) -> None:
        """Invariants between steps; AssertionError when one is broken."""
        self.kv_cache.check([*self.running, *self.waiting])
        for queue in (self.running, self.waiting):
            assert [r.rank for r in queue] == sorted(r.rank for r in queue)
        assert len(self.running) <= self.max_num_seqs
        assert all(not r.is_finished for r in (*self.running, *self.waiting))
        assert all(not r.block_table and not r.drafts for r in self.waiting)
        assert all(r.num_computed_tokens < r.num_tokens for r in self.running)

    def _make_way(self, preempted: list[Request]) -> None:
        """Preempt running requests of a worse priority that keep a better one from being admitted, unless
        they have waited so long that they stand before it."""
        while self.waiting and self.running:
            first, last = self.waiting[0], self.running[-1]
            has_room = len(self.running) < self.max_num_seqs and self._has_blocks_for(first)
            if has_room or first.priority >= last.priority or first.rank > last.rank:
                return
            self._preempt(last, preempted)

    def _has_blocks_for(self, request: Request) -> bool:
        """Whether it can be admitted and every running request can still grow by a block: else somebody
        would soon be preempted for it."""
        num_missing = self.kv_cache.num_blocks_for(request.num_tokens) - len(request.block_table)
        return (
            not self.running
            or not self.leaves_room
            or num_missing + len(self.running) <= self.kv_cache.num_free_blocks
        )

    def _schedule_running(self, budget: _Budget, preempted: list[Request]) -> list[PlanRow]:
        rows: list[PlanRow] = []
        i = 0
        while i < len(self.running):
            request = self.running[i]
            is_generating = request.is_caught_up
            num_left = request.num_tokens - request.num_computed_tokens
            num_tokens = budget.share(num_left + len(request.drafts), is_generating, request.is_scored)
            if num_tokens > num_left and not self._hold_drafts(
                request, num_tokens, len(self.running) - i - 1
            ):
                num_tokens = num_left
            if not self._hold(request, num_tokens, preempted):
                break  # it was the last one and has been preempted itself
            i += 1
            if num_tokens:
                budget.take(num_tokens, is_generating, request.is_scored)
                rows.append(_row(request, num_tokens))
        return rows

    def _hold_drafts(self, request: Request, num_tokens: int, num_behind: int) -> bool:
        """Get blocks for tokens that end in drafts, but only such as nobody behind could need in this step:
        drafts are not worth a preemption. On False nothing has changed."""
        end = request.num_computed_tokens + num_tokens
        num_missing = self.kv_cache.num_blocks_for(end) - len(request.block_table)
        if num_missing > 0 and num_missing + num_behind > self.kv_cache.num_free_blocks:
            return False
        return self.kv_cache.allocate(request, end)

    def _hold(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Get blocks for the next tokens of `request`, from the last requests if need be.

        False: it was itself the last and has been preempted.
        """
        while not self.kv_cache.allocate(request, request.num_computed_tokens + num_tokens):
            victim = self.running[-1]
            self._preempt(victim, preempted)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, preempted: list[Request]) -> None:
        """Take a request's blocks; it waits in its old place and is computed again."""
        self.running.remove(request)
        self.kv_cache.release(request)
        request.drafts = NO_DRAFTS
        insort(self.waiting, request, key=_rank)
        preempted.append(request)
        self.num_preemptions += 1

    def _admit_waiting(self, budget: _Budget, rows: list[PlanRow]) -> None:
        """Admit in order while there is room. Nobody overtakes the first, so it cannot starve."""
        while self.waiting and len(self.running) < self.max_num_seqs and not budget.is_spent:
            request = self.waiting[0]
            num_cached = self.kv_cache.admit(request)
            num_tokens = budget.share(request.num_tokens - num_cached, False, request.is_scored)
            # Blocks for all its tokens, not just the first chunk: half a prompt in the cache helps nobody.
            is_possible = num_tokens > 0 and self._has_blocks_for(request)
            if not is_possible or not self.kv_cache.allocate(request, request.num_tokens):
                self.kv_cache.release(request)
                return
            self.kv_cache.count_lookup(request)
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_cached
            self.waiting.pop(0)
            insort(self.running, request, key=_rank)
            budget.take(num_tokens, False, request.is_scored)
            rows.append(_row(request, num_tokens))


def _row(request: Request, num_tokens: int) -> PlanRow:
    start = request.num_computed_tokens
    num_drafts = start + num_tokens - request.num_tokens
    drafts = request.drafts.first(num_drafts) if num_drafts > 0 else NO_DRAFTS
    return PlanRow(request, start, num_tokens, drafts, num_drafts >= 0)


class _Budget:
    """The tokens of one step. Generating requests have a token each set aside; prompts share the rest."""

    __slots__ = ("_chunks", "_drafts_left", "_left", "_prompt_left", "_reserved")

    def __init__(self, scheduler: Scheduler) -> None:
        self._left = scheduler.max_num_batched_tokens
        self._reserved = sum(request.is_caught_up for request in scheduler.running)
        self._chunks = scheduler.enable_chunked_prefill
        self._drafts_left = scheduler.max_num_logits - scheduler.max_num_seqs
        self._prompt_left = self._left
        if self._reserved and self._chunks:
            self._prompt_left = scheduler.max_prompt_tokens_beside_decode

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left for a prompt."""
        return min(self._left - self._reserved, self._prompt_left) <= 0

    def share(self, num_wanted: int, is_generating: bool, is_scored: bool) -> int:
        """How many of the tokens it wants a request may have; a scored one needs the logits of all."""
        if is_generating:
            return min(num_wanted, self._left - self._reserved + 1, self._drafts_left + 1)
        num_free = min(self._left - self._reserved, self._prompt_left)
        if is_scored:
            return min(num_wanted, num_free, self._drafts_left + 1)
        if num_wanted > num_free and not self._chunks:
            return 0
        return min(num_wanted, num_free)

    def take(self, num_tokens: int, is_generating: bool, is_scored: bool) -> None:
        self._left -= num_tokens
        if is_generating:
            self._reserved -= 1
            self._drafts_left -= num_tokens - 1
        else:
            self._prompt_left -= num_tokens
            self._drafts_left -= num_tokens - 1 if is_scored else 0
