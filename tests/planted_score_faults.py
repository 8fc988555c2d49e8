"""Faults of prompt log-probabilities, planted one at a time (see `planted_faults`)."""

from __future__ import annotations

from typing import Any

from planting import Patch, fault

import outrider.engine.engine as engine_module
from outrider.engine import batch as batch_module
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.state import Request


@fault
def scored_prompts_taken_from_the_prefix_cache(patch: Patch) -> None:
    original = KVCacheManager.admit

    def admit(self: KVCacheManager, request: Request) -> int:
        scores, request.prompt_scores = request.prompt_scores, None
        try:
            return original(self, request)
        finally:
            request.prompt_scores = scores

    patch.setattr(KVCacheManager, "admit", admit)


@fault
def prompt_tokens_scored_by_their_own_row(patch: Patch) -> None:
    original = batch_module.scored_rows

    def scored_rows(plan: Any) -> Any:
        for row, request, position in original(plan):
            yield row, request, max(position - 1, 0)

    patch.setattr(engine_module, "scored_rows", scored_rows)


@fault
def only_the_first_chunk_of_a_prompt_is_scored(patch: Patch) -> None:
    original = batch_module.scored_rows

    def scored_rows(plan: Any) -> Any:
        first = {id(row.request): row.start == 0 for row in plan.rows}
        return (entry for entry in original(plan) if first[id(entry[1])])

    patch.setattr(batch_module, "scored_rows", scored_rows)
    patch.setattr(engine_module, "scored_rows", scored_rows)
