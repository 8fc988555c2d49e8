"""What a model is: sizes and switches, from a Hugging Face config.json or GGUF metadata.

Everything a checkpoint's own description leaves open is decided here, once; the model function and the
weight plan only read `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.backends.ops import RopeSpec
from outrider.models.rope import divide_frequencies, extended_context, rope_spec
from outrider.models.tensors import CheckpointError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_HF_NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Far beyond any model: a damaged file must not make us reserve memory.
_MOST_LAYERS, _MOST_HEAD_DIM = 10_000, 65_536
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
# Control tokens that end a turn or a text, whatever a GGUF file's metadata calls them.
_END_TOKENS = frozenset({
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>",
    "<|end_of_turn|>", "</s>", "<EOT>", "<｜end▁of▁sentence｜>",
})  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama kind. All sizes are positive; `num_heads` is a multiple of `num_kv_heads`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_embeddings: bool  # the head is the embedding
    attention_bias: bool  # on q, k and v
    attention_out_bias: bool  # on o
    qk_norm: bool  # RMSNorm over each head of q and k, before the rotation
    sliding_window: tuple[int | None, ...]  # per layer; None: the whole context
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    hidden_act: str = "silu"  # or "gelu_tanh"


class _Fields:
    """Typed access to a mapping whose errors name the file and the key."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self.values = values
        self.file = file

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {key}: {problem}")

    def integer(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = default if self.values.get(key) is None else self.values[key]
        if value is None:
            raise self.fail(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self.fail(key, f"must be a positive integer up to {most}, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.fail(key, f"must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, got {value!r}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.fail(key, f"must be a mapping, got {value!r}")
        return value


def _unknown_architecture(name: Any, file: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: architecture {name!r} is not supported; supported: {', '.join(_HF_NAMES)} "
        f"(GGUF: {', '.join(ARCHITECTURES)})"
    )


def config_from_hf(
    values: Mapping[str, Any], file: str, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The config of a Hugging Face checkpoint. `generation` is its generation_config.json, if it has one."""
    fields = _Fields(values, file)
    architecture = _hf_architecture(values, file)
    _refuse_unsupported(fields)
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", most=_MOST_LAYERS)
    max_position = fields.integer("max_position_embeddings")
    # The defaults are those of transformers' classes: config.json may leave out what equals them.
    default_head_dim = 128 if architecture == "qwen3" else hidden_size // num_heads
    head_dim = fields.integer("head_dim", default_head_dim, most=_MOST_HEAD_DIM)
    scaling = _hf_rope(fields)
    rotary_dim = int(head_dim * min(1.0, _Fields(scaling, file).number("partial_rotary_factor", 1.0)))
    bias = fields.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(scaling, rotary_dim, max_position, file),
        max_position_embeddings=extended_context(scaling, max_position),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=architecture == "qwen2" or (bias and architecture != "mistral"),
        attention_out_bias=bias and architecture in ("llama", "qwen3"),
        qk_norm=architecture == "qwen3",
        sliding_window=_hf_windows(fields, architecture, num_layers),
        eos_token_ids=_hf_eos(values, generation or {}),
        bos_token_id=values.get("bos_token_id"),
        hidden_act=_ACTIVATIONS[values.get("hidden_act", "silu")],
    )
    return _checked(config, file)


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.values.get("quantization_config") is not None:
        method = fields.mapping("quantization_config").get("quant_method")
        raise fields.fail(
            "quantization_config",
            f"pre-quantised checkpoints ({method!r}) are not supported; use the unquantised checkpoint with "
            "--quantization, or a GGUF file",
        )
    if fields.flag("mlp_bias", False):
        raise fields.fail("mlp_bias", "biases in the MLP are not supported")
    activation = fields.values.get("hidden_act", "silu")
    if activation not in list(_ACTIVATIONS):
        known = ", ".join(_ACTIVATIONS)
        raise fields.fail("hidden_act", f"{activation!r} is not supported; supported: {known}")


def _hf_architecture(values: Mapping[str, Any], file: str) -> str:
    named = values.get("architectures") or [None]
    name = named[0] if isinstance(named, list) and len(named) == 1 else named
    if isinstance(name, str) and name in _HF_NAMES:
        return _HF_NAMES[name]
    if name is None and values.get("model_type") in ARCHITECTURES:
        return str(values["model_type"])
    raise _unknown_architecture(values.get("model_type") if name is None else name, file)


def _hf_rope(fields: _Fields) -> dict[str, Any]:
    """rope_parameters (transformers 5), or rope_theta and rope_scaling (before)."""
    scaling = dict(fields.mapping("rope_scaling") or fields.mapping("rope_parameters"))
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise fields.fail("rope_parameters", "separate parameters per layer type are not supported")
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if scaling.get(key) is None and fields.values.get(key) is not None:
            scaling[key] = fields.values[key]
    return scaling


def _rope(scaling: Mapping[str, Any], rotary_dim: int, max_position: int, file: str) -> RopeSpec:
    try:
        return rope_spec(scaling.get("rope_theta", 10000.0), rotary_dim, scaling, max_position, file)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _hf_windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    unused = architecture != "mistral" and not fields.flag("use_sliding_window", False)
    if architecture == "llama" or unused or fields.values.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    window = fields.integer("sliding_window", 4096)
    if architecture == "mistral":
        return (window,) * num_layers
    kinds = fields.values.get("layer_types")
    if kinds is None:
        first = fields.values.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise fields.fail("max_window_layers", f"must be an integer, got {first!r}")
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    known = ["full_attention", "sliding_attention"]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise fields.fail(
            "layer_types", f"needs full_attention or sliding_attention {num_layers} times, got {kinds}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _hf_eos(values: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json knows better: there a chat model's end of turn is listed."""
    for source in (generation, values):
        ids = source.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
    return ()


def config_from_gguf(
    metadata: Mapping[str, Any],
    file: str,
    vocab_size: int,
    tensor_names: Collection[str],
    rope_freqs: np.ndarray | None = None,
) -> ModelConfig:
    """The config of a GGUF file. `vocab_size` is the number of rows of its embedding, `rope_freqs` its
    tensor of that name."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise _unknown_architecture(architecture, file)
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = _Fields(own, f"{file}: {architecture}")
    if own.get("expert_count"):
        raise fields.fail("expert_count", "mixture-of-experts models are not supported")
    num_heads, hidden_size = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = _gguf_head_dim(fields, hidden_size // num_heads)
    num_layers, context = fields.integer("block_count", most=_MOST_LAYERS), fields.integer("context_length")
    window = fields.integer("attention.sliding_window") if own.get("attention.sliding_window") else None
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(fields, head_dim, context, rope_freqs),
        max_position_embeddings=context,
        tie_embeddings="output.weight" not in tensor_names,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        attention_out_bias="blk.0.attn_output.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        sliding_window=(window,) * num_layers,
        eos_token_ids=_gguf_eos(metadata),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )
    return _checked(config, file)


def _gguf_head_dim(fields: _Fields, default: int) -> int:
    head_dim = fields.integer("attention.key_length", default, most=_MOST_HEAD_DIM)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.fail("attention.value_length", f"must equal the key length {head_dim}")
    return head_dim


def _gguf_rope(fields: _Fields, head_dim: int, context: int, rope_freqs: np.ndarray | None) -> RopeSpec:
    scaling: dict[str, Any] = {"rope_theta": fields.number("rope.freq_base", 10000.0)}
    kind = fields.values.get("rope.scaling.type", "none")
    if kind != "none":
        scaling["rope_type"] = kind
        scaling["factor"] = fields.values.get("rope.scaling.factor")
        scaling["original_max_position_embeddings"] = fields.values.get(
            "rope.scaling.original_context_length"
        )
    rotary_dim = fields.integer("rope.dimension_count", head_dim, most=head_dim)
    spec = _rope(scaling, rotary_dim, context, fields.file)
    if rope_freqs is None:
        return spec
    if rope_freqs.shape != (len(spec.inv_freq),) or not (rope_freqs > 0).all():
        raise CheckpointError(
            f"{fields.file}: tensor 'rope_freqs.weight' needs {len(spec.inv_freq)} positive values"
        )
    return divide_frequencies(spec, rope_freqs)


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that the metadata names, and control tokens that are known to end a turn or a text."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    kinds = metadata.get("tokenizer.ggml.token_type")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(kinds, np.ndarray) and isinstance(tokens, list):
        control = np.flatnonzero(kinds[: len(tokens)] == 3)
        ids += [int(i) for i in control if tokens[i] in _END_TOKENS]
    return tuple(dict.fromkeys(ids))


def _checked(config: ModelConfig, file: str) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{file}: the number of heads ({config.num_heads}) must be a multiple of the number of key/value "
            f"heads ({config.num_kv_heads})"
        )
    if not 0 < config.rope.rotary_dim <= config.head_dim:
        raise CheckpointError(
            f"{file}: the rotary dimension {config.rope.rotary_dim} exceeds head_dim {config.head_dim}"
        )
    for token_id in (*config.eos_token_ids, config.bos_token_id):
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < config.vocab_size):
            raise CheckpointError(
                f"{file}: special token id {token_id!r} is not in the vocabulary of {config.vocab_size}"
            )
    return config
