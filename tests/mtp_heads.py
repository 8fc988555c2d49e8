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


def head_like_last_layer(tensors: Mapping[str, Any], num_layers: int, scale: float = 0.02) -> dict[str, np.ndarray]:
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
