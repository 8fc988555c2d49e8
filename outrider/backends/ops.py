"""The ops that a model is written in.

A model is a Python function over these ops on opaque `Array` handles; it never does arithmetic itself.
A backend gives them meaning: `native` records the calls once as a program of C++ kernels, `torch`
executes them (float32 or float64: the oracle of the tests).

Rows are the tokens of a step, [num_rows, width], in float32 on every backend unless it says otherwise.
The value of an output row depends on that row of the inputs alone (and, for attention, on the cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Array = Any  # opaque: belongs to the backend
Weight = Any  # opaque: what the backend made of a checkpoint tensor


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: `inv_freq` [rotary_dim / 2] radians a position (scaling already applied).

    `layout` "half" pairs (i, i + rotary_dim/2), "interleaved" pairs (2i, 2i+1); dimensions past
    `rotary_dim` pass through. cos and sin are multiplied by `attention_factor` (YaRN).
    """

    inv_freq: tuple[float, ...]
    rotary_dim: int
    layout: str = "half"
    attention_factor: float = 1.0


class Ops(Protocol):
    """One backend's ops. `Weight` handles come from the backend's `weight()`."""

    def embedding(self, weight: Weight) -> Array:
        """Rows of `weight` [vocab, hidden] for the step's token ids -> [rows, hidden]."""

    def hidden_rows(self, width: int) -> Array:
        """The hidden states that are handed in with the step, one for each row -> [rows, width]."""

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        """x [rows, k] times weight [n, k] transposed, plus bias [n] -> [rows, n]."""

    def rms_norm(self, x: Array, weight: Weight, eps: float, num_heads: int = 1) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight, over each of `num_heads` equal parts of a row."""

    def layer_norm(self, x: Array, weight: Weight, bias: Weight | None, eps: float) -> Array:
        """(x - mean) / sqrt(var + eps) * weight + bias over a row."""

    def rope(self, x: Array, spec: RopeSpec, num_heads: int) -> Array:
        """Rotate each head of x [rows, num_heads * head_dim] by its row's position."""

    def append_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
    ) -> Array:
        """Write k and v to the step's slots, then let every row attend to positions <= its own
        (and > own - window) of its request -> [rows, num_heads * head_dim]."""

    def append_cache(self, k: Array, v: Array, *, layer: int, num_kv_heads: int, head_dim: int) -> Array:
        """Only write k and v to the step's slots. What it returns must not be read."""

    def silu_mul(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up."""

    def gelu_mul(self, gate: Array, up: Array) -> Array:
        """gelu(gate, tanh approximation) * up."""

    def add(self, a: Array, b: Array) -> Array:
        """a + b."""

    def split(self, x: Array, widths: Sequence[int]) -> list[Array]:
        """Columns of x in parts of the given widths (views)."""

    def gather_rows(self, x: Array) -> Array:
        """The rows whose logits are needed (`Batch.logits_indices`)."""
