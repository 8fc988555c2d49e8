"""One checkpoint tensor, and the whole of a checkpoint's tensors by name.

A `RawTensor` holds the bytes as the file has them (a view of the mapped file where that is possible),
in one of the formats that the kernels can hold; a `TensorMap` makes them when they are asked for, so
that a checkpoint larger than memory allows can be packed tensor by tensor.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from outrider.models.quantize import dequantize, encode_float, format_nbytes


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and, where there is one, the tensor."""


def map_file(path: str) -> mmap.mmap:
    """The file, mapped read-only; it must not be changed while it is in use."""
    try:
        # Opening a pipe or a device may wait for ever, or never end.
        if not os.path.isfile(path) and os.path.exists(path):
            raise CheckpointError(f"{path}: cannot be opened: it is not a file")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise CheckpointError(f"{path}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from error


@dataclass(frozen=True)
class RawTensor:
    """One tensor in a tile format: q4_0 q4_1 q5_0 q5_1 q8_0 f16 bf16 f32.

    `data` is a flat, contiguous uint8 array: the rows of `shape` [n, k] one after the other, k innermost.
    Nobody may write to it.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray
    file: str

    def __post_init__(self) -> None:
        expected = format_nbytes(self.format, self.shape)
        if self.data.nbytes != expected:
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} of shape {self.shape} in {self.format} needs {expected} "
                f"bytes, got {self.data.nbytes}"
            )

    def to_float32(self) -> np.ndarray:
        """The values, [*shape], exactly as the format defines them."""
        return dequantize(self.format, self.data).reshape(self.shape)

    def as_float(self, fmt: str) -> RawTensor:
        """A matrix of floats as f32, f16 or bf16; vectors and quantised tensors stay what they are."""
        if self.format == fmt or len(self.shape) != 2 or self.format not in ("f32", "f16", "bf16"):
            return self
        return RawTensor(self.name, self.shape, fmt, encode_float(fmt, self.to_float32()), self.file)

    def select_rows(self, order: np.ndarray) -> RawTensor:
        """Some rows, or all in another order; each row's bytes stay what they are."""
        rows = self.data.reshape(self.shape[0], -1)[order]
        return RawTensor(self.name, (len(order), *self.shape[1:]), self.format, rows.reshape(-1), self.file)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that can be read: what it is, where it is, and how to get it."""

    shape: tuple[int, ...]
    file: str
    source_name: str  # as the file calls it
    read: Callable[[], RawTensor]


class TensorMap(Mapping[str, RawTensor]):
    """Tensors by canonical name, read (and converted, where the format asks for it) at each access."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> RawTensor:
        return self._entries[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """What is known of a tensor without reading it."""
        return self._entries[name]
