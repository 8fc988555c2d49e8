"""What checkpoints call the tensors: canonical name -> name in a Hugging Face or GGUF file."""

from __future__ import annotations

import re
from collections.abc import Collection

_HF_WHOLE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_HF_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_GGUF_WHOLE = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


def hf_name(canonical: str) -> str:
    """As transformers names the parameters of a ...ForCausalLM."""
    if canonical in _HF_WHOLE:
        return _HF_WHOLE[canonical]
    _, index, part = canonical.split(".")
    return f"model.layers.{index}.{_HF_LAYER[part]}"


def gguf_name(canonical: str) -> str:
    """As the GGUF specification names the tensors of llama-like models."""
    if canonical in _GGUF_WHOLE:
        return _GGUF_WHOLE[canonical]
    _, index, part = canonical.split(".")
    return f"blk.{index}.{_GGUF_LAYER[part]}"


def hf_layer_names() -> dict[str, str]:
    """Canonical part of a layer -> its name below the layer's prefix in a Hugging Face checkpoint."""
    return dict(_HF_LAYER)


def draft_head_tensors(names: Collection[str], num_layers: int) -> set[str]:
    """Those of a checkpoint of `num_layers` layers that belong to a draft head: ERNIE's modules have names of
    their own, DeepSeek's and GLM's are layers behind the last that hold an `eh_proj`."""
    layer_of = {name: match[1] for name in names if (match := re.match(r"model\.layers\.(\d+)\.", name))}
    heads = {layer for name, layer in layer_of.items() if name.endswith(".eh_proj.weight")}
    return {name for name in names if re.match(r"(model|ernie)\.mtp_", name)} | {
        name for name, layer in layer_of.items() if layer in heads and int(layer) >= num_layers
    }
