"""What gives the ops of a model function their meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.backends.ops import Array, Ops, Weight

BACKENDS = ("native", "torch")

BuildFn = Callable[[Ops, Any, Mapping[str, Weight]], Array]
"""A model: (ops, config, weights) -> logits of the gathered rows."""


class Tensor(Protocol):
    """A checkpoint tensor as its file holds it: bytes in `format`, rows of `shape` one after the other."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> str: ...
    @property
    def data(self) -> np.ndarray: ...
    def to_float32(self) -> np.ndarray: ...


class StepBatch(Protocol):
    """The arrays of one step, all int32; `engine.batch.Batch` says what they hold."""

    @property
    def token_ids(self) -> NDArray[np.int32]: ...
    @property
    def positions(self) -> NDArray[np.int32]: ...
    @property
    def slot_mapping(self) -> NDArray[np.int32]: ...
    @property
    def query_start_loc(self) -> NDArray[np.int32]: ...
    @property
    def seq_lens(self) -> NDArray[np.int32]: ...
    @property
    def block_tables(self) -> NDArray[np.int32]: ...
    @property
    def logits_indices(self) -> NDArray[np.int32]: ...
    @property
    def parents(self) -> NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a step computed. Valid until the next step."""

    logits: NDArray[np.float32]  # [num_logits, vocab], a row for each of `logits_indices`
    hidden: NDArray[np.float32] | None = None  # [num_tokens, hidden], if the executable was compiled for it


class Executable(Protocol):
    """A compiled model with its KV cache."""

    kv_bytes_per_block: int

    def run(self, batch: StepBatch, hidden: NDArray[np.float32] | None = None) -> ModelOutput:
        """One step. Raises ValueError, having changed nothing, when the batch is out of range. `hidden`
        [num_tokens, width] is for models that read hidden states."""

    def move_slots(self, from_slots: NDArray[np.int32], to_slots: NDArray[np.int32]) -> None:
        """Copy the keys and values of every layer from slot to slot, one after the other in this order."""


class Backend(Protocol):
    def weight(self, tensors: Sequence[Tensor], quantization: str | None) -> Weight:
        """One handle for `tensors`, fused by rows: a linear weight or embedding when they have two
        dimensions, a vector (norm, bias) when they have one."""

    def compile(
        self,
        build_fn: BuildFn,
        config: Any,
        weights: Mapping[str, Weight],
        *,
        max_rows: int,
        max_logits_rows: int,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: str = "f16",
        max_model_len: int | None = None,
        hidden: str | None = None,
    ) -> Executable:
        """The model as something that runs steps of at most `max_rows` tokens and `max_logits_rows`
        rows of logits. Positions are below `max_model_len` (None: what the config allows). `hidden`
        asks for the hidden states of all rows, before ("pre_norm") or after ("post_norm") the final norm."""


def make_backend(name: str, *, num_threads: int | None = None, **options: Any) -> Backend:
    """The backend called `name`; `num_threads` None: all CPUs that this process may use."""
    if name == "native":
        from outrider.backends.native import NativeBackend

        return NativeBackend(num_threads=num_threads, **options)
    if name == "torch":
        try:
            from outrider.backends.torch_backend import TorchBackend
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "backend 'torch' needs PyTorch: pip install 'outrider[torch]', or use backend 'native'"
            ) from error
        return TorchBackend(num_threads=num_threads, **options)
    raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}; set it with --backend")
