"""Native attention to the bit: what a row gets depends on its request's tokens and on nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import outrider._native as _native
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

NAN = {"f32": np.nan, "f16": 0x7E00, "bf16": 0x7FC0}
Ranges = list[tuple[int, int]]  # per request the positions [begin, end) that a step runs


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


@dataclass(frozen=True)
class Model:
    """One attention layer."""

    num_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    dtype: str = "f16"
    window: int = 0
    rope_layout: str | None = "half"
    rotary_dim: int = 32
    norm: bool = False


@dataclass(frozen=True)
class Tokens:
    """q, k and v of every position of one request, before norm and RoPE."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def random_tokens(model: Model, lengths: list[int], seed: int = 0) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    sizes = [heads * model.head_dim for heads in (model.num_heads, model.kv_heads, model.kv_heads)]
    return [
        Tokens(*(rng.standard_normal((length, size)).astype(np.float32) for size in sizes))
        for length in lengths
    ]


def head_weights(model: Model) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(99)
    return tuple(rng.uniform(0.5, 2, model.head_dim).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


def angles(model: Model, length: int) -> np.ndarray:
    inv_freq = 1e4 ** (-np.arange(0, model.rotary_dim, 2) / model.rotary_dim)
    return np.outer(np.arange(length), inv_freq)


class Paged:
    """Requests on a paged cache whose slots hold NaN until they are written, blocks in random order."""

    def __init__(self, model: Model, requests: list[Tokens], block_size: int = 32, layer: int = 0) -> None:
        self.model, self.requests, self.block_size, self.layer = model, requests, block_size, layer
        counts = [-(-len(request.q) // block_size) for request in requests]
        num_blocks = sum(counts) + 3
        self.cache = _native.KVCache(
            layer + 1, num_blocks, block_size, model.kv_heads, model.head_dim, model.dtype
        )
        for stored in (self.cache.keys(layer), self.cache.values(layer)):
            stored[...] = NAN[model.dtype]
        free = iter(np.random.default_rng(block_size).permutation(num_blocks))
        self.tables = np.full((len(requests), max([*counts, 1])), -1, np.int32)
        for table, count in zip(self.tables, counts, strict=True):
            table[:count] = [next(free) for _ in range(count)]
        self.options: dict[str, Any] = {
            "num_heads": model.num_heads, "scale": model.head_dim**-0.5, "window": model.window
        }  # fmt: skip
        if model.rope_layout:
            at = angles(model, max(len(request.q) for request in requests))
            self.options |= {"rope_layout": model.rope_layout}
            self.options |= {"rope_cos": np.cos(at).astype(np.float32)}
            self.options |= {"rope_sin": np.sin(at).astype(np.float32)}
        if model.norm:
            q_norm, k_norm = head_weights(model)
            self.options |= {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": 1e-5}

    def slots(self, request: int, begin: int, end: int) -> np.ndarray:
        positions = np.arange(begin, end)
        return (
            self.tables[request][positions // self.block_size] * self.block_size + positions % self.block_size
        )

    def step(self, ranges: dict[int, tuple[int, int]]) -> dict[int, np.ndarray]:
        """Run positions [begin, end) of some requests, side by side in the order given."""
        parts = [(self.requests[i], i, begin, end) for i, (begin, end) in ranges.items()]

        def ints(values: Any) -> np.ndarray:
            return np.ascontiguousarray(values, np.int32)

        out = _native.append_attention(
            *(np.concatenate([getattr(r, name)[a:b] for r, _, a, b in parts]) for name in "qkv"),
            self.cache,
            self.layer,
            ints(np.concatenate([np.arange(a, b) for _, _, a, b in parts])),
            ints(np.concatenate([self.slots(i, a, b) for _, i, a, b in parts])),
            ints(np.cumsum([0] + [b - a for _, _, a, b in parts])),
            ints([b for _, _, _, b in parts]),
            ints(self.tables[list(ranges)]),
            **self.options,
        )
        bounds = np.cumsum([b - a for _, _, a, b in parts])[:-1]
        return dict(zip(ranges, np.split(out, bounds), strict=True))

    def run(self, steps: list[dict[int, tuple[int, int]]]) -> list[np.ndarray]:
        """Outputs of all positions of every request."""
        outputs: list[list[np.ndarray]] = [[] for _ in self.requests]
        for step in steps:
            for request, out in self.step(step).items():
                outputs[request].append(out)
        return [np.concatenate(parts) for parts in outputs]


def at_once(requests: list[Tokens]) -> list[dict[int, tuple[int, int]]]:
    """Every request alone in one step of its own."""
    return [{i: (0, len(request.q))} for i, request in enumerate(requests)]


def assert_same_bits(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


models = st.builds(
    lambda shape, width, **rest: Model(*shape, head_dim=width, rotary_dim=width, **rest),
    st.sampled_from([(1, 1), (3, 1), (6, 2), (9, 3), (8, 1), (4, 4)]),
    st.sampled_from([32, 40, 64, 128]),
    dtype=st.sampled_from(["f16", "bf16", "f32"]),
    window=st.sampled_from([0, 0, 1, 50, 128, 200]),
    rope_layout=st.sampled_from(["half", "interleaved", None]),
    norm=st.booleans(),
)


@st.composite
def schedules(draw: st.DrawFn, lengths: list[int]) -> list[dict[int, tuple[int, int]]]:
    """Steps that bring every request from 0 to its length, in chunks of any size, in any company."""
    done = [0] * len(lengths)
    steps = []
    while waiting := [i for i, length in enumerate(lengths) if done[i] < length]:
        chosen = draw(st.permutations(waiting))[: draw(st.integers(1, len(waiting)))]
        step = {}
        for i in chosen:
            size = draw(st.sampled_from([1, 2, 7, 8, 16, 33, 100, 128, 1000]))
            step[i] = (done[i], min(done[i] + size, lengths[i]))
            done[i] = step[i][1]
        steps.append(step)
    return steps


@settings(max_examples=40)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_any_batch_chunk_block_size_and_team(data: st.DataObject) -> None:
    model = data.draw(models)
    lengths = data.draw(
        st.lists(st.sampled_from([1, 2, 15, 16, 17, 127, 128, 129, 200, 300]), min_size=1, max_size=3)
    )
    requests = random_tokens(model, lengths)
    _native.set_num_threads(1)
    want = Paged(model, requests, block_size=128).run(at_once(requests))
    _native.set_num_threads(data.draw(st.sampled_from([1, 2, 3])))
    paged = Paged(model, requests, data.draw(st.sampled_from([16, 32, 64, 128])))
    assert_same_bits(paged.run(data.draw(schedules(lengths))), want)
    assert all(np.isfinite(out).all() for out in want)


@pytest.mark.parametrize("window", [0, 300])
def test_a_long_context_cut_among_threads_gives_the_bits_of_one_thread(window: int) -> None:
    model = Model(num_heads=9, kv_heads=3, head_dim=64, rotary_dim=64, window=window)
    requests = random_tokens(model, [1500, 40, 900])
    _native.set_num_threads(1)
    want = Paged(model, requests, block_size=16).run(at_once(requests))
    for threads in (2, 4):
        _native.set_num_threads(threads)
        paged = Paged(model, requests)
        first = paged.run([{0: (0, 1490), 1: (0, 32), 2: (0, 899)}])
        alone = [
            paged.step({0: (i, i + 1)})[0] for i in range(1490, 1492)
        ]  # rows that have the team to themselves
        last = paged.run([{0: (1492, 1500), 2: (899, 900), 1: (32, 40)}])
        got = [np.concatenate(parts) for parts in zip(first, last, strict=True)]
        got[0] = np.concatenate([first[0], *alone, last[0]])
        assert_same_bits(got, want)


def reference(model: Model, tokens: Tokens) -> np.ndarray:
    """The same in float64, on keys and values rounded as the cache rounds them."""
    length = len(tokens.q)
    q, k, v = (
        x.astype(np.float64).reshape(length, -1, model.head_dim) for x in (tokens.q, tokens.k, tokens.v)
    )
    if model.norm:
        for x, weight in zip((q, k), head_weights(model), strict=True):
            x *= weight / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    if model.rope_layout:
        half = model.rotary_dim // 2
        cos, sin = (f(angles(model, length))[:, None] for f in (np.cos, np.sin))
        first, second = (
            (slice(0, half), slice(half, 2 * half))
            if model.rope_layout == "half"
            else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        )
        for x in (q, k):
            a, b = x[..., first].copy(), x[..., second].copy()
            x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
    if model.dtype == "f16":
        k, v = (x.astype(np.float32).astype(np.float16).astype(np.float64) for x in (k, v))
    if model.dtype == "bf16":
        k, v = (from_bfloat(to_bfloat(x.astype(np.float32))).astype(np.float64) for x in (k, v))
    group = model.num_heads // model.kv_heads
    scores = np.einsum("qhd,khd->hqk", q, k.repeat(group, 1)) * model.head_dim**-0.5
    distance = np.arange(length)[:, None] - np.arange(length)
    hidden = (distance < 0) | (distance >= (model.window or length))
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v.repeat(group, 1)).reshape(length, -1)


def to_bfloat(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def worst_error(model: Model) -> float:
    requests = random_tokens(model, [150, 9])
    got = Paged(model, requests).run([{1: (0, 9), 0: (0, 149)}, {0: (149, 150)}])
    want = [reference(model, tokens) for tokens in requests]
    return max(float(((a - b) ** 2).sum() / (b**2).sum()) for a, b in zip(got, want, strict=True))


@settings(max_examples=25)
@given(model=models)
def test_attention_agrees_with_float64(model: Model) -> None:
    # Keys near the middle between two 16-bit numbers may round the other way in float64: hence not 1e-13.
    assert worst_error(model) <= 1e-7


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_every_instruction_set_agrees_with_float64(isa: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_attention import Model, worst_error, _native\n"
        f"assert _native.isa() == {isa!r}\n"
        "for dtype in ('f16', 'bf16', 'f32'):\n"
        "    assert worst_error(Model(dtype=dtype, norm=True)) <= 1e-7\n"
        "    assert worst_error(Model(dtype=dtype, window=40, rope_layout='interleaved')) <= 1e-7\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OUTRIDER_ISA": isa}, check=True)


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_keys_and_values_are_stored_rounded_to_nearest_even_and_nothing_else_is_touched(
    dtype: str, block_size: int
) -> None:
    model = Model(dtype=dtype, rope_layout=None)
    rng = np.random.default_rng(1)
    (tokens,) = random_tokens(model, [200])
    special = np.array([0.0, -0.0, 65504, 65520, 1e9, -1e9, 2**-24, 2**-25, 3 * 2**-25, 2**-14, 1e-6, np.inf])
    ties = (rng.integers(1024, 2048, 400) + 0.5) * 2.0 ** rng.integers(-20, 5, 400)
    tokens.k.reshape(-1)[:412] = np.concatenate([special, ties])
    tokens.v.reshape(-1)[:412] = np.concatenate([special, ties])
    paged = Paged(model, [tokens], block_size, layer=1)
    paged.step({0: (0, 200)})
    slots = paged.slots(0, 0, 200)
    keys = paged.cache.keys(1).transpose(0, 3, 1, 2).reshape(-1, model.kv_heads * model.head_dim)
    values = paged.cache.values(1).transpose(0, 2, 1, 3).reshape(-1, model.kv_heads * model.head_dim)
    with np.errstate(over="ignore"):
        convert = {
            "f32": lambda x: x.view(np.uint32),
            "f16": lambda x: x.astype(np.float16).view(np.uint16),
            "bf16": to_bfloat,
        }[dtype]
        for stored, given_ in ((keys, tokens.k), (values, tokens.v)):
            bits = stored.view(np.uint32) if dtype == "f32" else stored
            np.testing.assert_array_equal(bits[slots], convert(given_))
            others = np.delete(stored, slots, 0)
            assert np.isnan(others).all() if dtype == "f32" else (others == NAN[dtype]).all()


def test_a_later_row_never_reaches_an_earlier_one_even_as_nan() -> None:
    model = Model()
    (tokens,) = random_tokens(model, [140])
    (want,) = Paged(model, [tokens]).run([{0: (0, 140)}])
    for poisoned in (3, 70, 139):
        bad = replace(tokens, k=tokens.k.copy(), v=tokens.v.copy())
        bad.k[poisoned:], bad.v[poisoned:] = np.nan, np.nan
        (got,) = Paged(model, [bad]).run([{0: (0, 140)}])
        assert_same_bits([got[:poisoned]], [want[:poisoned]])


def test_rejected_drafts_are_overwritten_without_a_trace() -> None:
    model = Model()
    (tokens,) = random_tokens(model, [150])
    (want,) = Paged(model, [tokens]).run([{0: (0, 150)}])
    (other,) = random_tokens(model, [150], seed=7)
    mixed = [tokens]
    paged = Paged(model, mixed)
    got = [paged.step({0: (0, 125)})[0]]
    for begin in range(125, 150, 5):
        mixed[0] = Tokens(
            *(np.concatenate([getattr(tokens, x)[:begin], getattr(other, x)[begin:]]) for x in "qkv")
        )
        paged.step({0: (begin, min(begin + 8, 150))})  # a window of wrong drafts
        mixed[0] = tokens
        got.append(paged.step({0: (begin, begin + 5)})[0])
    assert_same_bits([np.concatenate(got)], [want])


def test_rows_may_be_views_of_one_fused_buffer() -> None:
    model = Model()
    (tokens,) = random_tokens(model, [20])
    (want,) = Paged(model, [tokens]).run([{0: (0, 20)}])
    fused = np.concatenate([tokens.q, tokens.k, tokens.v], 1)
    paged = Paged(model, [tokens])
    views = np.split(fused, [tokens.q.shape[1], tokens.q.shape[1] + tokens.k.shape[1]], axis=1)
    paged = Paged(model, [tokens])
    positions = np.arange(20, dtype=np.int32)
    slots, bounds = paged.slots(0, 0, 20).astype(np.int32), np.array([0, 20], np.int32)
    out = _native.append_attention(
        *views, paged.cache, 0, positions, slots, bounds, bounds[1:], paged.tables, **paged.options
    )
    assert_same_bits([out], [want])


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="block_size must be 16, 32, 64 or 128, got 24"):
        _native.KVCache(1, 4, 24, 1, 32, "f16")
    with pytest.raises(ValueError, match="head_dim that is a multiple of 8 up to 512, got 36"):
        _native.KVCache(1, 4, 32, 1, 36, "f16")
    with pytest.raises(ValueError, match="must be f16, bf16 or f32, got 'int3'"):
        _native.KVCache(1, 4, 32, 1, 32, "int3")
    model = Model(num_heads=5, kv_heads=2)
    with pytest.raises(ValueError, match="multiple of the 2 kv heads, got 5"):
        Paged(model, random_tokens(model, [3])).step({0: (0, 3)})


def test_untouched_blocks_take_no_memory() -> None:
    cache = _native.KVCache(30, 1 << 20, 32, 3, 64, "f16")  # 720 GiB of addresses
    assert cache.nbytes == 2 * 30 * (1 << 20) * 32 * 3 * 64 * 2
    cache.keys(29)[-1] = 1
