"""Number formats of checkpoint tensors: decoding each, and re-coding those that the tiles cannot hold.

Tile formats are decoded exactly. K-quants (and IQ4) are re-coded to the nearest tile format by
`to_tile_format`, with these errors on top of what the file's own quantisation lost:

* Q4_K -> q4_1 and Q5_K -> q5_1: the integers are kept; the product of the two-level scales (and of the
  minima) is rounded to fp16, so a weight moves by at most 2^-11 of (|scale * q| + |minimum|).
* IQ4_NL -> q8_0: exact. IQ4_XS -> q8_0: the integers are kept, the scale is rounded to fp16 (2^-11).
* Q2_K, Q3_K, Q6_K -> q8_0: rounded to 1/127 of the largest weight of the 32, so a weight moves by at most
  0.4 % of that largest weight plus the fp16 rounding of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_SLAB_BLOCKS = 1 << 15  # blocks decoded at a time: bounds the memory of intermediate arrays


@dataclass(frozen=True)
class BlockFormat:
    """`block` consecutive values (of a row) are stored in `nbytes` bytes."""

    block: int
    nbytes: int
    decode: Callable[[np.ndarray], np.ndarray]  # uint8 [blocks, nbytes] -> float32 [blocks, block]


def _fp16(raw: np.ndarray, start: int) -> np.ndarray:
    """The fp16 numbers at byte `start` of each block, float32 [blocks, 1]."""
    return np.ascontiguousarray(raw[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Bytes [..., m] -> [..., 2m]: first all low halves, then all high ones."""
    return np.concatenate([raw & 0x0F, raw >> 4], axis=-1)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """Four bytes a block -> 32 bits a block, each worth 16."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def _decode_q4_0(raw: np.ndarray) -> np.ndarray:
    return _fp16(raw, 0) * (_nibbles(raw[:, 2:]).astype(np.float32) - 8)


def _decode_q4_1(raw: np.ndarray) -> np.ndarray:
    return _fp16(raw, 0) * _nibbles(raw[:, 4:]).astype(np.float32) + _fp16(raw, 2)


def _decode_q5_0(raw: np.ndarray) -> np.ndarray:
    q = _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])
    return _fp16(raw, 0) * (q.astype(np.float32) - 16)


def _decode_q5_1(raw: np.ndarray) -> np.ndarray:
    q = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return _fp16(raw, 0) * q.astype(np.float32) + _fp16(raw, 2)


def _decode_q8_0(raw: np.ndarray) -> np.ndarray:
    return _fp16(raw, 0) * raw[:, 2:].view(np.int8).astype(np.float32)


def _decode_f32(raw: np.ndarray) -> np.ndarray:
    return raw.copy().view("<f4")


def _decode_f16(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _decode_bf16(raw: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _two_level(raw: np.ndarray, scales_at: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of the 8 sub-blocks of Q4_K and Q5_K, float32 [blocks, 8] each.

    Twelve bytes hold 8 + 8 numbers of six bits: the first four of each whole, the others in halves.
    """
    low, middle, high = np.split(raw[:, scales_at : scales_at + 12], 3, axis=1)
    scales = np.concatenate([low & 63, (high & 0x0F) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return _fp16(raw, 0) * scales.astype(np.float32), _fp16(raw, 2) * minima.astype(np.float32)


def _q4_k_integers(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 8, 32]."""
    return _nibbles(raw[:, 16:144].reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q5_k_integers(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 8, 32]: bit j of the 32 high-bit bytes belongs to sub-block j."""
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    high = (raw[:, None, 16:48] >> shifts) & 1
    return _nibbles(raw[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (high << 4)


def _decode_q4_k(raw: np.ndarray) -> np.ndarray:
    scale, minimum = _two_level(raw, 4)
    q = _q4_k_integers(raw).astype(np.float32)
    return (scale[:, :, None] * q - minimum[:, :, None]).reshape(-1, 256)


def _decode_q5_k(raw: np.ndarray) -> np.ndarray:
    scale, minimum = _two_level(raw, 4)
    q = _q5_k_integers(raw).astype(np.float32)
    return (scale[:, :, None] * q - minimum[:, :, None]).reshape(-1, 256)


def _crumbs(raw: np.ndarray) -> np.ndarray:
    """64 bytes a block -> 2-bit numbers uint8 [blocks, 8, 32] (Q2_K, Q3_K): half, then shift, then byte."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    return ((raw.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)


def _decode_q2_k(raw: np.ndarray) -> np.ndarray:
    q = _crumbs(raw[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    scale = _fp16(raw, 80) * (raw[:, :16] & 0x0F).astype(np.float32)
    minimum = _fp16(raw, 82) * (raw[:, :16] >> 4).astype(np.float32)
    return (scale[:, :, None] * q - minimum[:, :, None]).reshape(-1, 256)


def _decode_q3_k(raw: np.ndarray) -> np.ndarray:
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    high = (raw[:, None, :32] >> shifts) & 1
    q = (_crumbs(raw[:, 32:96]).astype(np.int8) - ((high ^ 1) << 2).astype(np.int8)).reshape(-1, 16, 16)
    low_bits = _nibbles(raw[:, 96:104])
    high_bits = ((raw[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[None, :, None]) & 3).reshape(
        -1, 16
    )
    scales = (low_bits | (high_bits << 4)).astype(np.float32) - 32
    scale = _fp16(raw, 108) * scales
    return (scale[:, :, None] * q.astype(np.float32)).reshape(-1, 256)


def _decode_q6_k(raw: np.ndarray) -> np.ndarray:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = _crumbs(raw[:, 128:192])
    q = (low | (high << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    scale = _fp16(raw, 208) * raw[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[:, :, None] * q).reshape(-1, 256)


# The sixteen levels of the IQ4 formats (part of the file format).
_IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_xs_scales(raw: np.ndarray) -> np.ndarray:
    """float32 [blocks, 8]."""
    low = np.stack([raw[:, 4:8] & 0x0F, raw[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    pairs = np.ascontiguousarray(raw[:, 2:4]).view("<u2")
    high = ((pairs >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.uint8)
    return _fp16(raw, 0) * ((low | (high << 4)).astype(np.float32) - 32)


def _iq4_xs_integers(raw: np.ndarray) -> np.ndarray:
    """int8 [blocks, 8, 32]."""
    return _IQ4_LEVELS[_nibbles(raw[:, 8:136].reshape(-1, 8, 16))]


def _decode_iq4_nl(raw: np.ndarray) -> np.ndarray:
    return _fp16(raw, 0) * _IQ4_LEVELS[_nibbles(raw[:, 2:])].astype(np.float32)


def _decode_iq4_xs(raw: np.ndarray) -> np.ndarray:
    q = _iq4_xs_integers(raw).astype(np.float32)
    return (_iq4_xs_scales(raw)[:, :, None] * q).reshape(-1, 256)


FORMATS: dict[str, BlockFormat] = {
    "f32": BlockFormat(1, 4, _decode_f32),
    "f16": BlockFormat(1, 2, _decode_f16),
    "bf16": BlockFormat(1, 2, _decode_bf16),
    "q4_0": BlockFormat(32, 18, _decode_q4_0),
    "q4_1": BlockFormat(32, 20, _decode_q4_1),
    "q5_0": BlockFormat(32, 22, _decode_q5_0),
    "q5_1": BlockFormat(32, 24, _decode_q5_1),
    "q8_0": BlockFormat(32, 34, _decode_q8_0),
    "q2_k": BlockFormat(256, 84, _decode_q2_k),
    "q3_k": BlockFormat(256, 110, _decode_q3_k),
    "q4_k": BlockFormat(256, 144, _decode_q4_k),
    "q5_k": BlockFormat(256, 176, _decode_q5_k),
    "q6_k": BlockFormat(256, 210, _decode_q6_k),
    "iq4_nl": BlockFormat(32, 18, _decode_iq4_nl),
    "iq4_xs": BlockFormat(256, 136, _decode_iq4_xs),
}
TILE_FORMATS = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")


def format_nbytes(fmt: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of `shape` in `fmt`; a ValueError if its rows are no whole blocks."""
    spec = FORMATS[fmt]
    if shape and shape[-1] % spec.block:
        raise ValueError(f"a row of {shape[-1]} values is not a whole number of {fmt} blocks of {spec.block}")
    return math.prod(shape) // spec.block * spec.nbytes


def dequantize(fmt: str, data: np.ndarray) -> np.ndarray:
    """All values of a flat uint8 array, as float32 (flat)."""
    spec = FORMATS[fmt]
    blocks = data.reshape(-1, spec.nbytes)
    out = np.empty((len(blocks), spec.block), np.float32)
    step = max(1, _SLAB_BLOCKS * 32 // spec.block)
    with np.errstate(invalid="ignore", over="ignore"):  # a file's own infinities are passed on, not judged
        for start in range(0, len(blocks), step):
            out[start : start + step] = spec.decode(blocks[start : start + step])
    return out.reshape(-1)


def _pack_nibbles(q: np.ndarray) -> np.ndarray:
    """uint8 [..., 32] below 16 -> [..., 16], as `_nibbles` reads them."""
    return q[..., :16] | (q[..., 16:] << 4)


def _fp16_bytes(values: np.ndarray) -> np.ndarray:
    """float32 [...] -> uint8 [..., 2]."""
    return values.astype("<f2").reshape(*values.shape, 1).view(np.uint8)


def _q4_k_to_q4_1(raw: np.ndarray) -> np.ndarray:
    scale, minimum = _two_level(raw, 4)
    parts = [_fp16_bytes(scale), _fp16_bytes(-minimum), _pack_nibbles(_q4_k_integers(raw))]
    return np.concatenate(parts, axis=2)


def _q5_k_to_q5_1(raw: np.ndarray) -> np.ndarray:
    scale, minimum = _two_level(raw, 4)
    q = _q5_k_integers(raw)
    high = np.packbits(q >> 4, axis=2, bitorder="little")
    return np.concatenate([_fp16_bytes(scale), _fp16_bytes(-minimum), high, _pack_nibbles(q & 0x0F)], axis=2)


def _iq4_nl_to_q8_0(raw: np.ndarray) -> np.ndarray:
    return np.concatenate([raw[:, :2], _IQ4_LEVELS[_nibbles(raw[:, 2:])].view(np.uint8)], axis=1)


def _iq4_xs_to_q8_0(raw: np.ndarray) -> np.ndarray:
    q = _iq4_xs_integers(raw).view(np.uint8)
    return np.concatenate([_fp16_bytes(_iq4_xs_scales(raw)), q], axis=2)


def encode_float(fmt: str, values: np.ndarray) -> np.ndarray:
    """Flat bytes of float32 `values` as f32, f16 or bf16, rounded to nearest, ties to even."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    if fmt == "f32":
        return flat.view(np.uint8)
    if fmt == "f16":
        with np.errstate(over="ignore"):
            return flat.astype("<f2").view(np.uint8)
    bits = flat.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return np.where(np.isnan(flat), np.uint16(0x7FC0), rounded).view(np.uint8)


def quantize_q8_0(values: np.ndarray) -> np.ndarray:
    """float32 [..., 32] -> q8_0 blocks uint8 [..., 34]: scale absmax / 127, rounded to nearest.

    The integers are chosen for the scale as fp16 holds it, so that its rounding is mostly made up for.
    """
    scale = (np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
    stored = scale.astype(np.float32)
    inverse = np.divide(1, stored, out=np.zeros_like(stored), where=stored > 0)
    q = np.clip(np.rint(values * inverse), -127, 127).astype(np.int8)
    return np.concatenate([_fp16_bytes(scale[..., 0]), q.view(np.uint8)], axis=-1)


def _through_q8_0(decode: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda raw: quantize_q8_0(decode(raw).reshape(-1, 32))


_RECODERS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "q4_k": ("q4_1", _q4_k_to_q4_1),
    "q5_k": ("q5_1", _q5_k_to_q5_1),
    "iq4_nl": ("q8_0", _iq4_nl_to_q8_0),
    "iq4_xs": ("q8_0", _iq4_xs_to_q8_0),
    "q2_k": ("q8_0", _through_q8_0(_decode_q2_k)),
    "q3_k": ("q8_0", _through_q8_0(_decode_q3_k)),
    "q6_k": ("q8_0", _through_q8_0(_decode_q6_k)),
}


def to_tile_format(fmt: str, data: np.ndarray) -> tuple[str, np.ndarray]:
    """The tensor in a tile format: as it is, or re-coded (errors: see the module's head).

    Scales too large for fp16 raise ValueError.
    """
    if fmt in TILE_FORMATS:
        return fmt, data
    target, recode = _RECODERS[fmt]
    spec = FORMATS[fmt]
    blocks = data.reshape(-1, spec.nbytes)
    out_spec = FORMATS[target]
    out = np.empty((len(blocks) * spec.block // out_spec.block, out_spec.nbytes), np.uint8)
    step = max(1, _SLAB_BLOCKS * 32 // spec.block)
    ratio = spec.block // out_spec.block
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            part = recode(blocks[start : start + step]).reshape(-1, out_spec.nbytes)
            out[start * ratio : start * ratio + len(part)] = part
    num_scales = 2 if target in ("q4_1", "q5_1") else 1
    scales = np.ascontiguousarray(out[:, : 2 * num_scales]).view("<f2")
    if not np.isfinite(scales).all():
        raise ValueError(f"a {fmt} scale is not finite or too large for the fp16 scale of {target}")
    return target, out.reshape(-1)
