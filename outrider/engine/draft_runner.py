"""A second model that drafts: runner, cache manager and batch of any model, fed with the requests' tokens.

Its cache follows the final tokens of each request lazily, when it is asked to draft. Drafted tokens that came
true are in it already; those that did not are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

import outrider._native as _native
from outrider.engine.batch import Batch, SamplingBatch
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.runner import Runner
from outrider.engine.state import Request

CATCH_UP_ROWS = 512  # tokens of requests that are far behind, fed in one round
MOST_PENDING = 33  # tokens that a step can have added: its drafts and one more
_NOTHING = np.zeros(0, np.int32)
_NO_SAMPLING = SamplingBatch([], _NOTHING, np.zeros(0, np.int64), np.zeros(1, np.int32), _NOTHING)


@dataclass
class _Work:
    """One request's part of a round."""

    index: int
    shadow: Request  # its tokens and blocks here
    start: int  # of what is fed
    token_ids: list[int]  # fed next
    steps: int  # still to draft
    drafted: list[tuple[int, float]] = field(default_factory=list)


class DraftRunner:
    """Drafts for many requests at once, a token of each a run."""

    def __init__(
        self,
        runner: Runner,
        kv_cache: KVCacheManager,
        *,
        num_ids: int,
        vocab_size: int,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        """The model knows the first `num_ids` of the target's `vocab_size` token ids."""
        self.kv_cache = kv_cache
        self._runner = runner
        self._vocabulary = _native.DraftVocabulary(list(range(num_ids)), vocab_size)
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._shadows: dict[str, Request] = {}
        self._drafted: dict[str, list[int]] = {}  # fed behind the final tokens when last asked
        self._num_runs = self._num_fed = self._num_drafted = 0

    def draft(self, requests: Sequence[Request], steps: Sequence[int]) -> list[list[tuple[int, float]]]:
        """Up to `steps[i]` next tokens of each request; none for those still being caught up with."""
        results: list[list[tuple[int, float]]] = [[] for _ in requests]
        work = self._plan(requests, steps)
        first = True
        while work:
            self._run(work, requests)
            if first:
                self._note_fed(work)
                first = False
            for one in work:
                results[one.index] = one.drafted
            work = [one for one in work if one.steps > 0]
        return results

    def forget(self, request_id: str) -> None:
        shadow = self._shadows.pop(request_id, None)
        self._drafted.pop(request_id, None)
        if shadow is not None:
            self.kv_cache.release(shadow)

    def stats(self) -> dict[str, Any]:
        return {
            "requests": len(self._shadows),
            "runs": self._num_runs,
            "fed_tokens": self._num_fed,
            "drafted_tokens": self._num_drafted,
            "model_seconds": self._runner.seconds,
        }

    def _plan(self, requests: Sequence[Request], steps: Sequence[int]) -> list[_Work]:
        """Who is fed what. Those who are nearly up to date come first; the others share the rest."""
        rows_left = self._max_rows
        work: list[_Work] = []
        behind: list[_Work] = []
        for index, (request, num) in enumerate(zip(requests, steps, strict=True)):
            one = self._work(index, request, num) if num > 0 else None
            if one is None:
                continue
            if len(one.token_ids) > min(MOST_PENDING, rows_left):
                behind.append(one)
            else:
                rows_left -= len(one.token_ids)
                work.append(one)
        rows_left = min(rows_left, CATCH_UP_ROWS)
        for one in behind:
            if len(one.token_ids) > rows_left:
                one.token_ids, one.steps = one.token_ids[:rows_left], 0
            if one.token_ids:
                rows_left -= len(one.token_ids)
                work.append(one)
        return work

    def _work(self, index: int, request: Request, steps: int) -> _Work | None:
        shadow = self._follow(request)
        num_tokens = shadow.num_tokens
        steps = min(steps, self._max_model_len - num_tokens + 1)
        if steps <= 0:
            return None
        if not self.kv_cache.allocate(shadow, num_tokens + steps - 1):
            if not self.kv_cache.allocate(shadow, num_tokens):
                return None
            steps = len(shadow.block_table) * self.kv_cache.block_size - num_tokens + 1
        start = min(shadow.num_computed_tokens, num_tokens - 1)  # the last token's logits are needed
        return _Work(index, shadow, start, shadow.token_ids[start:], steps)

    def _follow(self, request: Request) -> Request:
        """The request's shadow, with its final tokens; drafts that came true count as fed."""
        shadow = self._shadows.get(request.request_id)
        if shadow is not None and shadow.num_tokens > request.num_tokens:
            self.forget(request.request_id)
            shadow = None
        if shadow is None:
            shadow = self._shadows[request.request_id] = Request(
                request.request_id, request.token_ids, request.params, request.stream, request.sampling_state,
                cache_salt=request.cache_salt,
            )  # fmt: skip
            self.kv_cache.admit(shadow)
            return shadow
        new = request.token_ids[shadow.num_tokens :]
        drafted = self._drafted.pop(request.request_id, [])
        if shadow.num_computed_tokens == shadow.num_tokens:
            pairs = zip(drafted, new, strict=False)
            shadow.num_computed_tokens += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        shadow.token_ids += new
        return shadow

    def _note_fed(self, work: list[_Work]) -> None:
        for one in work:
            one.shadow.num_computed_tokens = one.start + len(one.token_ids)
            self.kv_cache.commit(one.shadow)

    def _run(self, work: list[_Work], requests: Sequence[Request]) -> None:
        """Feed every request's next tokens, and draw one for those that have steps left."""
        logits = self._runner.run(_batch(work, self.kv_cache.block_size)).logits
        self._num_runs += 1
        row = 0
        for one in work:
            self._num_fed += len(one.token_ids)
            if one.steps <= 0:
                continue
            prefix = [token for token, _ in one.drafted]
            token, chance, *_ = _native.draft_row(
                logits[row], self._vocabulary, requests[one.index].sampling_state, prefix,
                one.shadow.num_tokens + len(prefix),
            )  # fmt: skip
            row += 1
            if token < 0:
                one.steps = 0
                continue
            self._num_drafted += 1
            one.drafted.append((token, chance))
            one.steps -= 1
            if one.steps > 0:
                self._drafted.setdefault(one.shadow.request_id, []).append(token)


def _batch(work: list[_Work], block_size: int) -> Batch:
    """The arrays of one run: tokens at their `start`, drafted ones behind the final ones."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    loc, seq_lens, logits = [0], [], []
    tables = np.zeros((len(work), max([len(one.shadow.block_table) for one in work])), np.int32)
    for i, one in enumerate(work):
        fed = [one.drafted[-1][0]] if one.drafted else one.token_ids
        start = one.shadow.num_tokens + len(one.drafted) - 1 if one.drafted else one.start
        table = one.shadow.block_table
        tables[i, : len(table)] = table
        token_ids += fed
        end = start + len(fed)
        positions += range(start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
        loc.append(len(token_ids))
        seq_lens.append(end)
        if one.steps > 0:
            logits.append(len(token_ids) - 1)
    arrays = [np.array(part, np.int32) for part in (token_ids, positions, slots, loc, seq_lens, logits)]
    return Batch(
        token_ids=arrays[0],
        positions=arrays[1],
        slot_mapping=arrays[2],
        query_start_loc=arrays[3],
        seq_lens=arrays[4],
        block_tables=tables,
        logits_indices=arrays[5],
        parents=_NOTHING,
        sampling=_NO_SAMPLING,
    )
