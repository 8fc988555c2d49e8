"""Several drafts for one request become one tree."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.spec_decode.predicted import SOURCE as PREDICTED
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts


def expected_tokens(drafts: Drafts) -> float:
    """How many drafted tokens are expected to be accepted, by the source's own estimate."""
    return sum(drafts.survival)


def merge(proposals: Sequence[Drafts], limit: int) -> Drafts:
    """One tree of at most `limit` nodes; shared prefixes are shared nodes, credited to the first proposal, or
    to the client's prediction: it is told what became of that.

    The first proposal's nodes come first, so its chain stays in place. A node beside others under the same
    parent can only be right where they are wrong, so its chance is scaled by what they leave. When the
    limit is passed, the least likely nodes go.
    """
    proposals = [drafts for drafts in proposals if drafts.token_ids]
    if len(proposals) == 1 and len(proposals[0]) <= limit:
        return proposals[0]
    if not proposals or limit <= 0:
        return NO_DRAFTS
    tokens, parents = list(proposals[0].token_ids), list(proposals[0].parents)
    survival, source = list(proposals[0].survival), list(proposals[0].source)
    nodes: dict[tuple[int, int], int] = {}
    taken: dict[int, float] = {}  # parent -> its children's chances together
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        nodes[parent, token] = node
        taken[parent] = taken.get(parent, 0.0) + survival[node] / _alive(survival, parent)
    for drafts in proposals[1:]:
        places: list[int] = []
        for i, (token, own_parent) in enumerate(zip(drafts.token_ids, drafts.parents, strict=True)):
            chance = drafts.survival[i] / _alive(drafts.survival, own_parent)
            parent = places[own_parent] if own_parent >= 0 else -1
            known = nodes.get((parent, token))
            if known is None:
                known = nodes[parent, token] = len(tokens)
                chance *= max(0.02, 1.0 - taken.get(parent, 0.0))
                taken[parent] = taken.get(parent, 0.0) + chance
                tokens.append(token)
                parents.append(parent)
                survival.append(chance * _alive(survival, parent))
                source.append(drafts.source[i])
            elif drafts.source[i] == PREDICTED:
                source[known] = PREDICTED
            places.append(known)
    merged = Drafts(tuple(tokens), tuple(parents), tuple(survival), tuple(source))
    if len(tokens) <= limit:
        return merged
    # A parent survives no worse than its children and comes before them, so this takes whole paths.
    best = sorted(range(len(tokens)), key=lambda node: (-survival[node], node))[:limit]
    return merged.select(sorted(best))


def _alive(survival: Sequence[float], node: int) -> float:
    return survival[node] if node >= 0 else 1.0
