"""The walk along the drafts, in integers. The law is kept here.

At every node the target has drawn its own token, as if no draft existed. The walk emits that token and
goes on while a child carries it, so what is emitted never depends on what was drafted: only how far one
forward pass gets does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.spec_decode.proposer import Drafts


class Walk(NamedTuple):
    """What one forward pass emitted for one request.

    `token_ids` is never empty and one longer than `path`, the accepted draft nodes from the root down:
    token j was drawn at row 0 for j = 0, else at row `path[j - 1] + 1`.
    """

    path: list[int]
    token_ids: list[int]


def verify(drafts: Drafts, sampled: Sequence[int]) -> Walk:
    """Walk from the last committed token down the tree.

    `sampled[0]` is what the target drew after the last committed token and `sampled[i + 1]` what it drew
    after draft node i. A row that could not be sampled holds -1, which no draft carries: it ends the walk
    and is the last of `token_ids`.
    """
    if len(sampled) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} sampled rows, got {len(sampled)}")
    token_ids, parents = drafts.token_ids, drafts.parents
    node, token = -1, sampled[0]
    path: list[int] = []
    emitted = [token]
    # Children come after their parent, so one pass over the nodes sees the whole path. Of two children
    # with the same token the first is taken.
    for i in range(len(token_ids)):
        if parents[i] == node and token_ids[i] == token:
            node, token = i, sampled[i + 1]
            path.append(node)
            emitted.append(token)
    return Walk(path, emitted)


def walk_by_policy(drafts: Drafts, sampled: Sequence[int], accept_policy: str) -> Walk:
    """`verify`, or one of the debugging policies, which give wrong output and are for timing only.

    `accept_all` takes the first child at every node, `reject_all` none.
    """
    if accept_policy == "normal":
        return verify(drafts, sampled)
    path: list[int] = []
    if accept_policy == "accept_all":
        node = -1
        for i, parent in enumerate(drafts.parents):
            if parent == node:
                path.append(node := i)
    last = sampled[path[-1] + 1 if path else 0]
    return Walk(path, [drafts.token_ids[i] for i in path] + [last])
