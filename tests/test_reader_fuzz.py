"""Checkpoint files made to mislead: right in form, with lengths, counts and offsets at the edges of integers.

Random bytes seldom get past a magic number. These files are built as a writer would build them, and then
some of their numbers are replaced. Whatever comes of it, a reader gives values that lie within the file, or
one error that names the file; it never crashes, hangs, or asks for more memory than the file could need.
"""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.gguf import _SCALARS, _TENSOR_TYPES, GGUFFile
from outrider.models.quantize import FORMATS, dequantize
from outrider.models.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsFile, open_directory
from outrider.models.tensors import CheckpointError

EDGES = sorted({b + d for b in (0, 1 << 8, 1 << 16, 1 << 31, 1 << 32, 1 << 62, 1 << 63) for d in (-1, 0, 1)})
MOST_MEMORY = 4 << 20  # far above what files of a few kilobytes need, far below what their numbers claim

edge_u64 = st.sampled_from([value for value in EDGES if 0 <= value < 1 << 64] + [(1 << 64) - 1])
names = st.text(max_size=12).map(lambda text: text.encode()) | st.binary(max_size=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def read_within_bounds(content: bytes, path: Path, read: Callable[[str], None]) -> bool:
    """Whether the file could be read; fails if reading crashed or took too much memory."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        read(str(path))
        return True
    except CheckpointError as error:
        assert path.name in str(error) and len(str(error)) < 2000
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_MEMORY


# --- GGUF --------------------------------------------------------------------------------------------


def gguf_string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@st.composite
def values(draw: st.DrawFn, depth: int = 0) -> bytes:
    """A metadata value with its type; arrays may lie about their counts, and nest."""
    kind = draw(st.sampled_from([0, 4, 6, 7, 8, 9, 10, 12, 13, 255]))
    head = struct.pack("<I", kind)
    if kind == 8:
        return head + gguf_string(draw(names), draw(st.none() | edge_u64))
    if kind != 9 or depth > 3:
        width = np.dtype(_SCALARS.get(kind, "<u4")).itemsize
        return head + draw(st.binary(min_size=width, max_size=width))
    items = [draw(values(depth + 1)) for _ in range(draw(st.integers(0, 3)))]
    inner = draw(st.sampled_from([struct.unpack("<I", item[:4])[0] for item in items] or [4, 8, 9]))
    count = draw(st.just(len(items)) | edge_u64)
    return head + struct.pack("<IQ", inner, count) + b"".join(item[4:] for item in items)


@st.composite
def gguf_files(draw: st.DrawFn) -> bytes:
    """A whole file; each number is what it should be, or one at an edge."""

    def honest_or_edge(value: int) -> int:
        return draw(st.sampled_from([value] * 6 + [draw(edge_u64)]))

    entries = [gguf_string(draw(names)) + draw(values()) for _ in range(draw(st.integers(0, 3)))]
    if draw(st.booleans()):
        entries.append(gguf_string(b"general.alignment") + struct.pack("<II", 4, draw(st.sampled_from(
            [0, 1, 3, 8, 32, 1 << 20, 1 << 31, (1 << 32) - 1]))))  # fmt: skip
    infos, offset = [], 0
    for index in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(sorted(_TENSOR_TYPES)))
        _, block, nbytes = _TENSOR_TYPES[kind]
        rows = draw(st.integers(1, 3))
        dims = [honest_or_edge(block), honest_or_edge(rows)]
        infos.append(
            gguf_string(b"t%d" % draw(st.sampled_from([index, index, 0])))
            + struct.pack("<I2Q", draw(st.sampled_from([2, 2, 2, 1, 3, 2**32 - 1])), *dims)
            + struct.pack("<IQ", kind, honest_or_edge(offset))
        )
        offset += -(-rows * nbytes // 32) * 32
    header = struct.pack("<IQQ", 3, honest_or_edge(len(infos)), honest_or_edge(len(entries)))
    head = b"GGUF" + header + b"".join(entries + infos)
    return head + b"\0" * (-len(head) % 32) + draw(st.binary(max_size=64)) * (1 + offset // 64)


def read_gguf(path: str) -> None:
    file = GGUFFile(path)
    size = os.path.getsize(path)
    for name, info in file.tensors.items():
        assert info.start >= 0 and info.start + info.nbytes <= size
        if info.type_name in FORMATS:
            tensor = file.tensor(name)
            assert dequantize(tensor.format, tensor.data).size == np.prod(info.shape)


@settings(max_examples=300)
@given(content=gguf_files())
def test_misleading_gguf_files_are_read_within_bounds_or_refused(folder: Path, content: bytes) -> None:
    read_within_bounds(content, folder / "file.gguf", read_gguf)


def test_the_gguf_files_of_the_fuzzer_are_often_valid(folder: Path) -> None:
    """A fuzzer whose files all fail at the first check would test that check only."""
    read = []

    @settings(max_examples=150, database=None, derandomize=True)
    @given(content=gguf_files())
    def count(content: bytes) -> None:
        read.append(read_within_bounds(content, folder / "file.gguf", read_gguf))

    count()
    assert 0.05 < sum(read) / len(read) < 0.9


def test_arrays_in_arrays_do_not_recurse(folder: Path) -> None:
    nested = gguf_string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested
    assert not read_within_bounds(content, folder / "file.gguf", read_gguf)


# --- safetensors ----------------------------------------------------------------------------------------

sizes = st.integers(0, 4) | edge_u64 | st.sampled_from([-1, 2**200, 1.5, True, None, "1", [1]])
DTYPES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1, "BOOL": 1}


@st.composite
def safetensors_files(draw: st.DrawFn) -> bytes:
    header: dict[str, Any] = {}
    end = 0
    for index in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        start, end = end, end + DTYPES[dtype] * int(np.prod(shape, dtype=np.int64))
        entry: dict[str, Any] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        if draw(st.integers(0, 9)) == 0:
            lie = draw(st.sampled_from(["dtype", "shape", "data_offsets", "gone"]))
            if lie == "gone":
                del entry["shape"]
            else:
                entry[lie] = draw(st.lists(sizes, max_size=3) | sizes)
        header[f"t{index}"] = entry
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
    text = json.dumps(header).encode()
    length = draw(st.sampled_from([len(text)] * 9 + [draw(edge_u64)]))
    data = draw(st.binary(max_size=8)) * (1 + end)
    return struct.pack("<Q", length) + text + data[: end + draw(st.sampled_from([0] * 9 + [-1, 1]))]


def read_safetensors(path: str) -> None:
    file = SafetensorsFile(path)
    size = os.path.getsize(path)
    for name, info in file.tensors.items():
        assert info.start >= 0 and info.start + info.nbytes <= size
        if info.dtype in ("F32", "F16", "BF16"):
            tensor = file.tensor(name)
            assert dequantize(tensor.format, tensor.data).size == np.prod(info.shape, dtype=np.int64)


@settings(max_examples=300)
@given(content=safetensors_files())
def test_misleading_safetensors_files_are_judged_as_the_reference_does(folder: Path, content: bytes) -> None:
    path = folder / "file.safetensors"
    is_read = read_within_bounds(content, path, read_safetensors)
    try:
        with safetensors.safe_open(str(path), "np") as file:
            reference = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError:
        assert not is_read
    else:
        assert is_read
        assert {n: list(info.shape) for n, info in SafetensorsFile(str(path)).tensors.items()} == reference


# --- files that lead to each other ------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [INDEX_NAME, "loop.safetensors", "..", "/etc/passwd", "a/../b", ""])
def test_an_index_that_leads_astray_or_in_a_circle_is_refused(tmp_path: Path, shard: str) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"t": shard}}))
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_directory(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).symlink_to(SINGLE_NAME)
    with pytest.raises(CheckpointError):
        open_directory(str(tmp_path))
    with pytest.raises(CheckpointError):
        SafetensorsFile(str(tmp_path / SINGLE_NAME))
    with pytest.raises(CheckpointError):
        GGUFFile(str(tmp_path / SINGLE_NAME))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")  # opening it for reading would wait for a writer
    for path in (tmp_path, tmp_path / "pipe.gguf", Path("/dev/zero")):
        with pytest.raises(CheckpointError):
            GGUFFile(str(path))
