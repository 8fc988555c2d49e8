"""Faults planted one at a time, each of which the tests must catch; one that none catches is a missing test.

    python tests/planted_faults.py        tries them all and says what caught each, and how fast

Loads are generated without shrinking and the first failure ends the search.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import planted_grammar_faults  # noqa: F401 (its faults are on the list once it is imported)
import planted_score_faults  # noqa: F401 (likewise)
import planted_tree_faults  # noqa: F401 (likewise)
import pytest
import test_kv_cache
from fakes import ReferenceSampled, ReferenceSampler, ReferenceState
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from planting import FAULTS, Patch, fault
from strategies import random_traffic
from test_lossless import run_traffic

import outrider.engine.engine as engine_module
from outrider.engine import output
from outrider.engine.batch import Batch
from outrider.engine.drafting import Drafting
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.output import OutputStream
from outrider.engine.scheduler import Plan, Scheduler
from outrider.engine.state import Request
from outrider.request import FinishReason
from outrider.sampling.verifier import Walk
from outrider.spec_decode.proposer import Drafts

# --- The sampler and the walk ------------------------------------------------------------------------


@fault
def noise_keyed_by_step_instead_of_position(patch: Patch) -> None:
    steps = itertools.count()
    original = ReferenceSampler.sample_row

    def sample_row(self: Any, logits: Any, state: Any, prefix: Any, position: int, sampled: Any) -> None:
        original(self, logits, state, prefix, next(steps), sampled)

    patch.setattr(ReferenceSampler, "sample_row", sample_row)


@fault
def penalties_that_ignore_the_window(patch: Patch) -> None:
    original = ReferenceSampler.sample_row

    def sample_row(self: Any, logits: Any, state: Any, prefix: Any, position: int, sampled: Any) -> None:
        original(self, logits, state, [], position, sampled)

    patch.setattr(ReferenceSampler, "sample_row", sample_row)


def _accept_drafts_where(patch: Patch, is_good: Callable[[list[float], int, ReferenceState], bool]) -> None:
    original = ReferenceSampler.sample

    def sample(self: Any, logits: Any, sampling: Any) -> ReferenceSampled:
        sampled = original(self, logits, sampling)
        start = sampling.prefix_start.tolist()
        for row, values in enumerate(logits.tolist()):
            if row + 2 < len(start) and start[row + 2] - start[row + 1] == start[row + 1] - start[row] + 1:
                draft = int(sampling.prefix_ids[start[row + 2] - 1])
                if is_good(values, draft, sampling.states[sampling.row_state[row]]):
                    sampled.token_ids[row] = draft
        return sampled

    patch.setattr(ReferenceSampler, "sample", sample)


@fault
def near_ties_accepted_at_temperature_zero(patch: Patch) -> None:
    _accept_drafts_where(
        patch, lambda v, draft, state: state.params.temperature == 0 and v[draft] >= max(v) - 0.5
    )


@fault
def any_draft_in_the_top_set_accepted(patch: Patch) -> None:
    _accept_drafts_where(patch, lambda v, draft, state: v[draft] >= sorted(v)[-2])


@fault
def sampler_not_told_of_tokens(patch: Patch) -> None:
    patch.setattr(ReferenceState, "append", lambda self, token_ids: None)


# --- Finishing and text ------------------------------------------------------------------------------


@fault
def stop_checked_only_on_the_last_token(patch: Patch) -> None:
    def append(self: Request, token_ids: Sequence[int]) -> list[int]:
        stream, kept = self.stream, [t for t in token_ids if t >= 0]
        rules = (stream._stop_ids, stream._stops, stream.max_tokens)
        stream._stop_ids, stream._stops, stream.max_tokens = frozenset(), [], 1 << 30
        for token_id in kept[:-1]:
            stream.append(token_id)
        stream._stop_ids, stream._stops, stream.max_tokens = rules
        if len(kept) < len(token_ids):
            self.finish(FinishReason.ERROR, "not a number")
        elif stream.append(kept[-1]):
            self.finish_reason = stream.finish_reason
        self.token_ids += kept
        self.sampling_state.append(kept)
        return kept

    patch.setattr(Request, "append", append)


@fault
def half_characters_shown(patch: Patch) -> None:
    class EagerDecoder:
        def __init__(self, errors: str) -> None:
            pass

        def decode(self, data: bytes, final: bool = False) -> str:
            return data.decode(errors="replace")

    patch.setattr(output, "_new_decoder", EagerDecoder)


@fault
def beginnings_of_stop_strings_not_held_back(patch: Patch) -> None:
    patch.setattr(OutputStream, "_num_held_back", lambda self, tail: 0)


@fault
def stop_strings_found_by_the_order_of_the_list(patch: Patch) -> None:
    def first_match(self: OutputStream, tail: bytes, old_length: int) -> tuple[int, int, str] | None:
        for text, stop in self._stops:
            start = tail.find(stop)
            if start >= 0:
                return start, start + len(stop), text
        return None

    patch.setattr(OutputStream, "_first_match", first_match)


# --- Progress and batches ----------------------------------------------------------------------------


def _after_update(patch: Patch, correct: Callable[[Request, int], None]) -> None:
    original = Scheduler.update

    def update(self: Scheduler, plan: Plan, walks: Sequence[Walk | None]) -> Any:
        results = original(self, plan, walks)
        for row, walk in zip(plan.rows, walks, strict=True):
            if walk is not None and len(walk.path) < len(row.drafts) and not row.request.is_finished:
                correct(row.request, len(row.drafts) - len(walk.path))
        return results

    patch.setattr(Scheduler, "update", update)


@fault
def no_rollback(patch: Patch) -> None:
    def correct(request: Request, num_rejected: int) -> None:
        request.num_computed_tokens += num_rejected

    _after_update(patch, correct)


@fault
def rollback_short_by_one(patch: Patch) -> None:
    def correct(request: Request, num_rejected: int) -> None:
        request.num_computed_tokens += 1

    _after_update(patch, correct)


def _remember_size(patch: Patch, size: list[int]) -> None:
    original = KVCacheManager.__init__

    def init(self: KVCacheManager, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        size[0] = self.num_blocks * self.block_size

    patch.setattr(KVCacheManager, "__init__", init)


@fault
def slot_off_by_one(patch: Patch) -> None:
    original = engine_module.build_batch
    size = [1]
    _remember_size(patch, size)

    def build_batch(plan: Plan, block_size: int) -> Batch:
        batch = original(plan, block_size)
        return dataclasses.replace(batch, slot_mapping=(batch.slot_mapping + 1) % size[0])

    patch.setattr(engine_module, "build_batch", build_batch)


@fault
def positions_count_from_the_chunk(patch: Patch) -> None:
    original = engine_module.build_batch

    def build_batch(plan: Plan, block_size: int) -> Batch:
        batch = original(plan, block_size)
        starts = [0] * len(batch.token_ids)
        for i, row in enumerate(plan.rows):
            for index in range(batch.query_start_loc[i], batch.query_start_loc[i + 1]):
                starts[index] = row.start
        return dataclasses.replace(batch, positions=batch.positions - starts)

    patch.setattr(engine_module, "build_batch", build_batch)


@fault
def invalid_drafts_trusted(patch: Patch) -> None:
    patch.setattr(Drafting, "_check", lambda self, drafts, limit: drafts)


# --- The cache ---------------------------------------------------------------------------------------


@fault
def drafts_published_to_the_prefix_cache(patch: Patch) -> None:
    original = Scheduler.update

    def update(self: Scheduler, plan: Plan, walks: Sequence[Walk | None]) -> Any:
        for row in plan.rows:
            if row.drafts.token_ids:
                _publish(self.kv_cache, row.request, row.drafts, row.start + row.num_tokens)
        return original(self, plan, walks)

    patch.setattr(Scheduler, "update", update)


def _publish(manager: KVCacheManager, request: Request, drafts: Drafts, num_computed: int) -> None:
    """Publish as if the drafts were final."""
    if not manager.enable_prefix_caching:
        return
    num_tokens = request.num_tokens
    request.token_ids += drafts.token_ids
    for index in range(request.num_published_blocks, num_computed // manager.block_size):
        digest, block = manager._digest(request, index), request.block_table[index]
        if digest not in manager._published and manager._digests[block] is None:
            manager._published[digest] = block
            manager._digests[block] = digest
    del request.token_ids[num_tokens:]
    del request.block_digests[num_tokens // manager.block_size :]


@fault
def whole_prompt_taken_from_the_cache(patch: Patch) -> None:
    original = KVCacheManager.admit

    def admit(self: KVCacheManager, request: Request) -> int:
        request.token_ids.append(0)  # so that the last token is not the last
        num_cached = original(self, request)
        request.token_ids.pop()
        return num_cached

    patch.setattr(KVCacheManager, "admit", admit)


@fault
def stale_index_after_eviction(patch: Patch) -> None:
    def allocate(self: KVCacheManager, request: Request, num_tokens: int) -> bool:
        num_missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        if num_missing > len(self._free):
            return False
        for _ in range(num_missing):
            block, _ = self._free.popitem(last=False)
            self._digests[block] = None
            self._ref_counts[block] = 1
            request.block_table.append(block)
        return True

    patch.setattr(KVCacheManager, "allocate", allocate)


@fault
def double_free(patch: Patch) -> None:
    original = KVCacheManager.release

    def release(self: KVCacheManager, request: Request) -> None:
        table = list(request.block_table)
        original(self, request)
        for block in table:
            if self._ref_counts[block] > 0:
                self._ref_counts[block] -= 1
                if self._ref_counts[block] == 0:
                    self._free[block] = None

    patch.setattr(KVCacheManager, "release", release)


@fault
def digests_that_forget_their_parents(patch: Patch) -> None:
    def digest(self: KVCacheManager, request: Request, index: int) -> bytes:
        start = index * self.block_size
        return array("i", request.token_ids[start : start + self.block_size]).tobytes() + b"x" * 32

    patch.setattr(KVCacheManager, "_digest", digest)


@fault
def salts_ignored(patch: Patch) -> None:
    original = KVCacheManager._digest

    def digest(self: KVCacheManager, request: Request, index: int) -> bytes:
        salt, request.cache_salt = request.cache_salt, ""
        result = original(self, request, index)
        request.cache_salt = salt
        return result

    patch.setattr(KVCacheManager, "_digest", digest)


@fault
def allocation_that_takes_what_it_can(patch: Patch) -> None:
    original = KVCacheManager.allocate

    def allocate(self: KVCacheManager, request: Request, num_tokens: int) -> bool:
        if original(self, request, num_tokens):
            return True
        original(self, request, (len(request.block_table) + len(self._free)) * self.block_size)
        return False

    patch.setattr(KVCacheManager, "allocate", allocate)


@fault
def blocks_leaked_on_preemption(patch: Patch) -> None:
    original = Scheduler._preempt

    def preempt(self: Scheduler, request: Request, preempted: list[Request]) -> None:
        kept, request.block_table = request.block_table[:1], request.block_table[1:]
        original(self, request, preempted)
        del kept

    patch.setattr(Scheduler, "_preempt", preempt)


@fault
def cancelled_requests_keep_their_blocks(patch: Patch) -> None:
    def cancel(self: Scheduler, request: Request) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        request.finish(FinishReason.ABORT)

    patch.setattr(Scheduler, "cancel", cancel)


# --- The hunt ----------------------------------------------------------------------------------------

HUNTING = settings(
    max_examples=40,
    stateful_step_count=40,
    phases=(Phase.generate,),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def hunt(num_loads: int = 80) -> str | None:
    """What catches the fault that is planted now, or None."""
    for seed in range(num_loads):
        try:
            run_traffic(random_traffic(seed))
        except Exception as error:
            return f"the law, load {seed}: {_first_line(error)}"
    try:
        run_state_machine_as_test(test_kv_cache.CacheMachine, settings=HUNTING)
    except Exception as error:
        return f"the cache machine: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {str(error).partition(chr(10))[0]}".strip()


def main() -> int:
    logging.disable(logging.CRITICAL)
    missed = 0
    for name, plant in FAULTS.items():
        begin = time.perf_counter()
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            caught = hunt()
        missed += caught is None
        print(f"{time.perf_counter() - begin:6.2f} s  {name}: {caught or 'NOT CAUGHT'}", flush=True)
    honest = hunt()
    print(f"honest code: {honest or 'passes'}")
    return 1 if missed or honest else 0


if __name__ == "__main__":
    sys.exit(main())
