"""Drafts from a second, smaller model with the same tokenizer.

It has a cache of its own and draws with the noise, penalties and masks of each request, so that at any
temperature it tends to draw what the target draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from outrider.spec_decode.proposer import NO_DRAFTS, Drafts, RequestView, ResultView

SOURCE = "draft_model"
_LEAST_SURVIVAL = 1e-4


class DraftModel(Protocol):
    """A model that goes on with requests' texts."""

    def draft(self, requests: Sequence[Any], steps: Sequence[int]) -> list[list[tuple[int, float]]]:
        """Up to `steps[i]` next tokens of the i-th request, with the model's own probability of each."""

    def forget(self, request_id: str) -> None:
        """Free what is kept of a request."""

    def stats(self) -> dict[str, Any]: ...


class DraftModelProposer:
    """Asks a model for chains."""

    needs_hidden = False

    def __init__(self, model: DraftModel, max_model_steps: int) -> None:
        self.max_model_steps = max_model_steps
        # Set by whoever decides how many steps are worth their time: (requests, free drafts) -> steps.
        self.choose_model_steps: Callable[[Sequence[RequestView], Sequence[Drafts]], Sequence[int]] | None
        self.choose_model_steps = None
        self._model = model

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        steps = [min(limit, self.max_model_steps) for limit in limits]
        if self.choose_model_steps is not None:
            chosen = self.choose_model_steps(requests, [NO_DRAFTS] * len(requests))
            steps = [min(pair) for pair in zip(steps, chosen, strict=True)]
        if not any(steps):
            return [NO_DRAFTS] * len(requests)
        return [_chain(drafted) for drafted in self._model.draft(requests, steps)]

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self._model.forget(request_id)

    def stats(self) -> dict[str, Any]:
        return self._model.stats()


def _chain(drafted: Sequence[tuple[int, float]]) -> Drafts:
    survival: list[float] = []
    alive = 1.0
    for _, chance in drafted:
        alive = max(min(alive, alive * chance), _LEAST_SURVIVAL)
        survival.append(alive)
    return Drafts.chain([token for token, _ in drafted], survival, SOURCE)
