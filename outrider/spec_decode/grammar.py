"""Drafts and grammars: what must come is drafted, what cannot come is not.

Where the grammar leaves one token after the other, these are drafts that cannot be wrong. What other sources
propose is cut where the grammar forbids it, and goes on with what must come after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.sampling.grammar import GrammarMatcher, allows
from outrider.spec_decode.proposer import (
    MOST_DRAFT_TOKENS,
    NO_DRAFTS,
    Drafts,
    RequestView,
    ResultView,
    wants_source,
)

SOURCE = "grammar"


def matcher_of(request: RequestView) -> GrammarMatcher | None:
    """The request's place in its grammar; recorded requests have none."""
    return getattr(request, "grammar", None)


class GrammarProposer:
    """The tokens that must come next."""

    needs_hidden = False

    def __init__(self, *, max_draft_tokens: int = MOST_DRAFT_TOKENS) -> None:
        self._max_draft_tokens = max_draft_tokens

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        return [
            self.continue_after(request, (), limit) for request, limit in zip(requests, limits, strict=True)
        ]

    def continue_after(self, request: RequestView, after: Sequence[int], limit: int) -> Drafts:
        """What must follow `after`, which the grammar allows."""
        matcher = matcher_of(request)
        limit = min(limit, self._max_draft_tokens)
        if matcher is None or limit <= 0 or not wants_source(request.params, SOURCE):
            return NO_DRAFTS
        token_ids = matcher.forced(after, limit)
        return Drafts.chain(token_ids, [1.0] * len(token_ids), SOURCE) if token_ids else NO_DRAFTS

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


def allowed_part(request: RequestView, drafts: Drafts) -> Drafts:
    """The nodes that the request's grammar allows; all of them without one."""
    matcher = matcher_of(request)
    if matcher is None or not drafts.token_ids:
        return drafts
    masks = matcher.masks(drafts.token_ids, drafts.parents)
    kept: list[int] = []
    for node, (token_id, parent) in enumerate(zip(drafts.token_ids, drafts.parents, strict=True)):
        before = masks[parent + 1]
        if before is not None and allows(before, token_id):
            kept.append(node)
    return drafts.select(kept) if kept else NO_DRAFTS
