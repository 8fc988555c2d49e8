"""Drafts from the request's own text: what followed when its last tokens occurred before.

The native index grows by the final tokens of a request and answers in constant time. The longest match
wins, of equally long ones the newest; a match may lie in the prompt, in the output or across both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import outrider._native as _native
from outrider.request import SamplingParams
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts, RequestView, ResultView, draft_limit
from outrider.spec_decode.survival import MAX_DEPTH, RequestShift, SurvivalTable

SOURCE = "ngram"
# Classes of matches by length, and the acceptance each starts from. The first four give the accepted shares
# that were measured on the built-in model (0.12, 0.28, 0.53, 0.75 of five drafted tokens).
_FIRST_LENGTHS = (1, 2, 3, 4, 5, 7, 11, 21)
_PRIORS = (0.38, 0.60, 0.79, 0.88, 0.91, 0.93, 0.95, 0.97)


class _Tracked:
    """What is kept of one request."""

    __slots__ = ("index", "klass", "shift")

    def __init__(self, min_n: int, max_n: int) -> None:
        self.index = _native.NgramIndex(min_n, max_n)
        self.shift = RequestShift()
        self.klass = 0  # of the last draft


class NgramProposer:
    """Looks up the last `max_n` down to `min_n` tokens of each request in its own text."""

    needs_hidden = False

    def __init__(
        self, *, max_n: int = 5, min_n: int = 2, max_draft_tokens: int = MAX_DEPTH, min_survival: float = 0.0
    ) -> None:
        """A draft ends before its first token whose estimated survival is below `min_survival`."""
        self._min_n, self._max_n = min_n, max_n
        self._max_draft_tokens = max_draft_tokens
        self._min_survival = min_survival
        self._requests: dict[str, _Tracked] = {}
        self._table = SurvivalTable(_PRIORS)
        self._num_matches = 0
        self._num_lookups = 0

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        self._table.end_round()
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _propose(self, request: RequestView, limit: int) -> Drafts:
        limit = self._limit(request.params, limit)
        if limit <= 0:
            return NO_DRAFTS
        tracked = self._caught_up(request)
        tracked.shift.relax()
        self._num_lookups += 1
        token_ids, match_length = tracked.index.propose(limit)
        if not token_ids:
            return NO_DRAFTS
        self._num_matches += 1
        tracked.klass = bisect_right(_FIRST_LENGTHS, match_length) - 1
        odds, factor = self._table.odds(tracked.klass), tracked.shift.factor
        survival: list[float] = []
        alive = 1.0
        for depth in range(len(token_ids)):
            shifted = odds[depth] * factor
            alive *= shifted / (1.0 + shifted)
            if alive < self._min_survival:
                break
            survival.append(alive)
        return Drafts.chain(token_ids[: len(survival)], survival, SOURCE)

    def _limit(self, params: SamplingParams, limit: int) -> int:
        wanted = draft_limit(params, SOURCE, min(limit, self._max_draft_tokens, MAX_DEPTH))
        return wanted.max_tokens if wanted.wanted else 0

    def _caught_up(self, request: RequestView) -> _Tracked:
        """The request's record, with all its tokens in the index."""
        token_ids = request.token_ids
        tracked = self._requests.get(request.request_id)
        if tracked is None or len(tracked.index) > len(token_ids):
            tracked = self._requests[request.request_id] = _Tracked(self._min_n, self._max_n)
        tracked.index.append(token_ids[len(tracked.index) :])
        return tracked

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        for result in results:
            tracked = self._requests.get(result.request_id)
            drafts = result.drafts
            if tracked is None or not drafts or drafts.source[0] != SOURCE:
                continue
            num_accepted = len(result.path)
            # A stop that cut the accepted tokens says nothing about the draft after it.
            was_rejected = num_accepted < len(drafts) and len(result.token_ids) > num_accepted
            tracked.shift.observe(self._table.odds(tracked.klass), num_accepted, was_rejected)
            self._table.observe(tracked.klass, num_accepted, was_rejected)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def stats(self) -> dict[str, Any]:
        return {
            "requests": len(self._requests),
            "memory_bytes": sum(tracked.index.memory_bytes for tracked in self._requests.values()),
            "lookups": self._num_lookups,
            "matches": self._num_matches,
            "acceptance": {
                str(length): [
                    round(self._table.probability(klass, depth), 3) for depth in (0, 1, 2, 4, 8, 16)
                ]
                for klass, length in enumerate(_FIRST_LENGTHS)
            },
        }
