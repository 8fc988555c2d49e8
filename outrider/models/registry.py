"""Architectures by name: the function that builds each, and which tensors it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outrider.backends.ops import Array, Ops, Weight
from outrider.models import llama
from outrider.models.config import ModelConfig

BuildFunction = Callable[[Ops, ModelConfig, Mapping[str, Weight]], Array]

_BUILDERS: dict[str, BuildFunction] = {
    "llama": llama.build,
    "mistral": llama.build,
    "qwen2": llama.build,
    "qwen3": llama.build,
}


def build_function(config: ModelConfig) -> BuildFunction:
    """The model function of `config.architecture`."""
    return _BUILDERS[config.architecture]


def weight_plan(config: ModelConfig) -> dict[str, list[str]]:
    """Weight handle -> the canonical tensors whose rows, one after the other, it is made of.

    These are exactly the handles that the model function asks for, and exactly the tensors that a
    checkpoint of this config must have.
    """
    plan = {"embed": ["embed"], "norm": ["norm"]}
    if not config.tie_embeddings:
        plan["head"] = ["head"]
    for index in range(config.num_layers):
        plan.update(_layer_plan(config, f"layers.{index}."))
    return plan


def _layer_plan(config: ModelConfig, prefix: str) -> dict[str, list[str]]:
    plan = {
        "attn_norm": ["attn_norm"],
        "qkv": ["q", "k", "v"],
        "o": ["o"],
        "mlp_norm": ["mlp_norm"],
        "gate_up": ["gate", "up"],
        "down": ["down"],
    }
    if config.attention_bias:
        plan["qkv_bias"] = ["q_bias", "k_bias", "v_bias"]
    if config.attention_out_bias:
        plan["o_bias"] = ["o_bias"]
    if config.qk_norm:
        plan["q_norm"] = ["q_norm"]
        plan["k_norm"] = ["k_norm"]
    return {prefix + handle: [prefix + name for name in names] for handle, names in plan.items()}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical tensor name -> the shape it must have ([out, in] for matrices)."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, hidden),
        "head": (config.vocab_size, hidden),
        "norm": (hidden,),
        "attn_norm": (hidden,),
        "q": (q_width, hidden),
        "k": (kv_width, hidden),
        "v": (kv_width, hidden),
        "o": (hidden, q_width),
        "q_bias": (q_width,),
        "k_bias": (kv_width,),
        "v_bias": (kv_width,),
        "o_bias": (hidden,),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
        "mlp_norm": (hidden,),
        "gate": (mlp, hidden),
        "up": (mlp, hidden),
        "down": (hidden, mlp),
    }
    names = [name for names in weight_plan(config).values() for name in names]
    return {name: shapes[name.rsplit(".", 1)[-1]] for name in names}
