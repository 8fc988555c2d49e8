"""A trained head as files that the engine loads: config.json and model.safetensors in float16."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_TYPES = {"float16": "F16", "float32": "F32", "int32": "I32"}


def write_head(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Write both files, each whole or not at all. Floats become float16."""
    path.mkdir(parents=True, exist_ok=True)
    stored = {
        name: np.ascontiguousarray(array, np.float16 if array.dtype.kind == "f" else array.dtype)
        for name, array in tensors.items()
    }
    for name, array in stored.items():
        if array.dtype == np.float16 and not np.isfinite(array).all():
            raise ValueError(f"tensor {name} of the head does not fit into float16")
    _replace(path / "model.safetensors", _safetensors(stored))
    _replace(path / "config.json", (json.dumps(dict(settings), indent=2) + "\n").encode())


def _safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in sorted(tensors.items()):
        end = offset + array.nbytes
        header[name] = {
            "dtype": _TYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(array.tobytes() for _, array in sorted(tensors.items()))
    return len(text).to_bytes(8, "little") + text + body


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)
