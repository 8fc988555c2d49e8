"""The ops in plain PyTorch, executed as the model function calls them: slow, obvious, any float type.

In float64 on the CPU it is the oracle of the tests; on another device it is what faster kernels there
are held against. It keeps its own paged cache and runs the very same batches as the native backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor as TorchTensor

from outrider.backends import BuildFn, ModelOutput, StepBatch, Tensor
from outrider.backends.ops import RopeSpec, Weight
from outrider.backends.recording import RecordingOps

DTYPES = {"float32": torch.float32, "float64": torch.float64}
KV_CACHE_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


class TorchBackend:
    """Computes in `dtype`, float32 or float64, on `device`. Equal inputs give equal results only up to
    rounding: a row may depend on the rows beside it in the last bits."""

    def __init__(
        self, *, num_threads: int | None = None, dtype: str = "float32", device: str = "cpu"
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype of backend 'torch' must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.dtype = DTYPES[dtype]
        self.device = torch.device(device)

    def weight(self, tensors: Sequence[Tensor], quantization: str | None) -> Weight:
        """`tensors` stacked by rows, in floats: exactly what their file says, never quantised further."""
        if quantization is not None:
            raise ValueError(
                f"backend 'torch' computes in floats and cannot apply quantization {quantization!r}; "
                "leave --quantization out or use --backend native"
            )
        rows = np.concatenate([tensor.to_float32().reshape(tensor.shape) for tensor in tensors])
        return torch.from_numpy(rows).to(self.device, self.dtype)

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
    ) -> TorchExecutable:
        """See `Backend.compile`. The model function is recorded once, to learn the cache's shape; then it
        runs at every step."""
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}"
            )
        if hidden not in (None, "pre_norm", "post_norm"):
            raise ValueError(f"hidden must be pre_norm or post_norm, got {hidden!r}")
        recorded = RecordingOps(lambda weight: tuple(weight.shape))
        build_fn(recorded, config, weights)
        shapes = {
            node.params["layer"]: (node.params["kv_heads"], node.params["head_dim"])
            for node in recorded.nodes
            if node.op == "append_attention"
        }
        cache = TorchKVCache(shapes, num_blocks, block_size, KV_CACHE_DTYPES[kv_cache_dtype], self.device)
        max_position = min(max_model_len or config.max_position_embeddings, num_blocks * block_size)
        return TorchExecutable(
            build_fn, config, weights, cache, self.dtype, (max_rows, max_logits_rows, max_position), hidden
        )


class TorchKVCache:
    """Per layer keys and values [num_blocks * block_size, kv_heads, head_dim], addressed by slot."""

    def __init__(
        self,
        shapes: Mapping[int, tuple[int, int]],  # layer -> (kv_heads, head_dim)
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        slots = num_blocks * block_size
        self.keys, self.values = (
            {layer: torch.empty(slots, *shape, dtype=dtype, device=device) for layer, shape in shapes.items()}
            for _ in range(2)
        )
        values_per_slot = 2 * sum(heads * width for heads, width in shapes.values())
        self.bytes_per_block = block_size * values_per_slot * dtype.itemsize


class TorchExecutable:
    """A model function with its weights and cache. One caller at a time."""

    def __init__(
        self,
        build_fn: BuildFn,
        config: Any,
        weights: Mapping[str, Weight],
        cache: TorchKVCache,
        dtype: torch.dtype,
        limits: tuple[int, int, int],  # rows, rows of logits, positions
        hidden: str | None,
    ) -> None:
        self.cache = cache
        self.kv_bytes_per_block = cache.bytes_per_block
        self._build = build_fn
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._limits = limits
        self._hidden = hidden

    def run(self, batch: StepBatch, hidden: np.ndarray | None = None) -> ModelOutput:
        """One step. ValueError, with the cache as it was, if the batch is out of range."""
        _check(batch, self.cache, self._limits)
        with torch.inference_mode():
            ops = TorchOps(batch, self.cache, self._dtype, hidden)
            logits = self._build(ops, self._config, self._weights)
            own = ops.hidden(self._hidden) if self._hidden else None
        return ModelOutput(self._to_numpy(logits), None if own is None else self._to_numpy(own))

    def move_slots(self, from_slots: np.ndarray, to_slots: np.ndarray) -> None:
        """See `Executable.move_slots`."""
        for layers in (self.cache.keys, self.cache.values):
            for stored in layers.values():
                for source, target in zip(from_slots.tolist(), to_slots.tolist(), strict=True):
                    stored[target] = stored[source]

    def run_exact(self, batch: StepBatch) -> np.ndarray:
        """The logits of one step in the backend's own type, not rounded to float32."""
        _check(batch, self.cache, self._limits)
        with torch.inference_mode():
            logits: TorchTensor = self._build(
                TorchOps(batch, self.cache, self._dtype), self._config, self._weights
            )
        return logits.cpu().numpy()

    def _to_numpy(self, x: TorchTensor) -> np.ndarray:
        return x.to("cpu", torch.float32).numpy()


def _check(batch: StepBatch, cache: TorchKVCache, limits: tuple[int, int, int]) -> None:
    max_rows, max_logits_rows, max_position = limits
    num_rows = len(batch.token_ids)

    def require(ok: bool | np.bool_, what: str) -> None:
        if not ok:
            raise ValueError(f"step out of range: {what}")

    require(num_rows <= max_rows, f"{num_rows} rows, at most {max_rows}")
    require(len(batch.logits_indices) <= max_logits_rows, f"at most {max_logits_rows} rows of logits")
    require(len(batch.positions) == len(batch.slot_mapping) == num_rows, "one position and slot a row")
    require(batch.query_start_loc[-1] == num_rows, "query_start_loc must end with the number of rows")
    require(len(batch.parents) in (0, num_rows), "one parent a row, or none")
    for row, parent in enumerate(batch.parents.tolist()):
        require(-1 <= parent < row, "a parent must be -1 or an earlier row")
    for name, values, limit in (
        ("positions", batch.positions, max_position),
        ("slot_mapping", batch.slot_mapping, cache.num_blocks * cache.block_size),
        ("block_tables", batch.block_tables, cache.num_blocks),
        ("logits_indices", batch.logits_indices, num_rows),
    ):
        require(np.all((values >= 0) & (values < limit)), f"{name} must be from 0 to {limit - 1}")


class TorchOps:
    """`Ops` that compute at once, for the rows of one batch."""

    def __init__(
        self, batch: StepBatch, cache: TorchKVCache, dtype: torch.dtype, hidden: np.ndarray | None = None
    ) -> None:
        self._batch = batch
        self._hidden = hidden
        self._cache = cache
        self._dtype = dtype
        # The last of each: what it read, what it gave, and how to do it again to other rows.
        self._norm: tuple[TorchTensor, TorchTensor, Callable[[TorchTensor], TorchTensor]] | None = None
        self._gather: tuple[TorchTensor, TorchTensor] | None = None
        self._linear_input: TorchTensor | None = None

    def hidden(self, which: str) -> TorchTensor:
        """All rows before or after the norm that the last linear read, gathered or not."""
        assert self._linear_input is not None
        if self._norm is None or self._norm[1] is not self._ungathered(self._linear_input):
            raise ValueError(f"hidden={which!r} needs a norm before the head")
        rows = self._ungathered(self._norm[0])
        return rows if which == "pre_norm" else self._norm[2](rows)

    def _ungathered(self, x: TorchTensor) -> TorchTensor:
        return self._gather[0] if self._gather is not None and self._gather[1] is x else x

    def hidden_rows(self, width: int) -> TorchTensor:
        shape = (len(self._batch.token_ids), width)
        if self._hidden is None or self._hidden.shape != shape:
            raise ValueError(f"step out of range: this model needs hidden states {list(shape)}")
        return torch.from_numpy(self._hidden).to(self._cache.device, self._dtype)

    def embedding(self, weight: TorchTensor) -> TorchTensor:
        ids = self._indices(self._batch.token_ids, weight.device)
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= len(weight)):
            raise ValueError(f"step out of range: token_ids must be from 0 to {len(weight) - 1}")
        return weight[ids]

    def linear(self, x: TorchTensor, weight: TorchTensor, bias: TorchTensor | None = None) -> TorchTensor:
        self._linear_input = x
        return F.linear(x, weight, bias)

    def rms_norm(self, x: TorchTensor, weight: TorchTensor, eps: float, num_heads: int = 1) -> TorchTensor:
        def norm(x: TorchTensor) -> TorchTensor:
            heads = x.unflatten(-1, (num_heads, -1))
            scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
            return (heads * scale * weight).flatten(-2)

        out = norm(x)
        self._norm = (x, out, norm)
        return out

    def layer_norm(
        self, x: TorchTensor, weight: TorchTensor, bias: TorchTensor | None, eps: float
    ) -> TorchTensor:
        def norm(x: TorchTensor) -> TorchTensor:
            return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

        out = norm(x)
        self._norm = (x, out, norm)
        return out

    def rope(self, x: TorchTensor, spec: RopeSpec, num_heads: int) -> TorchTensor:
        # Angles in float64 whatever the type: late positions have large ones.
        inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float64)
        angles = torch.from_numpy(self._batch.positions).to(torch.float64)[:, None] * inv_freq
        cos, sin = (
            (function(angles) * spec.attention_factor).to(x.device, self._dtype)[:, None]
            for function in (torch.cos, torch.sin)
        )
        heads = x.unflatten(-1, (num_heads, -1))
        rotated, rest = heads[..., : spec.rotary_dim], heads[..., spec.rotary_dim :]
        if spec.layout == "interleaved":
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = rotated.chunk(2, -1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((rotated, rest), -1).flatten(-2)

    def append_attention(
        self,
        q: TorchTensor,
        k: TorchTensor,
        v: TorchTensor,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
    ) -> TorchTensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        slots = self._indices(self._batch.slot_mapping, q.device)
        keys[slots] = k.unflatten(-1, (num_kv_heads, head_dim)).to(keys.dtype)
        values[slots] = v.unflatten(-1, (num_kv_heads, head_dim)).to(values.dtype)
        # Heads of a group lie side by side: [rows, kv_heads, group, head_dim].
        queries = q.unflatten(-1, (num_kv_heads, num_heads // num_kv_heads, head_dim))
        out = torch.empty_like(queries)
        for rows, context_slots in self._contexts():
            positions = self._indices(self._batch.positions[rows], q.device)
            context = self._indices(context_slots, q.device)
            out[rows] = self._attend(queries[rows], keys[context], values[context], positions, scale, window)
        return out.flatten(1)

    def _contexts(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Runs of rows, and the slot where each of them finds every position that it may see."""
        batch, block_size = self._batch, self._cache.block_size
        for request, (begin, end) in enumerate(itertools.pairwise(batch.query_start_loc.tolist())):
            at = np.arange(batch.seq_lens[request])
            slots = batch.block_tables[request, at // block_size] * block_size + at % block_size
            if not len(batch.parents):
                yield slice(begin, end), slots
                continue
            for row in range(begin, end):  # each has a path of its own
                own, node = slots.copy(), row
                while node >= 0:
                    own[batch.positions[node]] = batch.slot_mapping[node]
                    node = batch.parents[node]
                yield slice(row, row + 1), own[: batch.positions[row] + 1]

    def _attend(
        self,
        queries: TorchTensor,  # [rows, kv_heads, group, head_dim]
        keys: TorchTensor,  # [context, kv_heads, head_dim]
        values: TorchTensor,
        positions: TorchTensor,
        scale: float,
        window: int | None,
    ) -> TorchTensor:
        keys, values = keys.to(self._dtype), values.to(self._dtype)
        scores = torch.einsum("rkgd,ckd->rkgc", queries, keys) * scale
        at = torch.arange(len(keys), device=keys.device)
        hidden = at > positions[:, None]
        if window:
            hidden |= at <= positions[:, None] - window
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        return torch.einsum("rkgc,ckd->rkgd", scores.softmax(-1), values)

    def append_cache(
        self, k: TorchTensor, v: TorchTensor, *, layer: int, num_kv_heads: int, head_dim: int
    ) -> TorchTensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        slots = self._indices(self._batch.slot_mapping, k.device)
        keys[slots] = k.unflatten(-1, (num_kv_heads, head_dim)).to(keys.dtype)
        values[slots] = v.unflatten(-1, (num_kv_heads, head_dim)).to(values.dtype)
        return k

    def silu_mul(self, gate: TorchTensor, up: TorchTensor) -> TorchTensor:
        return F.silu(gate) * up

    def gelu_mul(self, gate: TorchTensor, up: TorchTensor) -> TorchTensor:
        return F.gelu(gate, approximate="tanh") * up

    def add(self, a: TorchTensor, b: TorchTensor) -> TorchTensor:
        return a + b

    def split(self, x: TorchTensor, widths: Sequence[int]) -> list[TorchTensor]:
        return list(x.split(list(widths), -1))

    def gather_rows(self, x: TorchTensor) -> TorchTensor:
        out = x[self._indices(self._batch.logits_indices, x.device)]
        self._gather = (x, out)
        return out

    @staticmethod
    def _indices(values: np.ndarray, device: torch.device) -> TorchTensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)
