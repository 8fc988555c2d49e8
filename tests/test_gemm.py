"""The linear op: what it computes, and that a row's bits depend on that row alone."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from outrider._native import PackedWeight

from outrider import _native

FORMATS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16", "bf16", "f32"]
KINDS = {"q4_0": "int4", "q4_1": "int4", "q5_0": "int8", "q5_1": "int8", "q8_0": "int8"}
BLOCK_LAYOUT = {  # bytes after the fp16 scale: minimum, high bits, values
    "q4_0": (0, 0, 16),
    "q4_1": (2, 0, 16),
    "q5_0": (0, 4, 16),
    "q5_1": (2, 4, 16),
    "q8_0": (0, 0, 32),
}
# n and k on and off the tile (16), the block (32) and the many-rows chunk (24 blocks)
SHAPES = [(1, 32), (16, 64), (40, 96), (33, 1568)]
Q8_LEVELS, MULTIPLIER_MAX = np.float32(127), np.float32(32767)
PAIR_LEVELS, PAIR_MULTIPLIER_MAX = np.float32(64), np.float32(509)


def make_rng(*key: object) -> np.random.Generator:
    return np.random.default_rng(list(str(key).encode()))


def checkpoint(fmt: str, n: int, k: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random weights in a checkpoint format: their bytes, and their values decoded here in numpy."""
    if fmt == "bf16":
        bits = (rng.standard_normal((n, k)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint8), (bits.astype(np.uint32) << 16).view(np.float32)
    if fmt in ("f16", "f32"):
        values = rng.standard_normal((n, k)).astype(np.float16 if fmt == "f16" else np.float32)
        return values.view(np.uint8), values.astype(np.float32)
    blocks = k // 32
    scale = (rng.uniform(0.5, 1.5, (n, blocks)) * 0.02 * rng.choice([-1, 1], (n, blocks))).astype(np.float16)
    minimum = rng.uniform(-0.3, 0.1, (n, blocks)).astype(np.float16)
    min_bytes, high_bytes, value_bytes = BLOCK_LAYOUT[fmt]
    high = rng.integers(0, 256, (n, blocks, high_bytes), dtype=np.uint8)
    values = rng.integers(0, 256, (n, blocks, value_bytes), dtype=np.uint8)
    parts = [scale[..., None].view(np.uint8)]
    if min_bytes:
        parts.append(minimum[..., None].view(np.uint8))
    data = np.concatenate([*parts, high, values], axis=2)
    if fmt == "q8_0":
        q = values.view(np.int8).astype(np.int32)
    else:
        q = np.concatenate([values & 15, values >> 4], axis=2).astype(np.int32)
        if high_bytes:
            q |= np.unpackbits(high, axis=2, bitorder="little").astype(np.int32) << 4
        q -= {"q4_0": 8, "q4_1": 0, "q5_0": 16, "q5_1": 0}[fmt]
    decoded = scale[..., None].astype(np.float32) * q.astype(np.float32)
    if min_bytes:
        decoded = decoded + minimum[..., None].astype(np.float32)
    return data.reshape(n, -1), decoded.reshape(n, k)


def packed(fmt: str, n: int, k: int, rng: np.random.Generator) -> tuple[PackedWeight, np.ndarray]:
    data, values = checkpoint(fmt, n, k, rng)
    return PackedWeight.pack(fmt, np.ascontiguousarray(data).reshape(-1), n, k), values


def activations(rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Rows with outliers, of different magnitudes; one of zeros when there are enough."""
    x = rng.standard_normal((rows, k)) * 10.0 ** rng.integers(-2, 3, (rows, 1))
    x[rng.random((rows, k)) < 0.02] *= 40
    if rows > 3:
        x[2] = 0
    return x.astype(np.float32)


def quantised(x: np.ndarray, kind: str) -> np.ndarray:
    """The values that the kernels put in place of x, in float64: integers times one unit a row."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // 32) * 32), np.float32)
    padded[:, :k] = x
    top = np.abs(padded).max(axis=1, keepdims=True)
    safe = np.where(top > 0, top, np.float32(1))
    if kind == "int8":
        most = PAIR_LEVELS * PAIR_MULTIPLIER_MAX
        pairs = (padded * (most / safe)).reshape(rows, -1, 2)
        multiplier = np.ceil(np.abs(pairs).max(axis=2, keepdims=True) / PAIR_LEVELS)
        multiplier = np.clip(multiplier, 1, PAIR_MULTIPLIER_MAX)
        integers = np.rint(pairs / multiplier).astype(np.float64) * multiplier
        return (integers.reshape(rows, -1) * (safe / most))[:, :k]
    groups = padded.reshape(rows, -1, 32)
    group_top = np.abs(groups).max(axis=2)
    unit = safe / (Q8_LEVELS * MULTIPLIER_MAX)
    multiplier = np.clip(np.ceil(group_top * (MULTIPLIER_MAX / safe)), 1, MULTIPLIER_MAX).astype(np.float32)
    q = np.clip(np.rint(groups * (np.float32(1) / (unit * multiplier))[..., None]), -127, 127)
    values = q.astype(np.float64) * multiplier[..., None] * unit[..., None]
    return values.reshape(rows, -1)[:, :k]


def product_bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """fp32 rounding of a sum of products: a few units of the last place of the sum of magnitudes."""
    return 4e-7 * np.sqrt(x.shape[1]) * (np.abs(x) @ np.abs(w).T) + 1e-30


@pytest.fixture
def num_threads():
    """Sets the pool's threads for a test; back to what it was after it."""
    before = _native.num_threads()
    yield _native.set_num_threads
    _native.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_pack_is_exact(fmt, shape):
    weight, values = packed(fmt, *shape, make_rng(fmt, shape))
    assert (weight.n, weight.k, weight.kind) == (*shape, KINDS.get(fmt, fmt))
    np.testing.assert_array_equal(weight.dequantize(), values)


@pytest.mark.parametrize("k", [1, 31, 33, 100])
@pytest.mark.parametrize("fmt", ["f16", "bf16", "f32"])
def test_float_weights_of_any_width(fmt, k):
    rng = make_rng(fmt, k)
    weight, values = packed(fmt, 5, k, rng)
    x = activations(6, k, rng)
    np.testing.assert_array_equal(weight.dequantize(), values)
    assert (
        np.abs(_native.linear(x, weight) - x.astype(np.float64) @ values.T) <= product_bound(x, values)
    ).all()


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_linear_equals_float64(fmt, shape, rows):
    rng = make_rng(fmt, shape, rows)
    weight, values = packed(fmt, *shape, rng)
    x, w = activations(rows, shape[1], rng), values.astype(np.float64)
    y = _native.linear(x, weight)
    exact = x.astype(np.float64)
    if fmt in KINDS:
        exact = quantised(x, KINDS[fmt])
        # what replaced x: within half a step of the largest value of its two or 32
        group, levels = (2, 64) if KINDS[fmt] == "int8" else (32, 127)
        tops = np.abs(x).reshape(rows, -1, group).max(axis=2).repeat(group, axis=1)
        smallest = np.abs(x).max(axis=1, keepdims=True) / 32000
        assert (np.abs(exact - x) <= 0.501 / levels * tops + smallest).all()
    assert (np.abs(y - exact @ w.T) <= product_bound(x, w)).all()
    if rows > 3:
        assert not y[2].any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_alone_has_the_bits_it_has_in_any_batch(fmt, num_threads):
    rng = make_rng(fmt)
    n, k = 200, 1568
    weight, _ = packed(fmt, n, k, rng)
    x = activations(70, k, rng)
    norm = rng.uniform(0.5, 2, k).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)

    def run(rows: slice) -> np.ndarray:
        return _native.linear(x[rows], weight, bias, norm, 1e-5)

    num_threads(1)
    alone = np.concatenate([run(slice(r, r + 1)) for r in range(len(x))])
    for threads in (1, 2, 3):
        num_threads(threads)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 64, 70):
            np.testing.assert_array_equal(run(slice(0, rows)), alone[:rows])
        np.testing.assert_array_equal(run(slice(1, 12)), alone[1:12])


def test_many_rows_in_several_row_blocks(num_threads):
    rng = make_rng("many")
    weight, _ = packed("q4_1", 48, 1568, rng)
    x = activations(700, 1568, rng)
    whole = _native.linear(x, weight)
    num_threads(1)
    for begin in (0, 1, 137, 333, 699):
        np.testing.assert_array_equal(_native.linear(x[begin : begin + 3], weight), whole[begin : begin + 3])


@pytest.mark.parametrize("fmt", FORMATS)
def test_concat_equals_the_parts(fmt):
    rng = make_rng(fmt, "concat")
    parts = [packed(fmt, n, 96, rng)[0] for n in (16, 24, 7)]
    joined = PackedWeight.concat(parts)
    x = activations(5, 96, rng)
    assert joined.n == 47 and joined.kind == parts[0].kind
    np.testing.assert_array_equal(joined.dequantize(), np.concatenate([p.dequantize() for p in parts]))
    np.testing.assert_array_equal(
        _native.linear(x, joined), np.concatenate([_native.linear(x, p) for p in parts], axis=1)
    )


@pytest.mark.parametrize(
    ("formats", "kind"),
    [
        (("q4_0", "q4_1"), "int4"),
        (("q4_0", "q8_0"), "int8"),
        (("q4_1", "q5_0", "q4_0"), "int8"),
        (("q8_0", "q5_1"), "int8"),
        (("f16", "bf16"), "f32"),
        (("q4_1", "f16"), "f32"),
    ],
)
def test_concat_of_different_formats_is_exact(formats, kind):
    rng = make_rng(formats)
    parts = [packed(fmt, 9, 64, rng)[0] for fmt in formats]
    joined = PackedWeight.concat(parts)
    assert joined.kind == kind
    np.testing.assert_array_equal(joined.dequantize(), np.concatenate([p.dequantize() for p in parts]))


@pytest.mark.parametrize("n", [8, 16, 21])
@pytest.mark.parametrize("fmt", FORMATS)
def test_interleave_equals_separate_products(fmt, n):
    rng = make_rng(fmt, n, "interleave")
    gate, up = (packed(fmt, n, 64, rng)[0] for _ in range(2))
    pair = PackedWeight.interleave(gate, up)
    x = activations(6, 64, rng)
    bias = rng.standard_normal(2 * n).astype(np.float32)
    g, u = _native.linear(x, gate, bias[:n]), _native.linear(x, up, bias[n:])
    np.testing.assert_array_equal(pair.dequantize(), np.concatenate([gate.dequantize(), up.dequantize()]))
    np.testing.assert_array_equal(_native.linear(x, pair, bias), np.concatenate([g, u], axis=1))
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-g.astype(np.float64)))
        tanh = np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g.astype(np.float64) ** 3))
    silu = _native.linear(x, pair, bias, epilogue="silu_mul")
    gelu = _native.linear(x, pair, bias, epilogue="gelu_mul")
    assert silu.shape == (6, n)
    np.testing.assert_allclose(silu, g * sigmoid * u, rtol=2e-6, atol=1e-25)
    np.testing.assert_allclose(gelu, 0.5 * g * (1 + tanh) * u, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fmt", ["q4_1", "q8_0", "f16"])
def test_prologue_and_epilogue(fmt):
    rng = make_rng(fmt, "fused")
    weight, values = packed(fmt, 40, 96, rng)
    x = activations(9, 96, rng)
    norm = rng.uniform(0.5, 2, 96).astype(np.float32)
    index = np.array([7, 0, 7, 3, 1], np.int32)
    plain = _native.linear(x, weight)
    np.testing.assert_array_equal(_native.linear(x, weight, row_index=index), plain[index])
    residual = rng.standard_normal((9, 40)).astype(np.float32)
    out = residual.copy()
    _native.linear(x, weight, epilogue="add", out=out)
    np.testing.assert_array_equal(out, residual + plain)
    normed = _native.linear(x, weight, norm_weight=norm, eps=1e-5)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * norm
    error = np.abs(normed - exact @ values.T.astype(np.float64)).max()
    assert error <= 0.01 * (np.abs(exact) @ np.abs(values.T)).max()


@pytest.mark.parametrize("with_min", [False, True])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_error(bits, group, with_min):
    rng = make_rng(bits, group, with_min)
    w = rng.standard_normal((20, 320)).astype(np.float32)
    weight = PackedWeight.quantize(w, bits, group, with_min)
    assert weight.kind == f"int{bits}"
    groups = [w[:, i : i + (group or 320)] for i in range(0, 320, group or 320)]
    largest = np.concatenate(
        [np.broadcast_to(np.abs(g).max(axis=1, keepdims=True), g.shape) for g in groups], axis=1
    )
    error = np.abs(weight.dequantize() - w)
    # half a step where nothing is clipped; clipping pays with a lower mean error
    assert (error <= largest * (0.26 if bits == 4 else 0.005)).all()
    assert np.sqrt((error**2).mean()) < (0.115 if bits == 4 else 0.008)
    coarser = PackedWeight.quantize(w, bits, 0, with_min).dequantize()
    assert (error**2).mean() <= ((coarser - w) ** 2).mean()


def test_quantize_keeps_what_the_grid_holds():
    rng = make_rng("grid")
    q = rng.integers(-8, 8, (6, 96)).astype(np.float32)
    q[:, ::32] = -8
    for w, with_min in ((q * np.float32(0.25), False), (q * np.float32(0.25) + 1, True)):
        w[:, 1::32] = w.reshape(-1)[0] + 15 * 0.25 if with_min else w[:, 1::32]
        np.testing.assert_array_equal(PackedWeight.quantize(w, 4, 32, with_min).dequantize(), w)
    np.testing.assert_array_equal(PackedWeight.quantize(np.zeros((3, 40), np.float32), 4).dequantize(), 0)


def test_non_finite_values_reach_the_result():
    weight, _ = packed("q4_1", 16, 64, make_rng("nan"))
    x = np.ones((3, 64), np.float32)
    x[0, 5], x[1, 40] = np.nan, np.inf
    y = _native.linear(x, weight)
    assert not np.isfinite(y[:2]).any() and np.isfinite(y[2]).all()


def test_wrong_arguments_say_what_is_wrong():
    weight = PackedWeight.quantize(np.ones((4, 32), np.float32), 8)
    x = np.ones((2, 32), np.float32)
    narrower = PackedWeight.quantize(x[:, :16].copy(), 8)
    for call, words in [
        (lambda: PackedWeight.pack("q3_k", np.zeros(10, np.uint8), 1, 32), "q4_0, q4_1"),
        (lambda: PackedWeight.pack("q8_0", np.zeros(33, np.uint8), 1, 32), "34 bytes, got 33"),
        (lambda: PackedWeight.quantize(x, 3), "use 4 or 8"),
        (lambda: PackedWeight.quantize(x, 4, 48), "use 32, 64, 128"),
        (
            lambda: PackedWeight.concat([weight, narrower]),
            "same number of inputs",
        ),
        (lambda: _native.linear(x[:, :31].copy(), weight), "must be 32, got 31"),
        (lambda: _native.linear(x, weight, epilogue="silu_mul"), "interleaved"),
        (lambda: _native.linear(x, weight, epilogue="relu"), "use store, add"),
        (lambda: _native.linear(x, weight, row_index=np.array([2], np.int32)), "row_index has 2"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def every_product() -> bytes:
    """Results of all formats, shapes and epilogues as bytes: the same on every instruction set."""
    out = []
    for fmt in FORMATS:
        rng = make_rng(fmt, "isa")
        gate, up = (packed(fmt, 24, 864, rng)[0] for _ in range(2))
        pair = PackedWeight.interleave(gate, up)
        x = activations(11, 864, rng)
        norm = rng.uniform(0.5, 2, 864).astype(np.float32)
        for rows in (1, 2, 3, 4, 11):
            out.append(_native.linear(x[:rows], gate, norm_weight=norm, eps=1e-6))
            out.append(_native.linear(x[:rows], pair, epilogue="silu_mul"))
            out.append(_native.linear(x[:rows], pair, epilogue="gelu_mul"))
    return b"".join(a.tobytes() for a in out)


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_every_instruction_set_gives_the_same_bits(isa):
    if isa == _native.isa():
        assert every_product() == every_product()
        return
    script = "import sys, test_gemm; sys.stdout.buffer.write(test_gemm.every_product())"
    child = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "OUTRIDER_ISA": isa, "PYTHONPATH": os.path.dirname(__file__)},
        capture_output=True,
        check=True,
    )
    assert child.stdout == every_product()


def test_settle_changes_no_bit():
    rng = make_rng("settle")
    weights = [packed(fmt, 33, 96, rng)[0] for fmt in FORMATS]
    x = activations(5, 96, rng)
    before = [_native.linear(x, w) for w in weights]
    _native.settle(weights)
    for w, y in zip(weights, before, strict=True):
        np.testing.assert_array_equal(_native.linear(x, w), y)
