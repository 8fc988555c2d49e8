"""Drafts from what was written before: the request's own text, and past outputs of the same tenant.

Each live request has a suffix tree of its prompt and output. Finished outputs go into a tree of their
tenant (`draft_memory: tenant`), of everybody (`global`) or nowhere (`request`). For several lengths of
match each tree gives the likeliest continuation, by counts; the one with the most expected accepted tokens
is drafted. What a tenant wrote is never looked up for another.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import outrider._native as _native
from outrider.spec_decode.merge import merge
from outrider.spec_decode.proposer import (
    MOST_DRAFT_TOKENS,
    NO_DRAFTS,
    Drafts,
    MemoryStore,
    RequestView,
    ResultView,
    wants_source,
)

logger = logging.getLogger(__name__)

SOURCE = "suffix"
# A token seen c of n times after m tokens survives with (c + WEIGHT * PRIOR[m]) / (n + WEIGHT). Fitted to
# recorded answers of the built-in model.
WEIGHT = 1.0
PRIOR = tuple(1.0 - 0.75 * math.exp(-length / 8.0) for length in range(33))
MOST_MEMORY = 128 * 2**20  # bytes of past outputs, all tenants together
SAVE_EVERY_S = 300.0  # while outputs come in
_MOST_RESUMED = 256  # preempted requests whose outputs are not counted twice

Tokens = list[int]


class _Tracked:
    """What is kept of one live request."""

    __slots__ = ("late", "memory_key", "num_remembered", "tree")

    def __init__(self, max_depth: int, memory_key: bytes | None, num_remembered: int) -> None:
        self.tree = _native.RequestTree(max_depth)
        self.memory_key = memory_key
        self.num_remembered = num_remembered  # of its tokens: the prompt, or more after a preemption
        self.late: Tokens = []  # became final after the tree was last asked


class Memories:
    """The trees of past outputs, one for each tenant, within limits of number and size."""

    def __init__(self, max_depth: int, max_texts: int, max_bytes: int = MOST_MEMORY) -> None:
        """`max_texts` -1: as many as the bytes allow."""
        self._max_depth, self._max_texts, self._max_bytes = max_depth, max_texts, max_bytes
        self._trees: dict[bytes, _native.MemoryTree] = {}
        self._order: deque[bytes] = deque()  # whose text came when
        self._sizes: dict[bytes, int] = {}
        self._num_bytes = 0

    def tree(self, key: bytes) -> _native.MemoryTree | None:
        return self._trees.get(key)

    def insert(self, key: bytes, token_ids: Tokens) -> None:
        """Remember a text; the oldest of anybody's make room for it."""
        if not token_ids or self._max_texts == 0:
            return
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = _native.MemoryTree(self._max_depth)
        tree.insert(token_ids)
        self._order.append(key)
        self._weigh(key, tree)
        while len(self._order) > self._max_texts >= 0 or self._num_bytes > self._max_bytes:
            self._evict()

    def _evict(self) -> None:
        key = self._order.popleft()
        tree = self._trees[key]
        tree.evict()
        if tree.num_texts == 0:
            del self._trees[key]
            self._num_bytes -= self._sizes.pop(key)
        else:
            self._weigh(key, tree)

    def _weigh(self, key: bytes, tree: _native.MemoryTree) -> None:
        self._num_bytes += tree.live_bytes - self._sizes.get(key, 0)
        self._sizes[key] = tree.live_bytes

    def texts(self) -> list[tuple[bytes, Tokens]]:
        """Everything, in order of arrival."""
        by_key = {key: iter(tree.texts()) for key, tree in self._trees.items()}
        return [(key, next(by_key[key])) for key in self._order]

    def stats(self) -> dict[str, Any]:
        return {
            "outputs": len(self._order),
            "tokens": sum(tree.num_tokens for tree in self._trees.values()),
            "tenants": len(self._trees),
            "bytes": self._num_bytes,
        }


class SuffixProposer:
    """SuffixDecoding over one tree a request and one a tenant."""

    needs_hidden = False

    def __init__(
        self,
        *,
        max_depth: int = 64,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_draft_tokens: int = MOST_DRAFT_TOKENS,
        draft_memory: str = "tenant",
        branches: bool = False,
        store: MemoryStore | None = None,
        max_memory_bytes: int = MOST_MEMORY,
    ) -> None:
        self._max_depth = max(2, max_depth)
        self._max_draft_tokens = max_draft_tokens
        self._draft_memory = draft_memory
        self._branches = branches
        self._scoring = _native.SuffixScoring(
            weight=WEIGHT, prior=list(PRIOR), spec_factor=max_spec_factor, min_survival=min_token_prob
        )
        self._requests: dict[str, _Tracked] = {}
        self._resumed: OrderedDict[str, int] = OrderedDict()
        self._memories = Memories(self._max_depth, max_cached_requests, max_memory_bytes)
        self._store = store
        self._saved_at = time.monotonic()
        self._num_lookups = self._num_matches = self._num_from_memory = 0
        if store is not None:
            for key, token_ids in store.load():
                self._memories.insert(key, token_ids)

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        return [
            self.continue_after(request, (), limit) for request, limit in zip(requests, limits, strict=True)
        ]

    def continue_after(self, request: RequestView, after: Sequence[int], limit: int) -> Drafts:
        """Drafts for the request's text as if it had gone on with `after`."""
        limit = min(limit, self._max_draft_tokens)
        if limit <= 0 or not wants_source(request.params, SOURCE):
            return NO_DRAFTS
        tracked = self._caught_up(request)
        memory = None if tracked.memory_key is None else self._memories.tree(tracked.memory_key)
        found = tracked.tree.propose(
            [] if memory is None else [memory], list(after), limit, self._branches, self._scoring
        )
        self._num_lookups += 1
        best = max(found, key=_score)
        if not best[0]:
            return NO_DRAFTS
        self._num_matches += 1
        self._num_from_memory += best is not found[0]
        if self._branches and all(proposal[0] for proposal in found):
            found.sort(key=_score, reverse=True)
            return merge([_drafts(proposal) for proposal in found], limit)
        return _drafts(best)

    def _caught_up(self, request: RequestView) -> _Tracked:
        """The request's record, with all its tokens in the tree."""
        token_ids = request.token_ids
        tracked = self._requests.get(request.request_id)
        if tracked is None or len(tracked.tree) > len(token_ids):
            remembered = self._resumed.pop(request.request_id, request.num_prompt_tokens)
            tracked = _Tracked(self._max_depth, self._key(request.cache_salt), remembered)
            self._requests[request.request_id] = tracked
        tracked.tree.append(token_ids[len(tracked.tree) :])
        tracked.late.clear()
        return tracked

    def _key(self, salt: str) -> bytes | None:
        if self._draft_memory == "request":
            return None
        return _digest(salt) if self._draft_memory == "tenant" else b""

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        for result in results:
            tracked = self._requests.get(result.request_id)
            if tracked is not None:
                tracked.late += result.token_ids

    def forget(self, request_id: str) -> None:
        """The request is over: what it wrote becomes memory."""
        tracked = self._requests.pop(request_id, None)
        if tracked is None or tracked.memory_key is None:
            return
        self._memories.insert(tracked.memory_key, tracked.tree.tokens(tracked.num_remembered) + tracked.late)
        # If it was only preempted it comes back, longer.
        self._resumed[request_id] = len(tracked.tree) + len(tracked.late)
        if len(self._resumed) > _MOST_RESUMED:
            self._resumed.popitem(last=False)
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.close()

    def close(self) -> None:
        """Keep what is remembered, if there is a place for it. It may go on afterwards."""
        if self._store is None:
            return
        self._saved_at = time.monotonic()
        try:
            self._store.save(self._memories.texts())
        except OSError as error:
            logger.warning("past outputs cannot be saved: %s", error)

    def stats(self) -> dict[str, Any]:
        return {
            "requests": len(self._requests),
            "memory_bytes": sum(tracked.tree.memory_bytes for tracked in self._requests.values()),
            "lookups": self._num_lookups,
            "matches": self._num_matches,
            "from_past_outputs": self._num_from_memory,
            "past_outputs": self._memories.stats(),
        }


def _digest(salt: str) -> bytes:
    """Names a tenant without telling its key or salt."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def _score(proposal: tuple[Tokens, Tokens, list[float], int, float]) -> float:
    return proposal[4]


def _drafts(proposal: tuple[Tokens, Tokens, list[float], int, float]) -> Drafts:
    token_ids, parents, chances, _, _ = proposal
    survival: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        survival.append(chance * survival[parent] if parent >= 0 else chance)
    return Drafts(tuple(token_ids), tuple(parents), tuple(survival), (SOURCE,) * len(token_ids))
