"""Rotary frequencies: the base, and what long-context scalings make of them.

Scaling is applied here, once, so that a backend only ever multiplies a position by `inv_freq`.
Frequencies are rounded to float32, as the models were trained with.

`dynamic` (NTK) scaling lets the base grow with the length of the text, so a key's rotation would depend
on tokens that come later. That cannot be cached, and would break the rule that a token depends on its
prefix alone; the base is therefore fixed at its value for the full extended context
(max_position_embeddings * factor).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.backends.ops import RopeSpec

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_spec(
    theta: float, rotary_dim: int, scaling: Mapping[str, Any], max_position: int, where: str
) -> RopeSpec:
    """The RopeSpec of `scaling` (the keys of Hugging Face's rope_parameters; empty: none).

    `max_position` is the model's max_position_embeddings; `where` begins the error messages.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            spec = _scaled(theta, rotary_dim, scaling, max_position, where)
    except OverflowError:
        spec = None
    if spec is None or not np.isfinite(spec.inv_freq).all() or not math.isfinite(spec.attention_factor):
        raise ValueError(
            f"{where}: rope_theta {theta} with scaling {dict(scaling)} gives infinite frequencies"
        )
    return spec


def _scaled(
    theta: float, rotary_dim: int, scaling: Mapping[str, Any], max_position: int, where: str
) -> RopeSpec:
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"{where}: rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"{where}: the rotary dimension must be even and at least 2, got {rotary_dim}")
    theta = _positive(theta, "rope_theta", where)
    if kind == "default":
        return _spec(_frequencies(theta, rotary_dim), rotary_dim)
    if kind == "yarn":
        return _yarn(theta, rotary_dim, scaling, max_position, where)
    factor = _number(scaling, "factor", None, where)
    if kind == "linear":
        return _spec(_frequencies(theta, rotary_dim) / factor, rotary_dim)
    if kind == "dynamic":
        if rotary_dim < 4:
            raise ValueError(f"{where}: dynamic rope scaling needs a rotary dimension of at least 4")
        extended = factor * factor - (factor - 1)  # the growth at max_position * factor
        base = theta * max(extended, 1.0) ** (rotary_dim / (rotary_dim - 2))
        return _spec(_frequencies(base, rotary_dim), rotary_dim)
    return _llama3(theta, rotary_dim, factor, scaling, max_position, where)


def divide_frequencies(spec: RopeSpec, divisors: np.ndarray) -> RopeSpec:
    """`spec` with each frequency divided (GGUF's rope_freqs tensor holds llama3 scaling in this form)."""
    return _spec(
        np.array(spec.inv_freq) / divisors.astype(np.float64), spec.rotary_dim, spec.attention_factor
    )


def extended_context(scaling: Mapping[str, Any], max_position: int) -> int:
    """The context that a checkpoint's max_position_embeddings stands for under its scaling."""
    if str(scaling.get("rope_type", scaling.get("type"))) == "dynamic":
        return int(max_position * float(scaling.get("factor", 1.0)))
    return max_position


def _spec(inv_freq: np.ndarray, rotary_dim: int, attention_factor: float = 1.0) -> RopeSpec:
    rounded = tuple(float(value) for value in inv_freq.astype(np.float32))
    return RopeSpec(inv_freq=rounded, rotary_dim=rotary_dim, attention_factor=attention_factor)


def _frequencies(theta: float, rotary_dim: int) -> np.ndarray:
    return theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def _positive(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{where}: {key} must be a positive number, got {value!r}")
    return float(value)


def _number(scaling: Mapping[str, Any], key: str, default: float | None, where: str) -> float:
    value = scaling.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{where}: rope scaling {dict(scaling)} lacks {key!r}")
        return default
    return _positive(value, f"rope scaling {key}", where)


def _llama3(
    theta: float, rotary_dim: int, factor: float, scaling: Mapping[str, Any], max_position: int, where: str
) -> RopeSpec:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    low = _number(scaling, "low_freq_factor", None, where)
    high = _number(scaling, "high_freq_factor", None, where)
    original = _number(scaling, "original_max_position_embeddings", max_position, where)
    if high <= low:
        raise ValueError(f"{where}: rope scaling high_freq_factor {high} must exceed low_freq_factor {low}")
    inv_freq = _frequencies(theta, rotary_dim)
    turns = original * inv_freq / (2 * math.pi)  # full turns within the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return _spec(kept * inv_freq + (1 - kept) * inv_freq / factor, rotary_dim)


def _yarn(
    theta: float, rotary_dim: int, scaling: Mapping[str, Any], max_position: int, where: str
) -> RopeSpec:
    """Dimensions that turn often are kept, those that turn seldom stretched, with a linear ramp between."""
    original = _number(scaling, "original_max_position_embeddings", max_position, where)
    factor = _number(scaling, "factor", max_position / original, where)
    if theta <= 1:
        raise ValueError(f"{where}: yarn rope scaling needs a rope_theta above 1, got {theta}")

    def dimension_of(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension_of(_number(scaling, "beta_fast", 32.0, where))
    last = dimension_of(_number(scaling, "beta_slow", 1.0, where))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    ramp = (np.arange(rotary_dim // 2) - first) / (last - first if last != first else 0.001)
    stretched = np.clip(ramp, 0, 1)
    inv_freq = _frequencies(theta, rotary_dim)
    return _spec(
        (1 - stretched) * inv_freq + stretched * inv_freq / factor,
        rotary_dim,
        _yarn_attention_factor(scaling, factor, where),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float, where: str) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor", None, where)

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        numerator = _number(scaling, "mscale", None, where)
        return grown(numerator) / grown(_number(scaling, "mscale_all_dim", None, where))
    return grown(1.0)
