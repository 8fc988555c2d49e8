"""Draft trees in attention: a node's row has the bits of plain decoding along the node's path."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import outrider._native as _native
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import Model, Paged, Tokens, at_once, models, random_tokens
from test_ops import BACKENDS, NUM_BLOCKS, Case, error, make_step

from outrider.engine.batch import build_batch
from outrider.engine.scheduler import Plan, PlanRow
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


@dataclass(frozen=True)
class Tree:
    """A request's step: `num_cached` tokens are in the cache already, `num_final` final ones are run, then
    a node for each of `parents` (-1: it continues the final tokens)."""

    num_cached: int
    num_final: int
    parents: tuple[int, ...] = ()

    @property
    def context(self) -> int:
        return self.num_cached + self.num_final

    @property
    def length(self) -> int:
        return self.context + len(self.parents)

    def path(self, node: int) -> list[int]:
        path = [node]
        while (parent := self.parents[path[0]]) >= 0:
            path.insert(0, parent)
        return path

    def paths(self) -> list[list[int]]:
        """To every node, and to none."""
        return [[], *(self.path(node) for node in range(len(self.parents)))]

    def positions(self) -> list[int]:
        depths = [len(path) - 1 for path in self.paths()[1:]]
        return [*range(self.num_cached, self.context), *(self.context + depth for depth in depths)]

    def rows(self) -> list[int]:
        """Each row's parent, as a row of this request."""
        return [*range(-1, self.num_final - 1), *(self.num_final + parent for parent in self.parents)]


def part(tokens: Tokens, tree: Tree, path: list[int]) -> Tokens:
    """The tokens of plain decoding along a path."""
    at = [*range(tree.context), *(tree.context + node for node in path)]
    return Tokens(tokens.q[at], tokens.k[at], tokens.v[at])


def run_trees(paged: Paged, trees: list[Tree]) -> list[np.ndarray]:
    """One step of all requests; the outputs of each."""
    starts = np.cumsum([0] + [len(tree.rows()) for tree in trees])
    parents = [
        parent + start if parent >= 0 else -1
        for tree, start in zip(trees, starts, strict=False)
        for parent in tree.rows()
    ]
    spans = [(tree.num_cached, tree.length) for tree in trees]

    def ints(values: Any) -> np.ndarray:
        return np.ascontiguousarray(values, np.int32)

    out = _native.append_attention(
        *(
            np.concatenate([getattr(r, name)[a:b] for r, (a, b) in zip(paged.requests, spans, strict=True)])
            for name in "qkv"
        ),
        paged.cache,
        paged.layer,
        ints(np.concatenate([tree.positions() for tree in trees])),
        ints(np.concatenate([paged.slots(i, a, b) for i, (a, b) in enumerate(spans)])),
        ints(starts),
        ints([tree.length for tree in trees]),
        ints(paged.tables),
        **paged.options,
        parents=ints(parents),
    )
    return np.split(out, starts[1:-1])


def assert_rows_are_plain(
    model: Model, requests: list[Tokens], trees: list[Tree], got: list[np.ndarray]
) -> None:
    for tokens, tree, rows in zip(requests, trees, got, strict=True):
        for i, path in enumerate(tree.paths()):
            plain = part(tokens, tree, path)
            (want,) = Paged(model, [plain], 128).run([{0: (0, len(plain.q))}])
            first = tree.num_final + i - 1
            np.testing.assert_array_equal(rows[first].view(np.uint32), want[-1].view(np.uint32))
            if not path:
                want_final = want[tree.num_cached :].view(np.uint32)
                np.testing.assert_array_equal(rows[: tree.num_final].view(np.uint32), want_final)


def cache_contexts(paged: Paged, trees: list[Tree]) -> None:
    for i, tree in enumerate(trees):
        if tree.num_cached:
            paged.step({i: (0, tree.num_cached)})


@st.composite
def random_parents(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 24, 40]))
    kind = draw(st.sampled_from(["any", "deep", "wide", "chains", "chain"]))
    reach = {"any": size, "deep": 2, "wide": size, "chains": 1, "chain": 1}[kind]
    parents: list[int] = []
    for i in range(size):
        if kind == "wide":
            parents.append(draw(st.integers(-1, min(1, i - 1))))
        elif kind == "chains" and draw(st.integers(0, 3)) == 0:
            parents.append(draw(st.integers(-1, i - 1)))
        else:
            parents.append(draw(st.integers(max(-1, i - reach), i - 1)))
    return tuple(parents)


@st.composite
def random_trees(draw: st.DrawFn) -> Tree:
    cached = draw(
        st.sampled_from([0, 1, 14, 15, 16, 31, 100, 120, 125, 126, 127, 128, 129, 200, 250, 255, 256])
    )
    final = draw(st.sampled_from([1, 1, 1, 2, 7]))
    if draw(st.integers(0, 4)) == 0:
        return Tree(cached, draw(st.sampled_from([1, 8, 60])))  # no drafts: plain, or a prompt
    return Tree(cached, final, draw(random_parents()))


@settings(max_examples=60)
@given(data=st.data())
def test_every_row_of_a_tree_has_the_bits_of_plain_decoding(data: st.DataObject) -> None:
    model = data.draw(models)
    trees = data.draw(st.lists(random_trees(), min_size=1, max_size=3))
    requests = random_tokens(model, [tree.length for tree in trees])
    _native.set_num_threads(data.draw(st.sampled_from([1, 2, 3])))
    paged = Paged(model, requests, data.draw(st.sampled_from([16, 32, 64, 128])))
    cache_contexts(paged, trees)
    assert_rows_are_plain(model, requests, trees, run_trees(paged, trees))


@settings(max_examples=40)
@given(data=st.data())
def test_after_the_accepted_path_has_moved_the_cache_is_that_of_plain_decoding(data: st.DataObject) -> None:
    model = data.draw(models)
    tree = data.draw(random_trees().filter(lambda tree: tree.parents))
    (tokens,) = random_tokens(model, [tree.length])
    path = data.draw(st.sampled_from(tree.paths()))
    paged = Paged(model, [tokens], data.draw(st.sampled_from([16, 32, 64, 128])))
    cache_contexts(paged, [tree])
    run_trees(paged, [tree])
    slots = paged.slots(0, 0, tree.length).astype(np.int32)
    moves = [(tree.context + node, tree.context + i) for i, node in enumerate(path)]
    source, target = (
        (np.ascontiguousarray(slots[list(x)]) for x in zip(*moves, strict=True)) if moves else 2 * [slots[:0]]
    )
    paged.cache.move_slots(source, target)

    accepted = part(tokens, tree, path)
    (more,) = random_tokens(model, [9], seed=5)
    whole = Tokens(*(np.concatenate([getattr(accepted, x), getattr(more, x)]) for x in "qkv"))
    want = Paged(model, [whole], 128).run(at_once([whole]))[0]
    begin, end = len(accepted.q), min(len(whole.q), tree.length)
    paged.requests = [whole]
    if begin < end:  # blocks are there for the tree's slots
        got = paged.step({0: (begin, end)})[0]
        np.testing.assert_array_equal(got.view(np.uint32), want[begin:end].view(np.uint32))


def test_moving_slots_changes_their_target_in_every_layer_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    for dtype in ("f16", "bf16", "f32"):
        cache = _native.KVCache(3, 6, 16, 2, 8, dtype)
        before = []
        for layer in range(3):
            for stored in (cache.keys(layer), cache.values(layer)):
                stored[...] = rng.integers(0, 1 << 15, stored.shape).astype(stored.dtype)
                before.append(stored.copy())
        source, target = np.array([20, 50, 95], np.int32), np.array([7, 20, 95], np.int32)
        cache.move_slots(source, target)
        for layer in range(3):
            keys, values = before[2 * layer], before[2 * layer + 1]
            for a, b in zip(source, target, strict=True):  # one after the other
                keys[b // 16, :, :, b % 16] = keys[a // 16, :, :, a % 16]
                values[b // 16, :, b % 16] = values[a // 16, :, a % 16]
            np.testing.assert_array_equal(cache.keys(layer), keys)
            np.testing.assert_array_equal(cache.values(layer), values)


def test_moves_out_of_range_are_refused_and_change_nothing() -> None:
    cache = _native.KVCache(1, 2, 16, 1, 8, "f32")
    cache.keys(0)[...] = np.arange(256).reshape(2, 1, 8, 16)
    before = cache.keys(0).copy()
    for source, target in (([3, 32], [1, 2]), ([3, 4], [1, -1])):
        with pytest.raises(ValueError, match=r"slot (32|-1) is not in the cache"):
            cache.move_slots(np.array(source, np.int32), np.array(target, np.int32))
        np.testing.assert_array_equal(cache.keys(0), before)
    with pytest.raises(ValueError, match="one entry a move"):
        cache.move_slots(np.array([1, 2], np.int32), np.array([1], np.int32))


def test_siblings_do_not_see_each_other_even_as_nan() -> None:
    model = Model()
    tree = Tree(120, 1, (-1, 0, 1, -1, 3, 0, 5, 6))
    (tokens,) = random_tokens(model, [tree.length])
    want = run_one(model, tokens, tree)
    for poisoned in range(len(tree.parents)):
        k, v = tokens.k.copy(), tokens.v.copy()
        k[tree.context + poisoned] = v[tree.context + poisoned] = np.nan
        got = run_one(model, Tokens(tokens.q, k, v), tree)
        for node in range(len(tree.parents)):
            if poisoned not in tree.path(node):
                np.testing.assert_array_equal(got[1 + node], want[1 + node])
            else:
                assert np.isnan(got[1 + node]).all()


def run_one(model: Model, tokens: Tokens, tree: Tree) -> np.ndarray:
    paged = Paged(model, [tokens])
    cache_contexts(paged, [tree])
    return run_trees(paged, [tree])[0]


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_every_instruction_set_gives_tree_rows_the_bits_of_plain_decoding(isa: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_draft_trees import *\nfrom test_draft_trees import _native\n"
        f"assert _native.isa() == {isa!r}\n"
        "for dtype in ('f16', 'bf16', 'f32'):\n"
        "  for context in (3, 126, 250):\n"
        "    model, tree = Model(dtype=dtype), Tree(context, 1, (-1, 0, 1, 0, 3, 4, -1, 6, 7))\n"
        "    (tokens,) = random_tokens(model, [tree.length])\n"
        "    assert_rows_are_plain(model, [tokens], [tree], [run_one(model, tokens, tree)])\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OUTRIDER_ISA": isa}, check=True)


@pytest.mark.parametrize("parents", [[-1, 1, 0], [-1, 0, 0], [-1, -2, 1], [0, 0, 1]])
def test_parents_that_are_no_tree_are_refused(parents: list[int]) -> None:
    model = Model()
    (tokens,) = random_tokens(model, [3])
    paged = Paged(model, [tokens])
    ints = [np.array(x, np.int32) for x in ([0, 1, 2], paged.slots(0, 0, 3), [0, 3], [3])]
    with pytest.raises(ValueError, match=r"parents\[\d\] is -?\d, must be -1 or an earlier row"):
        _native.append_attention(
            tokens.q, tokens.k, tokens.v, paged.cache, 0, *ints, paged.tables, **paged.options,
            parents=np.array(parents, np.int32),
        )  # fmt: skip


@st.composite
def tree_attention(draw: st.DrawFn) -> Case:
    """Attention of a step in which one request verifies a tree and another one goes on in order."""
    block_size = draw(st.sampled_from([16, 32, 64, 128]))
    tree = draw(random_trees().filter(lambda tree: tree.length <= 280))
    tables = np.random.default_rng(draw(st.integers(0, 99))).permutation(NUM_BLOCKS)[:36].reshape(2, 18)
    spans = [(tree.num_cached, tree.length), (20, 23)]
    steps = [
        make_step([(0, tree.num_cached), (0, 20)], tables, block_size),
        make_step(spans, tables, block_size),
    ]
    last = steps[-1]
    rows = len(tree.rows())
    last.positions[:rows] = tree.positions()
    last.parents = np.array([*tree.rows(), -1, rows, rows + 1], np.int32)
    kv_heads, group, head_dim = draw(st.sampled_from([(1, 4, 32), (2, 3, 64), (3, 1, 72)]))
    heads, window = kv_heads * group, draw(st.sampled_from([None, 3, 128]))

    def build(ops: Any, _: Any, w: Any) -> Any:
        parts = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q, k, v = ops.split(ops.embedding(w["x"]), parts)
        return ops.append_attention(
            q, k, v, layer=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            scale=head_dim**-0.5, window=window,
        )  # fmt: skip

    size = max(len(step.token_ids) for step in steps)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    weights = {"x": rng.standard_normal((size, (heads + 2 * kv_heads) * head_dim))}
    return Case(build, weights, steps, block_size, draw(st.sampled_from(["f16", "bf16", "f32"])))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15)
@given(case=tree_attention())
def test_trees_agree_with_float64_on_every_backend(backend: str, case: Case) -> None:
    for got, want in zip(case.outputs(BACKENDS[backend]()), case.exact(), strict=True):
        assert error(got, want) <= 1e-7


@settings(max_examples=50)
@given(parents=random_parents(), num_final=st.integers(1, 3), seed=st.integers(0, 9))
def test_a_batch_gives_every_node_its_slot_its_depth_and_its_path(
    parents: tuple[int, ...], num_final: int, seed: int
) -> None:
    size, block_size, start = len(parents), 16, 13
    tree = Tree(start, num_final, parents)
    drafts = Drafts(tuple(range(100, 100 + size)), parents, (0.5,) * size, ("test",) * size)
    rng = np.random.default_rng(seed)
    plan_rows = []
    for i, own in enumerate((NO_DRAFTS, drafts, NO_DRAFTS)):
        request = SimpleNamespace(
            token_ids=list(range(tree.context)),
            block_table=array("i", rng.permutation(40)[: -(-tree.length // block_size)].tolist()),
            sampling_state=i,
            prompt_scores=None,
            stream=SimpleNamespace(grammar=None),
        )
        plan_rows.append(PlanRow(request, start, num_final + len(own), own, True))  # type: ignore[arg-type]
    batch = build_batch(Plan(tuple(plan_rows)), block_size)
    begin, end = batch.query_start_loc[1:3]
    assert batch.positions[begin:end].tolist() == tree.positions()
    table = np.array(plan_rows[1].request.block_table)
    at = np.arange(start, tree.length)
    assert (batch.slot_mapping[begin:end] == table[at // block_size] * block_size + at % block_size).all()
    assert batch.seq_lens.tolist() == [tree.context, tree.length, tree.context]
    if drafts.is_chain:
        assert len(batch.parents) == 0
    else:
        want = [p + begin if p >= 0 else -1 for p in tree.rows()]
        assert batch.parents[begin:end].tolist() == want
        assert batch.parents[:begin].tolist() == list(range(-1, num_final - 1))
        assert batch.parents[end] == -1
    sampling = batch.sampling
    prefixes = [
        sampling.prefix_ids[a:b].tolist() for a, b in itertools.pairwise(sampling.prefix_start.tolist())
    ]
    assert prefixes == [[], *([100 + node for node in path] for path in tree.paths()), []]
    assert sampling.positions.tolist() == [tree.context + len(prefix) for prefix in prefixes]


@settings(max_examples=50)
@given(parents=random_parents(), keep=st.integers(0, 12))
def test_a_tree_that_is_cut_to_a_budget_keeps_the_parents_of_what_is_left(
    parents: tuple[int, ...], keep: int
) -> None:
    size = len(parents)
    drafts = Drafts((1,) * size, parents, (0.5,) * size, ("test",) * size).first(keep)
    drafts.check(vocab_size=2)
    assert drafts.parents == parents[:keep]
