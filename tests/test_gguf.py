"""GGUF: every number format against the `gguf` package, and files that are damaged in every way."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.gguf import GGUFFile
from outrider.models.loader import load_checkpoint
from outrider.models.quantize import FORMATS, TILE_FORMATS, dequantize, quantize_q8_0, to_tile_format
from outrider.models.tensors import CheckpointError

QUANTISED = [name for name in FORMATS if name not in ("f32", "f16", "bf16")]
# Where the fp16 scales lie in a block.
_SCALES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
}  # fmt: skip


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Blocks of any bits, but with scales of a size that weights have."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, FORMATS[name].nbytes), dtype=np.uint8)
    for start in _SCALES.get(name, ()):
        scales = (rng.standard_normal(count) * 0.05).astype("<f2")
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(count, 2)
    if name in ("f32", "f16", "bf16"):
        as_float = rng.standard_normal(count).astype(np.float32)
        kept = {"f32": as_float, "f16": as_float.astype("<f2"), "bf16": as_float.view("<u4") >> 16}[name]
        blocks = kept.astype("<u2").view(np.uint8) if name == "bf16" else kept.view(np.uint8)
    return blocks.reshape(-1)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_decodes_to_the_bits_of_the_gguf_package(name: str) -> None:
    data = random_blocks(name, 300)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(dequantize(name, data), expected.reshape(-1).astype(np.float32))


def test_decoding_in_slabs_joins_without_a_seam() -> None:
    data = random_blocks("q4_0", (1 << 15) + 17)
    pieces = [dequantize("q4_0", data[start : start + 1800]) for start in range(0, len(data), 1800)]
    assert np.array_equal(dequantize("q4_0", data), np.concatenate(pieces))


@pytest.mark.parametrize("name", [name for name in QUANTISED if name not in TILE_FORMATS])
def test_recoding_to_a_tile_format_stays_within_the_documented_error(name: str) -> None:
    data = random_blocks(name, 300, seed=1)
    exact = dequantize(name, data).reshape(-1, 32)
    target, recoded = to_tile_format(name, data)
    assert target in TILE_FORMATS
    error = np.abs(dequantize(target, recoded).reshape(-1, 32) - exact)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    if name == "iq4_nl":
        assert error.max() == 0
    elif target == "q8_0":
        assert (error <= largest * (0.5 / 127 + 2**-11 + 1e-6) + 1e-7).all()
    else:
        # The minimum and scale * q may cancel, so the bound is on their sizes.
        size = np.abs(exact - exact.min(axis=1, keepdims=True)).max(axis=1, keepdims=True) + 2 * largest
        assert (error <= size * 2**-11 + 1e-7).all()


def test_tile_formats_are_not_touched() -> None:
    for name in TILE_FORMATS:
        data = random_blocks(name, 4)
        target, kept = to_tile_format(name, data)
        assert target == name
        assert kept is data


def test_q8_0_of_zeros_is_zero_and_keeps_the_largest_weight() -> None:
    values = np.zeros((2, 32), np.float32)
    values[1, 5] = -1.27
    decoded = dequantize("q8_0", quantize_q8_0(values).reshape(-1)).reshape(2, 32)
    assert not decoded[0].any()
    assert decoded[1, 5] == pytest.approx(-1.27, rel=1e-3)


def test_a_scale_too_large_for_fp16_is_an_error() -> None:
    data = random_blocks("q4_k", 1)
    data[:2] = np.array([60000], "<f2").view(np.uint8)
    data[4:8] = 63
    with pytest.raises(ValueError, match="too large"):
        to_tile_format("q4_k", data)


# A small file, written by the gguf package -----------------------------------------------------------------


def write_small(path: Path) -> str:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve 日本")
    writer.add_array("a.strings", ["", "x", "日本"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_array("a.bools", [True, False])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.arange(4, dtype=np.float16))
    blocks = random_blocks("q4_1", 6).reshape(3, 40)
    writer.add_tensor("three", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    blocks = random_blocks("q4_k", 2).reshape(2, 144)
    writer.add_tensor("four", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return Path(write_small(tmp_path_factory.mktemp("gguf") / "small.gguf")).read_bytes()


def open_bytes(data: bytes, folder: Path) -> GGUFFile:
    path = folder / "file.gguf"
    path.write_bytes(data)
    return GGUFFile(str(path))


def read_all(file: GGUFFile) -> None:
    for name in file.tensors:
        file.tensor(name).to_float32()


def test_metadata_and_tensors_are_what_was_written(small: bytes, tmp_path: Path) -> None:
    file = open_bytes(small, tmp_path)
    scalars = {key: value for key, value in file.metadata.items() if key.startswith("a.")}
    assert scalars.pop("a.strings") == ["", "x", "日本"]
    arrays = {key: scalars.pop(key).tolist() for key in ("a.ints", "a.floats", "a.bools")}
    assert arrays == {"a.ints": [1, -2, 3], "a.floats": [0.5, 1.5], "a.bools": [True, False]}
    assert scalars == {
        "a.u8": 200, "a.i8": -5, "a.u16": 65535, "a.i16": -300, "a.u32": 2**32 - 1, "a.i32": -(2**31),
        "a.u64": 2**64 - 1, "a.i64": -(2**63), "a.f32": 0.5, "a.f64": 0.1, "a.bool": True,
        "a.string": "naïve 日本",
    }  # fmt: skip
    assert file.tensor("one").to_float32().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.tensor("two").format == "f16"
    assert file.tensor("three").shape == (3, 64)
    assert (file.tensor("four").format, file.tensor("four").shape) == ("q4_1", (2, 256))
    assert file.is_converted("four")
    assert not file.is_converted("three")


def test_a_file_cut_anywhere_is_an_error_that_names_it(small: bytes, tmp_path: Path) -> None:
    for length in range(0, len(small) - 1):
        with pytest.raises(CheckpointError, match=r"file\.gguf"):
            read_all(open_bytes(small[:length], tmp_path))


@given(st.data())
def test_flipped_bytes_never_crash(small: bytes, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    damaged = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(small) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_all(open_bytes(bytes(damaged), tmp_path_factory.getbasetemp()))
    except CheckpointError as error:
        assert "file.gguf" in str(error)


@given(st.binary(max_size=400))
def test_random_bytes_never_crash(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    with pytest.raises(CheckpointError):
        open_bytes(b"GGUF\x03\x00\x00\x00\xff" + tail, tmp_path_factory.getbasetemp())


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def assemble(keys: bytes = b"", num_keys: int = 0, infos: tuple[bytes, ...] = (), data: int = 256) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), num_keys) + keys + b"".join(infos)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + b"\0" * 60, "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "cannot fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "cannot fit"),
        (assemble(struct.pack("<Q", 2**63), 1), "truncated"),
        (assemble(string("k") + struct.pack("<I", 99), 1), "unknown value type 99"),
        (assemble(string("k") + struct.pack("<IIQ", 9, 8, 2**60), 1), "cannot fit"),
        (assemble(string("k") + struct.pack("<IIQ", 9, 4, 2**62), 1), "truncated"),
        (assemble(string("k") + struct.pack("<IIQ", 9, 9, 1), 1), "arrays of value type 9"),
        (assemble((string("k") + struct.pack("<IB", 0, 1)) * 2, 2), "'k': appears twice"),
        (assemble(string("k") + struct.pack("<IQ", 8, 1) + b"\xff", 1), "not UTF-8"),
        (assemble(string("general.alignment") + struct.pack("<II", 4, 3), 1), "power of two"),
        (assemble(string("general.alignment") + struct.pack("<II", 4, 0), 1), "power of two"),
        (assemble(infos=(tensor_info("t", (2,) * 5, 0, 0),)), "'t': has 5 dimensions"),
        (assemble(infos=(tensor_info("t", (), 0, 0),)), "'t': has 0 dimensions"),
        (assemble(infos=(tensor_info("t", (8,), 77, 0),)), "'t': unknown tensor type 77"),
        (assemble(infos=(tensor_info("t", (33,), 2, 0),)), "'t': shape"),
        (assemble(infos=(tensor_info("t", (0, 4), 0, 0),)), "'t': shape"),
        (assemble(infos=(tensor_info("t", (2**63, 2**63), 0, 0),)), "'t': its"),
        (assemble(infos=(tensor_info("t", (4,), 0, 7),)), "'t': its offset 7"),
        (assemble(infos=(tensor_info("t", (4,), 0, 2**64 - 32),)), "'t': its 16 bytes"),
        (assemble(infos=(tensor_info("t", (65,), 0, 0),)), "'t': its 260 bytes"),
        (assemble(infos=(tensor_info("t", (4,), 0, 0),) * 2), "'t': appears twice"),
        (
            assemble(infos=(tensor_info("t", (16,), 0, 0), tensor_info("u", (4,), 0, 32))),
            "'u': overlaps tensor 't'",
        ),
    ],
)  # fmt: skip
def test_a_hostile_file_is_an_error_that_says_what(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_bytes(content, tmp_path)
    assert "file.gguf" in str(caught.value)


def test_a_type_that_cannot_be_decoded_is_named_with_those_that_can(tmp_path: Path) -> None:
    file = open_bytes(assemble(infos=(tensor_info("t", (256,), 16, 0),)), tmp_path)
    with pytest.raises(CheckpointError, match=r"'t' has type IQ2_XXS.*Q4_K"):
        file.tensor("t")


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf: cannot be opened"):
        GGUFFile("nowhere.gguf")


# The built-in model ----------------------------------------------------------------------------------------


@pytest.mark.model
def test_every_tensor_of_the_built_in_model_equals_the_gguf_package(builtin_model: Path) -> None:
    """Names, shapes, bytes; q and k rows back in llama.cpp's order."""
    checkpoint = load_checkpoint(str(builtin_model))
    file = GGUFFile(str(builtin_model))
    reader = gguf.GGUFReader(str(builtin_model))
    expected = {tensor.name: tensor for tensor in reader.tensors}
    assert set(expected) == set(file.tensors)
    assert len(checkpoint.tensors) == len(expected)
    for name, tensor in expected.items():
        ours = file.tensor(name)
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(ours.data, tensor.data.view(np.uint8).reshape(-1)), name
    for part, heads in (("q", 9), ("k", 3)):
        half_split = checkpoint.tensors[f"layers.7.{part}"].to_float32()
        tensor = expected[f"blk.7.attn_{part}.weight"]
        stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        undone = stored.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(stored.shape)
        assert np.array_equal(half_split, undone)


@pytest.mark.model
def test_the_built_in_model_cut_anywhere_is_an_error_that_names_it(
    builtin_model: Path, tmp_path: Path
) -> None:
    whole = builtin_model.read_bytes()
    path = tmp_path / "cut.gguf"
    for share in (0.0, 1e-6, 0.001, 0.01, 0.02, 0.3, 0.7, 0.999999):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            load_checkpoint(str(path))
