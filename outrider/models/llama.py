"""The Llama family (Llama, Mistral, Qwen2, Qwen3) as one function over the ops, by configuration."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.backends.ops import Array, Ops, Weight
from outrider.models.config import ModelConfig


def build(ops: Ops, config: ModelConfig, weights: Mapping[str, Weight]) -> Array:
    """The whole model, from the step's token ids to the logits of the rows that need them.

    `weights` has the handles of `registry.weight_plan(config)`. Called once by a recording backend,
    at every step by one that executes.
    """
    x = ops.embedding(weights["embed"])  # [rows, hidden]
    for layer in range(config.num_layers):
        x = decoder_layer(ops, config, weights, layer, x)
    x = ops.rms_norm(ops.gather_rows(x), weights["norm"], config.rms_eps)
    head = weights["embed"] if config.tie_embeddings else weights["head"]
    return ops.linear(x, head)  # [logits rows, vocab]


def decoder_layer(
    ops: Ops, config: ModelConfig, weights: Mapping[str, Weight], layer: int, x: Array
) -> Array:
    """One layer: attention and MLP, each added to its input. Handles begin with `layers.{layer}.`."""
    x = ops.add(x, _attention(ops, config, weights, layer, x))
    return ops.add(x, _mlp(ops, config, weights, layer, x))


def _attention(ops: Ops, config: ModelConfig, weights: Mapping[str, Weight], layer: int, x: Array) -> Array:
    prefix = f"layers.{layer}."
    head_dim, num_heads, num_kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    normed = ops.rms_norm(x, weights[prefix + "attn_norm"], config.rms_eps)
    qkv = ops.linear(normed, weights[prefix + "qkv"], weights.get(prefix + "qkv_bias"))
    kv_width = num_kv_heads * head_dim
    q, k, v = ops.split(qkv, [num_heads * head_dim, kv_width, kv_width])
    if config.qk_norm:
        q = ops.rms_norm(q, weights[prefix + "q_norm"], config.rms_eps, num_heads)
        k = ops.rms_norm(k, weights[prefix + "k_norm"], config.rms_eps, num_kv_heads)
    attended = ops.append_attention(
        ops.rope(q, config.rope, num_heads),
        ops.rope(k, config.rope, num_kv_heads),
        v,
        layer=layer,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=config.sliding_window[layer],
    )
    return ops.linear(attended, weights[prefix + "o"], weights.get(prefix + "o_bias"))


def _mlp(ops: Ops, config: ModelConfig, weights: Mapping[str, Weight], layer: int, x: Array) -> Array:
    prefix = f"layers.{layer}."
    normed = ops.rms_norm(x, weights[prefix + "mlp_norm"], config.rms_eps)
    both = ops.linear(normed, weights[prefix + "gate_up"])
    gate, up = ops.split(both, [config.intermediate_size] * 2)
    activate = ops.silu_mul if config.hidden_act == "silu" else ops.gelu_mul
    return ops.linear(activate(gate, up), weights[prefix + "down"])
