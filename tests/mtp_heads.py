"""Draft heads made by tests: random ones, and some that must agree with their target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = "model.mtp_block.0."
DTYPES = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64"}


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        header[name] = {
            "dtype": DTYPES[str(values.dtype)],
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_head(
    folder: Path, tensors: Mapping[str, np.ndarray], ids: np.ndarray | None = None, **settings: Any
) -> Path:
    """A head directory in our own format."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: values.astype(np.float16) for name, values in tensors.items()}
    if ids is not None:
        stored["draft_token_ids"] = ids.astype(np.int32)
    save_safetensors(folder / "model.safetensors", stored)
    (folder / "config.json").write_text(json.dumps({"architectures": ["OutriderMTP"], **settings}))
    return folder


def module_names() -> dict[str, str]:
    """Short name -> name in a checkpoint."""
    names = {
        "emb_norm": "model.mtp_emb_norm.0.weight",
        "hidden_norm": "model.mtp_hidden_norm.0.weight",
        "proj": "model.mtp_linear_proj.0.weight",
        "norm": "model.mtp_norm.weight",
        "attn_norm": BLOCK + "input_layernorm.weight",
        "mlp_norm": BLOCK + "post_attention_layernorm.weight",
    }
    names |= {name: f"{BLOCK}self_attn.{name}_proj.weight" for name in "qkvo"}
    return names | {name: f"{BLOCK}mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def head_like_last_layer(
    tensors: Mapping[str, Any], num_layers: int, scale: float = 0.02
) -> dict[str, np.ndarray]:
    """A module whose layer is the target's last and whose projection passes the hidden state on, mixed with a
    little of the token's embedding: bad drafts, but not random ones."""
    prefix = f"layers.{num_layers - 1}."
    parts = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")
    values = {part: tensors[prefix + part].to_float32() for part in parts}
    norm = tensors["norm"].to_float32()
    values["hidden_norm"] = norm
    values["emb_norm"] = np.ones_like(norm)
    eye = np.eye(len(norm), dtype=np.float32)
    values["proj"] = np.concatenate([scale * eye, eye], axis=1)
    names = module_names()
    return {names[part]: value for part, value in values.items()}


def save_chain_model(folder: Path, *, noise: float = 0.0, gain: float = 0.6, seed: int = 0) -> Path:
    """A target that likes to go on with successor(t) after token t, and beside it, in `mtp`, a head that
    foresees that from the hidden state alone: from the state at t it makes that at successor(t). `noise` lets
    both depend a little on the whole context. The vocabulary has 90 tokens, each a character."""
    from tiny_checkpoints import save_tokenizer

    rng = np.random.default_rng(seed)
    vocab, width, heads, inner = 90, 96, 4, 64
    embed = np.linalg.qr(rng.standard_normal((width, width)))[0][:vocab]
    after = successors(seed)
    following = np.zeros_like(embed)
    following[after] = embed  # row successor(t) is the embedding of t
    step = embed[after].T @ embed  # takes the embedding of t to that of successor(t)

    def layer(prefix: str) -> dict[str, np.ndarray]:
        shapes = {
            "q": (width, width),
            "k": (width // 2, width),
            "v": (width // 2, width),
            "o": (width, width),
        }
        values = {f"self_attn.{n}_proj": rng.standard_normal(s) * s[1] ** -0.5 for n, s in shapes.items()}
        shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        values |= {f"mlp.{n}_proj": rng.standard_normal(s) * s[1] ** -0.5 for n, s in shapes.items()}
        values["self_attn.o_proj"] *= noise * width**-0.5
        values["mlp.down_proj"] *= noise * width**-0.5
        values |= {name: np.ones(width) for name in ("input_layernorm", "post_attention_layernorm")}
        return {f"{prefix}{name}.weight": value for name, value in values.items()}

    sizes = {
        "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model.embed_tokens.weight": embed, "lm_head.weight": following,
        "model.norm.weight": np.full(width, gain),
    } | layer("model.layers.0.")  # fmt: skip
    save_safetensors(folder / "model.safetensors", {n: v.astype(np.float32) for n, v in tensors.items()})
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    save_tokenizer(folder)
    module = {
        "model.mtp_emb_norm.0.weight": np.ones(width),
        "model.mtp_hidden_norm.0.weight": np.ones(width),
        "model.mtp_linear_proj.0.weight": np.concatenate([0 * step, step], axis=1) / width**0.5,
    } | layer(BLOCK)  # fmt: skip
    save_head(folder / "mtp", module, np.arange(0, vocab), num_model_steps=3)
    return folder


def successors(seed: int = 0) -> np.ndarray:
    """The token that each token of the chain model is mostly followed by."""
    return np.random.default_rng(seed + 1).permutation(90)


def chain_prompt(first: int, length: int, seed: int = 0) -> list[int]:
    """A prompt that goes as the chain model would."""
    after, prompt = successors(seed), [first]
    while len(prompt) < length:
        prompt.append(int(after[prompt[-1]]))
    return prompt
