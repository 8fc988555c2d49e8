"""Reading GGUF files (versions 2 and 3) without copying them.

The file is mapped; metadata and tensor descriptions are parsed once, tensors are views. Every length
and offset is checked against the file before it is used: a truncated or hostile file is a
`CheckpointError` that names the file and the key or tensor, never a crash or a large allocation.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.models.quantize import FORMATS, TILE_FORMATS, format_nbytes, to_tile_format
from outrider.models.tensors import CheckpointError, RawTensor, map_file

_MAGIC = b"GGUF"
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
# GGUF value types -> numpy type of one value.
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip
# GGML tensor types -> (format name, values a block, bytes a block). Names in `FORMATS` can be read.
_TENSOR_TYPES = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 40), 10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292), 16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50), 20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136), 24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8),
    28: ("f64", 1, 8), 29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66), 39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36),
}  # fmt: skip


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's description. `shape` is outermost first (the file has it the other way round)."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int  # in the file
    nbytes: int


class GGUFFile:
    """An open GGUF file: `metadata` (arrays of numbers are numpy arrays, of strings lists) and `tensors`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._data = map_file(path)
        reader = _Reader(path, self._data)
        self.version, num_tensors, num_keys = reader.header()
        self.metadata = reader.metadata(num_keys)
        self.tensors = reader.tensors(num_tensors, self._alignment())

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.path}: general.alignment must be a power of two up to 2^20, got {alignment!r}"
            )
        return alignment

    def tensor(self, name: str) -> RawTensor:
        """A tensor in a tile format: a view of the file, or re-coded (see `quantize`)."""
        info = self.tensors[name]
        if info.type_name not in FORMATS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type {info.type_name.upper()}, which cannot be read; "
                f"supported: {', '.join(f.upper() for f in FORMATS)}"
            )
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.start)
        try:
            fmt, data = to_tile_format(info.type_name, raw)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: tensor {name!r}: {error}") from error
        return RawTensor(name, info.shape, fmt, data, self.path)

    def is_converted(self, name: str) -> bool:
        """Whether `tensor` re-codes this one."""
        return self.tensors[name].type_name not in TILE_FORMATS


class _Reader:
    """A cursor over the file's head; every read is checked against the end of the file."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._pos = 0

    def _fail(self, where: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {where}: {problem} (at byte {self._pos} of {self._size})")

    def _need(self, count: int, where: str) -> int:
        """The position of the next `count` bytes, which are then passed."""
        start = self._pos
        if count > self._size - start:
            raise self._fail(where, f"needs {count} more bytes, the file is truncated or damaged")
        self._pos = start + count
        return start

    def _u32(self, where: str) -> int:
        return int(struct.unpack_from("<I", self._data, self._need(4, where))[0])

    def _u64(self, where: str) -> int:
        return int(struct.unpack_from("<Q", self._data, self._need(8, where))[0])

    def _string(self, where: str) -> str:
        length = self._u64(where)
        start = self._need(length, where)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self._fail(where, f"a string is not UTF-8: {error}") from error

    def header(self) -> tuple[int, int, int]:
        """(version, number of tensors, number of metadata keys)."""
        start = self._need(4, "header")
        magic = self._data[start : start + 4]
        if magic != _MAGIC:
            raise self._fail("header", f"not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
        version = self._u32("header")
        if version not in (2, 3):
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            hint = "; the file is big-endian" if big_endian else ""
            raise self._fail("header", f"GGUF version {version} is not supported (2 and 3 are){hint}")
        num_tensors, num_keys = self._u64("header"), self._u64("header")
        # The smallest tensor description has 24 bytes, the smallest metadata entry 13.
        if num_tensors * 24 + num_keys * 13 > self._size:
            raise self._fail("header", f"{num_tensors} tensors and {num_keys} keys cannot fit in the file")
        return version, num_tensors, num_keys

    def metadata(self, num_keys: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for index in range(num_keys):
            key = self._string(f"metadata key {index}")
            if key in result:
                raise self._fail(f"metadata key {key!r}", "appears twice")
            result[key] = self._value(self._u32(f"metadata key {key!r}"), f"metadata key {key!r}")
        return result

    def _value(self, kind: int, where: str) -> Any:
        if kind == _STRING:
            return self._string(where)
        if kind == _ARRAY:
            return self._array(where)
        if kind not in _SCALARS:
            raise self._fail(where, f"unknown value type {kind}")
        return self._numbers(kind, 1, where)[0].item()

    def _numbers(self, kind: int, count: int, where: str) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        start = self._need(count * dtype.itemsize, where)
        if dtype == np.bool_:  # any other byte than 0 and 1 would make an invalid numpy bool
            return np.frombuffer(self._data, np.uint8, count, start) != 0
        return np.frombuffer(self._data, dtype, count, start)

    def _array(self, where: str) -> np.ndarray | list[str]:
        kind, count = self._u32(where), self._u64(where)
        if kind == _STRING:
            return self._strings(count, where)
        if kind not in _SCALARS:
            raise self._fail(where, f"arrays of value type {kind} are not supported")
        return self._numbers(kind, count, where)

    def _strings(self, count: int, where: str) -> list[str]:
        if count * 8 > self._size - self._pos:
            raise self._fail(where, f"an array of {count} strings cannot fit in the file")
        # The hot loop of opening a file (about 100,000 strings): local names, no calls but two.
        data, size, pos = self._data, self._size, self._pos
        length_at = struct.Struct("<Q").unpack_from
        parts: list[bytes] = []
        for _ in range(count):
            if pos + 8 > size:
                raise self._fail(where, "the file ends inside an array of strings")
            start = pos + 8
            pos = start + length_at(data, pos)[0]
            if pos > size:
                raise self._fail(where, "the file ends inside an array of strings")
            parts.append(data[start:pos])
        self._pos = pos
        try:
            return [part.decode() for part in parts]
        except UnicodeDecodeError as error:
            raise self._fail(where, f"a string is not UTF-8: {error}") from error

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        described = [self._tensor_info(index) for index in range(count)]
        base = -(-self._pos // alignment) * alignment
        result: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in described:
            where = f"tensor {name!r}"
            if name in result:
                raise self._fail(where, "appears twice")
            if offset % alignment:
                raise self._fail(where, f"its offset {offset} is not a multiple of the alignment {alignment}")
            nbytes = self._tensor_nbytes(where, shape, kind)
            if base + offset + nbytes > self._size:
                raise self._fail(
                    where, f"its {nbytes} bytes at {base + offset} end behind the file: truncated or damaged"
                )
            result[name] = GGUFTensor(name, shape, _TENSOR_TYPES[kind][0], base + offset, nbytes)
        self._check_overlap(result)
        return result

    def _tensor_info(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(f"tensor {index}")
        where = f"tensor {name!r}"
        num_dims = self._u32(where)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._fail(where, f"has {num_dims} dimensions, 1 to {_MAX_DIMS} are allowed")
        dims = struct.unpack_from(f"<{num_dims}Q", self._data, self._need(8 * num_dims, where))
        return name, tuple(reversed(dims)), self._u32(where), self._u64(where)

    def _tensor_nbytes(self, where: str, shape: tuple[int, ...], kind: int) -> int:
        if kind not in _TENSOR_TYPES:
            raise self._fail(where, f"unknown tensor type {kind}")
        name, block, nbytes = _TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % block:
            raise self._fail(
                where, f"shape {shape} is not a whole number of {name.upper()} blocks of {block}"
            )
        if name in FORMATS:
            return format_nbytes(name, shape)
        return math.prod(shape) // block * nbytes

    def _check_overlap(self, tensors: dict[str, GGUFTensor]) -> None:
        end, previous = 0, ""
        for info in sorted(tensors.values(), key=lambda info: info.start):
            if info.start < end:
                raise self._fail(f"tensor {info.name!r}", f"overlaps tensor {previous!r}")
            end, previous = info.start + info.nbytes, info.name
