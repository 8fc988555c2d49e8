"""Reading safetensors checkpoints, single files and sharded directories, without copying them.

The header is parsed here and checked in full before anything is used: lengths, offsets, overlaps, gaps,
dtypes, and that the shards hold what the index says. A file that fails is a `CheckpointError` that names
it and the tensor.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.models.tensors import CheckpointError, RawTensor, map_file

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER = 100_000_000
_DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16,
    "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True)
class SafeTensor:
    """Where a tensor lies: `start` is its position in `file`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int


class SafetensorsFile:
    """One open .safetensors file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._data: mmap.mmap = map_file(path)
        header, base = self._header()
        self.tensors = {name: self._describe(name, value, base) for name, value in header.items()}
        self._check_coverage(base)

    def tensor(self, name: str) -> RawTensor:
        """A view of the tensor; only F32, F16 and BF16 are weights."""
        info = self.tensors[name]
        if info.dtype not in _FORMATS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has dtype {info.dtype}; supported: {', '.join(_FORMATS)}"
            )
        data = np.frombuffer(self._data, np.uint8, info.nbytes, info.start)
        if info.start % 4:  # kernels may load whole numbers
            data = data.copy()
        return RawTensor(name, info.shape, _FORMATS[info.dtype], data, self.path)

    def integers(self, name: str) -> np.ndarray:
        """A copy of a tensor of I32 or I64, as int64."""
        info = self.tensors[name]
        if info.dtype not in ("I32", "I64"):
            raise CheckpointError(f"{self.path}: tensor {name!r} has dtype {info.dtype}; supported: I32, I64")
        data = bytes(self._data[info.start : info.start + info.nbytes])
        values = np.frombuffer(data, "<i4" if info.dtype == "I32" else "<i8")
        return values.astype(np.int64).reshape(info.shape)

    def _header(self) -> tuple[dict[str, Any], int]:
        """(descriptions by name, where the data begin)."""
        size = len(self._data)
        if size < 8:
            raise CheckpointError(f"{self.path}: {size} bytes are no safetensors file: truncated")
        length = int.from_bytes(self._data[:8], "little")
        if length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{self.path}: the header claims {length} bytes, the file has {size - 8} after its length "
                f"(at most {_MAX_HEADER} are allowed): truncated, or no safetensors file"
            )
        try:
            header = json.loads(self._data[8 : 8 + length], object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: the header is not valid: {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: the header is not a JSON object")
        header.pop("__metadata__", None)
        return header, 8 + length

    def _describe(self, name: str, value: Any, base: int) -> SafeTensor:
        def fail(problem: str) -> CheckpointError:
            return CheckpointError(f"{self.path}: tensor {name!r}: {problem}")

        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise fail(f"needs dtype, shape and data_offsets, got {value!r:.200}")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
            raise fail(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPE_BITS)}")
        if not _are_sizes(shape) or len(shape) > 32:
            raise fail(f"shape {shape!r:.200} is not a list of sizes")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise fail(f"data_offsets {offsets!r:.200} is not a pair of positions")
        start, end = offsets
        if not start <= end <= len(self._data) - base:
            raise fail(
                f"bytes {start} to {end} are outside the {len(self._data) - base} bytes of data: truncated?"
            )
        if (end - start) * 8 != math.prod(shape) * _DTYPE_BITS[dtype]:
            raise fail(f"{end - start} bytes do not hold shape {tuple(shape)} of {dtype}")
        return SafeTensor(name, tuple(shape), dtype, base + start, end - start)

    def _check_coverage(self, base: int) -> None:
        """Tensors must follow each other without overlap or gap, up to the end of the file."""
        end, previous = base, "the header"
        for info in sorted(self.tensors.values(), key=lambda info: (info.start, info.nbytes)):
            if info.start != end:
                kind = "overlaps" if info.start < end else "leaves a gap after"
                raise CheckpointError(f"{self.path}: tensor {info.name!r} {kind} {previous}")
            end, previous = info.start + info.nbytes, f"tensor {info.name!r}"
        if end != len(self._data):
            raise CheckpointError(
                f"{self.path}: {len(self._data) - end} bytes after the last tensor belong to none"
            )


def open_directory(path: str) -> dict[str, SafetensorsFile]:
    """Tensor name -> the open file that holds it, for a model directory (sharded or not)."""
    index_path = os.path.join(path, INDEX_NAME)
    if os.path.isfile(index_path):
        return _open_shards(path, index_path)
    single = os.path.join(path, SINGLE_NAME)
    if not os.path.isfile(single):
        found = sorted(
            name for name in os.listdir(path) if name.endswith((".safetensors", ".bin", ".pt", ".pth"))
        )
        raise CheckpointError(
            f"{path}: has neither {SINGLE_NAME} nor {INDEX_NAME}"
            + (f" (found {', '.join(found[:5])}; only those two are read)" if found else "")
        )
    file = SafetensorsFile(single)
    return {name: file for name in file.tensors}


def _open_shards(path: str, index_path: str) -> dict[str, SafetensorsFile]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index_path}: weight_map must map tensor names to file names")
    files: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        if os.path.basename(shard) != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{index_path}: {shard!r} is not a plain file name")
        files[shard] = SafetensorsFile(os.path.join(path, shard))
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            raise CheckpointError(
                f"{files[shard].path}: tensor {name!r} is missing (the index places it here)"
            )
    for shard, file in files.items():
        unlisted = next((name for name in file.tensors if weight_map.get(name) != shard), None)
        if unlisted is not None:
            raise CheckpointError(
                f"{file.path}: tensor {unlisted!r} is not listed for this file in {INDEX_NAME}"
            )
    return {name: files[shard] for name, shard in weight_map.items()}


def read_json(path: str) -> dict[str, Any]:
    """A JSON file that must hold an object; otherwise a CheckpointError that names it."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return result


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )
