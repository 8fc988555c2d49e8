"""Drafts and grammars: what must come is drafted, what cannot come is not.

Where the grammar leaves one token after the other, these are drafts that cannot be wrong; where it leaves a
few, each is a branch, with what must follow it. What other sources propose is cut where the grammar forbids
it, and goes on with what must come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from outrider.sampling.grammar import GrammarMatcher
from outrider.spec_decode.proposer import (
    MOST_DRAFT_TOKENS,
    NO_DRAFTS,
    Drafts,
    FreeSource,
    RequestView,
    ResultView,
    wants_source,
)

SOURCE = "grammar"
_MOST_CHOICES = 3  # tokens that are drafted beside each other
_MOST_AFTER_CHOICE = 8  # tokens that must follow one of them


def matcher_of(request: RequestView) -> GrammarMatcher | None:
    """The request's place in its grammar; recorded requests have none."""
    return getattr(request, "grammar", None)


class GrammarProposer:
    """The tokens that must come next, and where it is one of a few, these."""

    needs_hidden = False
    learns = False  # `observe` has nothing to do

    def __init__(self, *, max_draft_tokens: int = MOST_DRAFT_TOKENS, branches: bool = False) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._branches = branches

    def concerns(self, request: RequestView) -> bool:
        """Whether there can be drafts for it."""
        return matcher_of(request) is not None

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        return [self._tree(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def continue_after(self, request: RequestView, after: Sequence[int], limit: int) -> Drafts:
        """What must follow `after`, which the grammar allows."""
        matcher = matcher_of(request)
        limit = min(limit, self._max_draft_tokens)
        if matcher is None or limit <= 0 or not wants_source(request.params, SOURCE):
            return NO_DRAFTS
        token_ids = matcher.forced(after, limit)
        return Drafts.chain(token_ids, [1.0] * len(token_ids), SOURCE) if token_ids else NO_DRAFTS

    def _tree(self, request: RequestView, limit: int) -> Drafts:
        chain = self.continue_after(request, (), limit)
        matcher = matcher_of(request)
        room = min(limit, self._max_draft_tokens) - len(chain)
        if not self._branches or matcher is None or not wants_source(request.params, SOURCE):
            return chain
        choices = matcher.choices(chain.token_ids, min(_MOST_CHOICES, room))
        token_ids, parents = list(chain.token_ids), list(chain.parents)
        survival = list(chain.survival)
        for choice in choices:
            rest = matcher.forced((*chain.token_ids, choice), min(_MOST_AFTER_CHOICE, room - len(choices)))
            room -= len(rest)
            branch = [choice, *rest]
            parents += [len(chain) - 1, *range(len(token_ids), len(token_ids) + len(rest))]
            token_ids += branch
            survival += [1.0 / len(choices)] * len(branch)
        return Drafts(tuple(token_ids), tuple(parents), tuple(survival), (SOURCE,) * len(token_ids))

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


def in_grammar(
    request: RequestView,
    drafts: Drafts,
    limit: int,
    sources: Iterable[tuple[str, FreeSource]],
    guarded: Callable[[str, Callable[[], Drafts], Drafts], Drafts],
) -> Drafts:
    """What the request's grammar allows of a draft. A chain goes on with what must follow, with what the best
    of the free `sources` says comes then, and with what must follow that."""
    if matcher_of(request) is None or not drafts.token_ids:
        return drafts
    by_name = dict(sources)
    forced = by_name.pop(SOURCE, None)
    if drafts.source[0] != SOURCE:  # else it is allowed, and as long as it can be
        drafts = allowed_part(request, drafts)
        if forced is None or not drafts.is_chain or not drafts.token_ids:
            return drafts
        drafts = _joined(drafts, forced.continue_after(request, drafts.token_ids, limit - len(drafts)))
    if forced is None or not drafts.is_chain:
        return drafts
    room = limit - len(drafts)
    if room <= 0 or drafts.source[-1] != SOURCE:
        return drafts
    tails = [
        first_path(guarded(name, partial(source.continue_after, request, drafts.token_ids, room), NO_DRAFTS))
        for name, source in by_name.items()
        if wants_source(request.params, name)
    ]
    best = max(tails, key=lambda tail: sum(tail.survival), default=NO_DRAFTS)
    if not best.token_ids:
        return drafts
    drafts = allowed_part(request, _joined(drafts, best.first(room)))
    return _joined(drafts, forced.continue_after(request, drafts.token_ids, limit - len(drafts)))


def allowed_part(request: RequestView, drafts: Drafts) -> Drafts:
    """The nodes that the request's grammar allows; all of them without one."""
    matcher = matcher_of(request)
    if matcher is None or not drafts.token_ids:
        return drafts
    fits = matcher.may_follow(drafts.token_ids, drafts.parents)
    kept = [node for node, is_good in enumerate(fits) if is_good]
    return drafts.select(kept) if kept else NO_DRAFTS


def first_path(drafts: Drafts) -> Drafts:
    """The chain with which a tree begins."""
    num = 0
    while num < len(drafts) and drafts.parents[num] == num - 1:
        num += 1
    return drafts.first(num)


def _joined(chain: Drafts, tail: Drafts) -> Drafts:
    """Two chains as one."""
    if not tail.token_ids:
        return chain
    alive = chain.survival[-1]
    return Drafts.chain_of(
        chain.token_ids + tail.token_ids,
        chain.survival + tuple(alive * value for value in tail.survival),
        chain.source + tail.source,
    )
