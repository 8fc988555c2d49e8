"""Fusion: what is fused, what is left alone, and that neither changes a bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from native_models import (
    BLOCK_SIZE,
    CONFIGS,
    MAX_ROWS,
    NUM_BLOCKS,
    compile_model,
    instructions,
    outputs,
    random_tensors,
    tiny_config,
)

from outrider.backends.native import NativeBackend
from outrider.backends.ops import Array, Ops, RopeSpec
from outrider.models.config import ModelConfig
from outrider.models.llama import build
from outrider.models.registry import weight_plan


@pytest.mark.parametrize("quantization", [None, "wint8", "wint4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_fusion_changes_no_bit(name: str, quantization: str | None) -> None:
    fused = compile_model(CONFIGS[name], quantization=quantization)
    plain = compile_model(CONFIGS[name], quantization=quantization, fusion=False)
    assert len(instructions(fused)) < len(instructions(plain))
    assert outputs(fused) == outputs(plain)


def test_a_layer_is_five_instructions() -> None:
    layer = ["linear", "append_attention", "linear", "linear", "linear"]
    for name in ("llama", "tied, biased", "qk_norm, gelu, window"):
        assert instructions(compile_model(CONFIGS[name])) == ["embedding", *layer, *layer, "linear"]


def test_tensors_of_mixed_formats_are_fused_by_columns() -> None:
    config = tiny_config(attention_bias=True)
    tensors = random_tensors(config)
    for name in ("layers.0.v", "layers.0.up", "layers.1.q"):
        values = tensors[name].to_float32().astype(np.float16)
        tensors[name] = replace(tensors[name], format="f16", data=values.reshape(-1).view(np.uint8))
    results = []
    for fusion in (True, False):
        backend = NativeBackend(fusion=fusion)
        weights = {
            handle: backend.weight([tensors[name] for name in names], None)
            for handle, names in weight_plan(config).items()
        }
        executable = backend.compile(
            build, config, weights, max_rows=MAX_ROWS, max_logits_rows=MAX_ROWS, num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
        )  # fmt: skip
        results.append(outputs(executable))
    assert results[0] == results[1]


class Pieces:
    """Shorthand for small models: all widths 64, but for the gate and up of 96 each."""

    def __init__(self, ops: Ops, weights: Any) -> None:
        self.ops, self.weights = ops, weights
        self.x = ops.embedding(weights["embed"])

    def linear(self, x: Array, layer: int = 0) -> Array:
        return self.ops.linear(x, self.weights[f"layers.{layer}.o"])

    def norm(self, x: Array, num_heads: int = 1) -> Array:
        weight = self.weights["norm"][: 64 // num_heads]
        return self.ops.rms_norm(x, weight, 1e-5, num_heads)

    def layer_norm(self, x: Array) -> Array:
        return self.ops.layer_norm(x, self.weights["norm"], self.weights["layers.0.attn_norm"], 1e-5)

    def gate_up(self, x: Array) -> list[Array]:
        return self.ops.split(self.ops.linear(x, self.weights["layers.0.gate_up"]), [96, 96])

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        shape = dict(num_heads=4, num_kv_heads=2, head_dim=16)
        return self.ops.append_attention(q, k, v, layer=0, scale=0.25, **shape)


def read_between(p: Pieces) -> Array:
    o = p.linear(p.layer_norm(p.x))
    twice = p.ops.add(p.x, p.x)
    return p.ops.add(p.ops.add(p.x, o), twice)


def residual_read_later(p: Pieces) -> Array:
    return p.ops.add(p.ops.add(p.x, p.linear(p.layer_norm(p.x))), p.x)


def linear_read_twice(p: Pieces) -> Array:
    o = p.linear(p.layer_norm(p.x))
    return p.ops.add(p.ops.add(p.x, o), o)


def reads_what_it_would_overwrite(p: Pieces) -> Array:
    return p.ops.add(p.x, p.linear(p.x))


def residual_is_a_part(p: Pieces) -> Array:
    q, k, v = p.ops.split(p.ops.linear(p.layer_norm(p.x), p.weights["layers.0.qkv"]), [64, 32, 32])
    attended = p.attend(q, k, v)
    return p.ops.add(q, p.linear(attended))


def residual_comes_after(p: Pieces) -> Array:
    first = p.linear(p.layer_norm(p.x))
    return p.ops.add(p.layer_norm(p.x), first)


def two_linears_and_a_residual(p: Pieces) -> Array:
    normed = p.layer_norm(p.x)
    both = p.ops.add(p.linear(normed), p.linear(normed, 1))  # the second adds to the first,
    return p.ops.add(p.x, both)  # which therefore is no linear's alone


def norm_read_twice(p: Pieces) -> Array:
    normed = p.norm(p.x)
    return p.ops.add(p.linear(normed), normed)


def norm_over_heads(p: Pieces) -> Array:
    return p.linear(p.norm(p.x, num_heads=2))


def up_before_gate(p: Pieces) -> Array:
    gate, up = p.gate_up(p.x)
    return p.ops.linear(p.ops.silu_mul(up, gate), p.weights["layers.0.down"])


def gate_read_twice(p: Pieces) -> Array:
    gate, up = p.gate_up(p.x)
    product = p.ops.add(p.ops.silu_mul(gate, up), gate)
    return p.ops.linear(product, p.weights["layers.0.down"])


def gate_up_of_three_tensors(p: Pieces) -> Array:
    gate, up = p.ops.split(p.ops.linear(p.x, p.weights["layers.0.qkv"]), [64, 64])
    return p.ops.silu_mul(gate, up)


def rope_over_other_heads(p: Pieces) -> Array:
    q, k, v = p.ops.split(p.ops.linear(p.x, p.weights["layers.0.qkv"]), [64, 32, 32])
    half, spec = RopeSpec((1.0, 0.1), 4), RopeSpec((1.0, 0.1, 0.01), 6)
    return p.ops.add(
        p.attend(p.ops.rope(q, half, 8), p.ops.rope(k, half, 4), v),
        p.attend(p.ops.rope(q, half, 4), p.ops.rope(k, spec, 2), v),
    )


LOOKALIKES: dict[Any, list[str]] = {
    read_between: ["layer_norm", "linear", "add", "add", "add"],
    residual_read_later: ["layer_norm", "linear", "add", "add"],
    linear_read_twice: ["layer_norm", "linear", "add", "add"],
    reads_what_it_would_overwrite: ["linear", "add"],
    residual_is_a_part: ["layer_norm", "linear", "append_attention", "linear", "add"],
    residual_comes_after: ["layer_norm", "linear", "layer_norm", "add"],
    two_linears_and_a_residual: ["layer_norm", "linear", "linear", "add"],
    norm_read_twice: ["rms_norm", "linear", "add"],
    norm_over_heads: ["rms_norm", "linear"],
    up_before_gate: ["linear", "silu_mul", "linear"],
    gate_read_twice: ["linear", "silu_mul", "add", "linear"],
    gate_up_of_three_tensors: ["linear", "silu_mul"],
    rope_over_other_heads: [
        "linear", "rope", "rope", "append_attention", "rope", "rope", "append_attention", "add"
    ],
}  # fmt: skip


@pytest.mark.parametrize("model", LOOKALIKES)
def test_what_only_looks_fusible_is_left_alone(model: Any) -> None:
    def build_pieces(ops: Ops, config: ModelConfig, weights: Any) -> Array:
        return ops.gather_rows(model(Pieces(ops, weights)))

    fused = compile_model(CONFIGS["llama"], build_fn=build_pieces)
    plain = compile_model(CONFIGS["llama"], build_fn=build_pieces, fusion=False)
    assert instructions(fused) == ["embedding", *LOOKALIKES[model], "gather_rows"]
    assert outputs(fused) == outputs(plain)
