"""Drafts from the request's own text: what followed when its last tokens occurred before.

The native index grows by the final tokens of a request and answers in constant time. The longest match
wins, of equally long ones the newest; a match may lie in the prompt, in the output or across both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import outrider._native as _native
from outrider.spec_decode.proposer import (
    MOST_DRAFT_TOKENS,
    NO_DRAFTS,
    Drafts,
    RequestView,
    ResultView,
    wants_source,
)

SOURCE = "ngram"
# Chance that a token is accepted, by how many tokens before it agree with the place it comes from; measured
# on answers of the built-in model, [0] unused. The controller corrects it for the text at hand.
_CHANCES = (0.3, 0.38, 0.6, 0.79, 0.88, 0.91, 0.91, *[0.93] * 4, *[0.95] * 10, 0.97)


class NgramProposer:
    """Looks up the last `max_n` down to `min_n` tokens of each request in its own text."""

    needs_hidden = False
    learns = False  # `observe` has nothing to do

    def __init__(
        self,
        *,
        max_n: int = 5,
        min_n: int = 2,
        max_draft_tokens: int = MOST_DRAFT_TOKENS,
        min_survival: float = 0.0,
    ) -> None:
        """A draft ends before its first token whose estimated survival is below `min_survival`."""
        self._min_n, self._max_n = min_n, max_n
        self._max_draft_tokens = max_draft_tokens
        self._min_survival = min_survival
        self._requests: dict[str, _native.NgramIndex] = {}
        self._num_matches = 0
        self._num_lookups = 0

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        return [
            self.continue_after(request, (), limit) if wants_source(request.params, SOURCE) else NO_DRAFTS
            for request, limit in zip(requests, limits, strict=True)
        ]

    def continue_after(self, request: RequestView, after: Sequence[int], limit: int) -> Drafts:
        """A draft for the request's text as if it had gone on with `after`."""
        limit = min(limit, self._max_draft_tokens)
        if limit <= 0:
            return NO_DRAFTS
        self._num_lookups += 1
        token_ids, match_length = self._caught_up(request).propose(limit, list(after))
        if not token_ids:
            return NO_DRAFTS
        self._num_matches += 1
        survival: list[float] = []
        alive = 1.0
        for agreed in range(match_length, match_length + len(token_ids)):
            alive *= _CHANCES[min(agreed, len(_CHANCES) - 1)]
            if alive < self._min_survival:
                break
            survival.append(alive)
        return Drafts.chain(token_ids[: len(survival)], survival, SOURCE)

    def _caught_up(self, request: RequestView) -> _native.NgramIndex:
        """The request's index, with all its tokens in it."""
        token_ids = request.token_ids
        index = self._requests.get(request.request_id)
        if index is None or len(index) > len(token_ids):
            index = self._requests[request.request_id] = _native.NgramIndex(self._min_n, self._max_n)
        index.append(token_ids[len(index) :])
        return index

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def stats(self) -> dict[str, Any]:
        return {
            "requests": len(self._requests),
            "memory_bytes": sum(index.memory_bytes for index in self._requests.values()),
            "lookups": self._num_lookups,
            "matches": self._num_matches,
        }
