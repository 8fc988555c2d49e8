"""A multi-token-prediction module: one decoder layer that reads the target's hidden states and drafts.

Row i is fed with the embedding of token i and the target's hidden state at i - 1, and predicts token i + 1:

    x = W [norm(embedding(t_i)); norm(h_(i-1))];  a decoder layer;  a norm;  a head over the draft vocabulary

To draft further it is fed its own draft and the state that it left, before its final norm, at the row before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.backends import Backend, Executable
from outrider.backends.native import NativeExecutable, compile_beside
from outrider.backends.ops import Array, Ops, Weight
from outrider.models.config import ModelConfig
from outrider.models.llama import decoder_layer
from outrider.models.quantize import encode_float
from outrider.models.registry import tensor_shapes, weight_plan
from outrider.models.tensors import RawTensor

HIDDEN_SOURCES = ("pre_norm", "post_norm")


@dataclass(frozen=True)
class MTPConfig:
    """What a module is. Its layer has the target's width, and the target's shape unless it says otherwise."""

    layer: ModelConfig  # of one layer
    hidden_source: str = "pre_norm"
    num_model_steps: int | None = None  # steps it was trained for
    has_norm: bool = False  # a final norm of its own, else the target's
    has_head: bool = False  # a head of its own, else rows of the target's

    @property
    def max_position_embeddings(self) -> int:
        return self.layer.max_position_embeddings


@dataclass(frozen=True)
class MTPHead:
    """A module that was read and checked, ready to be compiled."""

    config: MTPConfig
    tensors: Mapping[str, RawTensor] = field(repr=False)  # by the names of `module_shapes`
    path: str  # where it came from
    draft_token_ids: NDArray[np.int32] | None = None  # ascending; None: the whole vocabulary

    @property
    def nbytes(self) -> int:
        """Of its tensors as stored."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


def module_shapes(config: MTPConfig) -> dict[str, tuple[int, ...]]:
    """Tensor of a module -> its shape ([out, in] for matrices)."""
    width = config.layer.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "emb_norm": (width,),
        "hidden_norm": (width,),
        "proj": (width, 2 * width),
    }
    if config.has_norm:
        shapes["norm"] = (width,)
    if config.has_head:
        shapes["head"] = (config.layer.vocab_size, width)
    layer = {
        name: shape for name, shape in tensor_shapes(config.layer).items() if name.startswith("layers.0.")
    }
    return {**shapes, **layer}


def build(ops: Ops, config: MTPConfig, weights: Mapping[str, Weight]) -> Array:
    """The module, from the step's token ids and hidden states to draft logits of the rows that need them."""
    eps = config.layer.rms_eps
    x = decoder_layer(ops, config.layer, weights, 0, _layer_input(ops, config, weights))
    return ops.linear(ops.rms_norm(ops.gather_rows(x), weights["norm"], eps), weights["head"])


def build_feed(ops: Ops, config: MTPConfig, weights: Mapping[str, Weight]) -> Array:
    """Only what rows leave in the cache: with a single layer that depends on no other row."""
    layer = config.layer
    normed = ops.rms_norm(_layer_input(ops, config, weights), weights["layers.0.attn_norm"], layer.rms_eps)
    width = layer.num_kv_heads * layer.head_dim
    k, v = ops.split(ops.linear(normed, weights["layers.0.kv"], weights.get("layers.0.kv_bias")), [width] * 2)
    if layer.qk_norm:
        k = ops.rms_norm(k, weights["layers.0.k_norm"], layer.rms_eps, layer.num_kv_heads)
    return ops.append_cache(
        ops.rope(k, layer.rope, layer.num_kv_heads),
        v,
        layer=0,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
    )


def _layer_input(ops: Ops, config: MTPConfig, weights: Mapping[str, Weight]) -> Array:
    eps = config.layer.rms_eps
    hidden = ops.rms_norm(ops.hidden_rows(config.layer.hidden_size), weights["hidden_norm"], eps)
    token = ops.rms_norm(ops.embedding(weights["embed"]), weights["emb_norm"], eps)
    return ops.add(ops.linear(token, weights["proj_embed"]), ops.linear(hidden, weights["proj_hidden"]))


def module_weights(
    backend: Backend,
    head: MTPHead,
    target_tensors: Mapping[str, RawTensor],
    target_weights: Mapping[str, Weight],
    quantization: str | None,
) -> dict[str, Weight]:
    """The handles that `build` asks for. The embedding is the target's own handle; head rows are copied."""
    tensors = dict(head.tensors)
    tensors["proj_embed"], tensors["proj_hidden"] = _halves(tensors.pop("proj"))
    tensors["head"] = _head_rows(head, target_tensors, quantization)
    plan = {name: [name] for name in ("emb_norm", "hidden_norm", "proj_embed", "proj_hidden", "head")}
    plan |= {
        handle: names
        for handle, names in weight_plan(head.config.layer).items()
        if handle.startswith("layers.")
    }
    if head.config.has_norm:
        plan["norm"] = ["norm"]
    plan["layers.0.kv"] = ["layers.0.k", "layers.0.v"]  # for `build_feed`
    if head.config.layer.attention_bias:
        plan["layers.0.kv_bias"] = ["layers.0.k_bias", "layers.0.v_bias"]
    weights = {
        handle: backend.weight([tensors[name] for name in names], quantization)
        for handle, names in plan.items()
    }
    return {"norm": target_weights["norm"], "embed": target_weights["embed"], **weights}


def _halves(proj: RawTensor) -> list[RawTensor]:
    """[H, 2H] over the embedding and the hidden state, as two matrices whose products are added."""
    fmt = proj.format if proj.format in ("f16", "bf16", "f32") else "f16"
    halves = np.split(proj.to_float32(), 2, axis=1)
    return [
        RawTensor(f"proj_{name}", half.shape, fmt, encode_float(fmt, np.ascontiguousarray(half)), proj.file)
        for name, half in zip(("embed", "hidden"), halves, strict=True)
    ]


def _head_rows(head: MTPHead, target_tensors: Mapping[str, RawTensor], quantization: str | None) -> RawTensor:
    """The rows of the draft vocabulary: as the target has them, unless fewer bits are asked for."""
    if head.config.has_head:
        rows = head.tensors["head"]
    else:
        rows = target_tensors["head" if "head" in target_tensors else "embed"]
    if head.draft_token_ids is not None:
        rows = rows.select_rows(head.draft_token_ids)
    if quantization != "wint4":
        return rows
    return RawTensor("draft_rows", rows.shape, "f16", encode_float("f16", rows.to_float32()), rows.file)


def compile_module(
    backend: Backend, head: MTPHead, weights: Mapping[str, Weight], **limits: Any
) -> Executable:
    """The module as something that runs steps; `limits` are those of `Backend.compile`. Its output's hidden
    states are those that it goes on from."""
    return backend.compile(build, head.config, weights, hidden="pre_norm", **limits)


def compile_feeder(
    executable: Executable, head: MTPHead, weights: Mapping[str, Weight], *, max_rows: int, max_position: int
) -> Any:
    """A native program that only feeds a native module's cache; None for other backends."""
    if not isinstance(executable, NativeExecutable):
        return None
    return compile_beside(
        executable, build_feed, head.config, weights, max_rows=max_rows, max_position=max_position
    )
