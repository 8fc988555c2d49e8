"""Drafts from the client's own prediction of the answer (`prediction` in a chat request).

The output is followed along the prediction. Where it differs, the place is searched again in what was
predicted, so an edit in the middle costs a few tokens and not the rest.
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

SOURCE = "predicted"
# Chance that the next predicted token is right, by how many before it agree with the output; [0] is a guess
# across a difference.
_CHANCES = (0.25, 0.5, 0.65, 0.78, 0.88, 0.9, 0.92, 0.93, *[0.95] * 8, 0.97)
_AT_THE_BEGINNING = (64, 0.75)  # what the native side calls it, and the chance


class PredictedProposer:
    """Follows the outputs of those requests that have a prediction."""

    needs_hidden = False
    learns = False  # `observe` has nothing to do

    def __init__(self, *, max_draft_tokens: int = MOST_DRAFT_TOKENS) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._requests: dict[str, _native.Prediction] = {}

    def concerns(self, request: RequestView) -> bool:
        """Whether there can be drafts for it."""
        return bool(request.params.prediction_token_ids)

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        return [
            self.continue_after(request, (), limit)
            if request.params.prediction_token_ids and wants_source(request.params, SOURCE)
            else NO_DRAFTS
            for request, limit in zip(requests, limits, strict=True)
        ]

    def continue_after(self, request: RequestView, after: Sequence[int], limit: int) -> Drafts:
        """A draft for the request's text as if it had gone on with `after`."""
        limit = min(limit, self._max_draft_tokens)
        if limit <= 0 or not request.params.prediction_token_ids:
            return NO_DRAFTS
        token_ids, agreed = self._caught_up(request).propose(limit, list(after))
        survival: list[float] = []
        alive = 1.0
        for i in range(len(token_ids)):
            if i == 0 and agreed == _AT_THE_BEGINNING[0]:
                alive *= _AT_THE_BEGINNING[1]
            else:
                alive *= _CHANCES[min(agreed + i, len(_CHANCES) - 1)]
            survival.append(alive)
        return Drafts.chain(token_ids, survival, SOURCE)

    def _caught_up(self, request: RequestView) -> _native.Prediction:
        output = request.token_ids[request.num_prompt_tokens :]
        prediction = self._requests.get(request.request_id)
        if prediction is None or len(prediction) > len(output):
            prediction = _native.Prediction(request.params.prediction_token_ids)
            self._requests[request.request_id] = prediction
        prediction.append(output[len(prediction) :])
        return prediction

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def stats(self) -> dict[str, Any]:
        return {
            "requests": len(self._requests),
            "memory_bytes": sum(prediction.memory_bytes for prediction in self._requests.values()),
        }
