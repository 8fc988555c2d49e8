"""The walk along the drafts, against plain decoding and a walk written as recursion."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.verifier import verify, walk_by_policy
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts

EXAMPLES = settings(max_examples=100, deadline=None)


@st.composite
def trees(draw: st.DrawFn, vocab: int = 3, max_size: int = 12) -> Drafts:
    """Any tree; few tokens, so that children of one node often carry the same."""
    size = draw(st.integers(0, max_size))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    survival: list[float] = []
    for parent in parents:
        alive = survival[parent] if parent >= 0 else 1.0
        survival.append(alive * draw(st.sampled_from([1.0, 0.9, 0.5])))
    tokens = [draw(st.integers(0, vocab - 1)) for _ in range(size)]
    return Drafts(tuple(tokens), tuple(parents), tuple(survival), ("test",) * size)


def recursive_walk(drafts: Drafts, sampled: list[int], node: int = -1) -> tuple[list[int], list[int]]:
    token = sampled[node + 1]
    for child in range(len(drafts)):
        if drafts.parents[child] == node and drafts.token_ids[child] == token:
            path, tokens = recursive_walk(drafts, sampled, child)
            return [child, *path], [token, *tokens]
    return [], [token]


@given(trees(), st.data())
@EXAMPLES
def test_the_walk_descends_into_the_child_that_carries_the_drawn_token(
    drafts: Drafts, data: st.DataObject
) -> None:
    row = st.integers(-1, 2)
    sampled = data.draw(st.lists(row, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    walk = verify(drafts, sampled)
    assert (walk.path, walk.token_ids) == recursive_walk(drafts, sampled)
    assert len(walk.token_ids) == len(walk.path) + 1
    assert walk.path == [] or walk.path == [*drafts.ancestors(walk.path[-1]), walk.path[-1]]


@given(trees(max_size=20), st.integers(0, 2**32))
@EXAMPLES
def test_what_is_emitted_is_plain_decoding_however_wrong_the_drafts(drafts: Drafts, seed: int) -> None:
    def model(prefix: list[int]) -> int:
        return hash((seed, *prefix)) % 3

    prefixes = [[drafts.token_ids[i] for i in (*drafts.ancestors(node), node)] for node in range(len(drafts))]
    walk = verify(drafts, [model([]), *(model(prefix) for prefix in prefixes)])
    plain: list[int] = []
    while len(plain) < len(walk.token_ids):
        plain.append(model(plain))
    assert walk.token_ids == plain


def test_without_drafts_one_token_is_emitted() -> None:
    assert verify(NO_DRAFTS, [7]) == ([], [7])


def test_a_row_that_could_not_be_sampled_ends_the_walk() -> None:
    drafts = Drafts.chain([1, 2, 3], [0.5, 0.5, 0.5], "test")
    assert verify(drafts, [1, -1, 3, 4]) == ([0], [1, -1])
    assert verify(drafts, [-1, 2, 3, 4]) == ([], [-1])


def test_a_window_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 sampled rows"):
        verify(Drafts.chain([1], [0.5], "test"), [1])


def test_debug_policies_take_everything_or_nothing() -> None:
    drafts = Drafts((5, 6, 7, 8), (-1, -1, 0, 2), (0.9, 0.8, 0.7, 0.6), ("test",) * 4)
    sampled = [1, 2, 3, 4, 9]
    assert walk_by_policy(drafts, sampled, "accept_all") == ([0, 2, 3], [5, 7, 8, 9])
    assert walk_by_policy(drafts, sampled, "reject_all") == ([], [1])
    assert walk_by_policy(drafts, sampled, "normal") == verify(drafts, sampled)


@given(trees(max_size=8), st.data())
@EXAMPLES
def test_a_selected_tree_keeps_its_paths(drafts: Drafts, data: st.DataObject) -> None:
    wanted = data.draw(st.sets(st.integers(0, max(len(drafts) - 1, 0)))) if len(drafts) else set()
    nodes = sorted({ancestor for node in wanted for ancestor in (*drafts.ancestors(node), node)})
    selected = drafts.select(nodes)
    selected.check(vocab_size=3)
    for new, old in enumerate(nodes):
        assert selected.token_ids[new] == drafts.token_ids[old]
        assert [nodes[node] for node in selected.ancestors(new)] == drafts.ancestors(old)
        assert selected.depths()[new] == drafts.depths()[old] == len(drafts.ancestors(old))


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        (Drafts((1, 2), (-1,), (1.0, 1.0), ("a", "a")), "one parent"),
        (Drafts((9,), (-1,), (1.0,), ("a",)), "draft token"),
        (Drafts((-1,), (-1,), (1.0,), ("a",)), "draft token"),
        (Drafts((1,), (0,), (1.0,), ("a",)), "parent of node 0"),
        (Drafts((1, 1), (-1, 0), (0.5, 0.6), ("a", "a")), "survival of node 1"),
        (Drafts((1,), (-1,), (0.0,), ("a",)), "survival of node 0"),
    ],
)
def test_malformed_drafts_are_refused(drafts: Drafts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafts.check(vocab_size=9)
