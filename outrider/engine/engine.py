"""The engine: one step on one page.

`Engine.step` is the only place that knows the order of things; its collaborators never call each other.
One thread owns an engine and everything in it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, Protocol

from outrider.engine.admission import check_request
from outrider.engine.batch import SamplingBatch, build_batch, moves_of, scored_rows
from outrider.engine.drafting import Drafting
from outrider.engine.grammars import Grammars
from outrider.engine.metrics import EngineMetrics
from outrider.engine.output import OutputStream, Vocabulary, final_output, refusal, step_output
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Plan, Scheduler
from outrider.engine.state import Request
from outrider.request import AddRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from outrider.sampling.prompt_scores import score_tokens
from outrider.sampling.verifier import Walk, walk_by_policy

_SEED_BITS = 53  # so that a drawn seed survives JSON
_GRAMMAR_WAIT_S = 0.005  # for a grammar when nothing else is to be done


class Sampled(Protocol):
    """What the sampler drew: one entry for each row of logits."""

    @property
    def token_ids(self) -> Sequence[int]: ...  # -1 where the logits are not numbers
    @property
    def logprobs(self) -> Sequence[TokenLogprobs | None] | None: ...


class Sampler(Protocol):
    """Draws a token for every row of logits."""

    def make_state(
        self, params: SamplingParams, prompt_ids: Sequence[int], eos_ids: Sequence[int], seed: int
    ) -> Any: ...
    def sample(self, logits: Any, sampling: SamplingBatch) -> Sampled: ...


class Engine:
    """Requests in, increments of their answers out."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        drafting: Drafting,
        vocabulary: Vocabulary,
        max_model_len: int,
        seed: int = 0,
        accept_policy: str = "normal",
        grammars: Grammars | None = None,
    ) -> None:
        if max_model_len > scheduler.capacity:
            raise ValueError(
                f"max_model_len {max_model_len} exceeds the cache of {scheduler.capacity} tokens"
            )
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.drafting = drafting
        self.vocabulary = vocabulary
        self.max_model_len = max_model_len
        self.grammars = grammars or Grammars(None)
        self.metrics = EngineMetrics()
        self._seeds = random.Random(seed)
        self._accept_policy = accept_policy
        self._requests: dict[str, Request] = {}  # unfinished, by id

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.grammars.num_waiting > 0

    def add_request(self, request: AddRequest) -> None:
        """Take a request; ValueError says why it cannot be taken."""
        if request.request_id in self._requests:
            raise ValueError(f"a request with id {request.request_id!r} is already running")
        check_request(request, vocab_size=len(self.vocabulary), max_model_len=self.max_model_len)
        params, prompt_ids = request.params, request.prompt_token_ids
        max_tokens = self.max_model_len - len(prompt_ids)
        if params.max_tokens is not None:
            max_tokens = min(max_tokens, params.max_tokens)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(_SEED_BITS)
        live = Request(
            request.request_id,
            prompt_ids,
            params,
            OutputStream(params, max_tokens, self.vocabulary),
            self.sampler.make_state(params, prompt_ids, sorted(self.vocabulary.eos_ids), seed),
            seed=seed,
            priority=request.priority,
            cache_salt=request.cache_salt,
            arrival_time=request.arrival_time,
        )
        is_ready = self.grammars.prepare(live)
        self._requests[live.request_id] = live
        if is_ready:
            self.scheduler.add(live)

    def cancel(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """End requests and free their blocks at once; unknown and finished ones are no error. Empty: all."""
        outputs = []
        for request_id in list(request_ids) or list(self._requests):
            request = self._requests.pop(request_id, None)
            if request is not None:
                if self.grammars.drop(request_id):
                    request.finish(FinishReason.ABORT)
                else:
                    self.scheduler.cancel(request)
                self.drafting.forget(request_id)
                self.metrics.observe_end(request, time.monotonic())
                outputs.append(final_output(request))
        return outputs

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled request by one forward pass."""
        begin = time.monotonic()
        refused = self._take_grammars() if self.grammars.num_waiting else []
        plan = self.scheduler.schedule()
        for request in plan.preempted:
            self.drafting.forget(request.request_id)
        if not plan:
            return refused
        batch = build_batch(plan, self.scheduler.kv_cache.block_size)
        output = self.runner.run(batch)
        num_drawn = len(batch.sampling.row_state)
        sampled = self.sampler.sample(output.logits[:num_drawn], batch.sampling)
        if num_drawn < len(batch.logits_indices):
            _score_prompts(plan, output.logits[num_drawn:])
        walks = verify_plan(plan, sampled.token_ids, self._accept_policy)
        if (moves := moves_of(plan, walks, self.scheduler.kv_cache.block_size)) is not None:
            self.runner.move_slots(*moves)
        results = self.scheduler.update(plan, walks)
        self.drafting.observe(results, output.hidden)
        self.drafting.propose(self.scheduler.running, self.scheduler.num_prompt_tokens_next())
        end = time.monotonic()
        self.drafting.observe_step(plan, results, end - begin)
        self.metrics.observe_step(results, begin, end)

        outputs = refused
        for result in results:
            if result.logits_row >= 0:
                outputs.append(step_output(result, sampled.logprobs))
                if result.request.is_finished:
                    del self._requests[result.request_id]
        return outputs

    def _take_grammars(self) -> list[RequestOutput]:
        """Let requests go on whose grammars are there; the last words to those that cannot have theirs."""
        refused = []
        for request, error in self.grammars.take_ready(0.0 if self.scheduler.has_work else _GRAMMAR_WAIT_S):
            if error is None:
                self.scheduler.add(request)
                continue
            del self._requests[request.request_id]
            request.finish(FinishReason.ERROR, error)
            self.metrics.observe_end(request, time.monotonic())
            refused.append(refusal(request))
        return refused

    def close(self) -> None:
        """The end: what should outlive the engine is kept. Unfinished requests are not."""
        close = getattr(self.drafting.proposer, "close", None)
        if close is not None:
            close()

    def stats(self) -> dict[str, Any]:
        """Counters since the start and gauges of now, as plain values."""
        kv_cache = self.scheduler.kv_cache
        return self.metrics.snapshot() | {
            "num_requests_running": len(self.scheduler.running),
            "num_requests_waiting": len(self.scheduler.waiting) + self.grammars.num_waiting,
            "kv_cache_usage": 1 - kv_cache.num_free_blocks / kv_cache.num_blocks,
            "num_kv_blocks": kv_cache.num_blocks,
            "block_size": kv_cache.block_size,
            "prefix_cache_queries": kv_cache.num_queried_tokens,
            "prefix_cache_hits": kv_cache.num_hit_tokens,
            "num_preemptions": self.scheduler.num_preemptions,
            "num_draft_errors": self.drafting.num_errors,
            "model_seconds": self.runner.seconds,
            "speculation": self.drafting.stats(),
            "grammars": self.grammars.stats(),
        }


def _score_prompts(plan: Plan, logits: Any) -> None:
    """Note the log-probabilities of prompt tokens, for requests that ask for them."""
    rows = [(request, position) for _, request, position in scored_rows(plan)]
    following = [request.token_ids[position + 1] for request, position in rows]
    scores = score_tokens(logits, following, [request.params.prompt_logprobs or 0 for request, _ in rows])
    for (request, position), score in zip(rows, scores, strict=True):
        if request.prompt_scores is not None:
            request.prompt_scores[position] = score


def verify_plan(plan: Plan, sampled: Sequence[int], accept_policy: str = "normal") -> list[Walk | None]:
    """The walk along each row's drafts; None for rows without logits."""
    walks: list[Walk | None] = []
    start = 0
    for row in plan.rows:
        if row.has_logits:
            end = start + len(row.drafts) + 1
            walks.append(walk_by_policy(row.drafts, sampled[start:end], accept_policy))
            start = end
        else:
            walks.append(None)
    return walks
