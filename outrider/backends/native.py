"""The CPU backend: a model function becomes a program of C++ kernels, run by one call a step.

Results depend neither on the number of threads nor on what was fused, nor on the rows of a step beside
a row: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

import outrider._native as _native
from outrider.backends import BuildFn, ModelOutput, StepBatch, Tensor
from outrider.backends.fusion import GATED, fuse
from outrider.backends.memory import assign_storage
from outrider.backends.ops import RopeSpec, Weight
from outrider.backends.recording import Graph, Node, RecordingOps, View, hidden_view

FLOAT_FORMATS = ("f32", "f16", "bf16")
QUANTIZATIONS = ("wint4", "wint8")
KV_CACHE_BYTES = {"f16": 2, "bf16": 2, "f32": 4}
_GROUP = 32  # inputs that share a scale in wint4 and wint8
_OUTER = ("embed", "head")  # what wint4 keeps in 8 bits
_WEIGHT = {"linear": "weight", "embedding": "table"}  # the parameter that is a matrix


class NativeWeight:
    """A matrix on its way into the kernels' layout: tensors stacked by rows, packed when a program is
    compiled, because only then is it known whether gate and up lie interleaved."""

    def __init__(self, tensors: Sequence[Tensor], quantization: str | None) -> None:
        widths = {tensor.shape[1] for tensor in tensors}
        if len(widths) != 1:
            raise ValueError(f"cannot stack {[t.name for t in tensors]}: shapes {[t.shape for t in tensors]}")
        self.name = "+".join(tensor.name for tensor in tensors)
        self.heights = [tensor.shape[0] for tensor in tensors]
        self.shape = (sum(self.heights), widths.pop())
        self._tensors: list[Tensor] | None = list(tensors)
        self._plans = [_packed_format(tensor, quantization) for tensor in tensors]
        self._packed: tuple[bool, list[_native.PackedWeight]] | None = None

    @property
    def is_pair(self) -> bool:
        """Whether it is two tensors that can be interleaved."""
        return len(self.heights) == 2 and len(set(self.heights)) == 1 and len(set(self._plans)) == 1

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def pack(self, interleaved: bool = False) -> list[_native.PackedWeight]:
        """Weights that together have all rows in order: one, unless tensors differ in format.

        The checkpoint's tensors are let go; packing again must ask for the same layout.
        """
        if self._packed is None:
            assert self._tensors is not None
            parts = [_pack(*pair) for pair in zip(self._tensors, self._plans, strict=True)]
            if interleaved:
                packed = [_native.PackedWeight.interleave(*parts)]
            else:
                runs = groupby(zip(parts, self._plans, strict=True), key=lambda pair: pair[1])
                packed = [_concat([part for part, _ in run]) for _, run in runs]
            self._packed, self._tensors = (interleaved, packed), None
        if self._packed[0] != interleaved:
            raise ValueError(
                f"weight {self.name!r} is already packed in another layout; make a second handle"
            )
        return self._packed[1]


def _packed_format(tensor: Tensor, quantization: str | None) -> str:
    """What a tensor becomes: its own format, or wint4 or wint8 if it is still in floats."""
    if quantization is None or tensor.format not in FLOAT_FORMATS:
        return tensor.format
    return "wint8" if tensor.name in _OUTER else quantization


def _pack(tensor: Tensor, plan: str) -> _native.PackedWeight:
    n, k = tensor.shape
    if plan == tensor.format:
        return _native.PackedWeight.pack(
            plan, np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8), n, k
        )
    bits = {"wint4": 4, "wint8": 8}[plan]
    return _native.PackedWeight.quantize(tensor.to_float32().reshape(n, k), bits, _GROUP, bits == 4)


def _concat(parts: list[_native.PackedWeight]) -> _native.PackedWeight:
    return parts[0] if len(parts) == 1 else _native.PackedWeight.concat(parts)


class NativeBackend:
    """`num_threads` is that of the process: the native pool is shared."""

    def __init__(self, *, num_threads: int | None = None, fusion: bool = True) -> None:
        if num_threads is not None:
            _native.set_num_threads(num_threads)
        self.fusion = fusion

    def weight(self, tensors: Sequence[Tensor], quantization: str | None) -> Weight:
        """A handle for `tensors` stacked by rows: a NativeWeight, or float32 for vectors.

        `quantization` wint4 or wint8 applies to matrices that the checkpoint holds in floats.
        """
        if quantization is not None and quantization not in QUANTIZATIONS:
            raise ValueError(
                f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}; "
                "set it with --quantization"
            )
        if all(len(tensor.shape) == 1 for tensor in tensors):
            return np.concatenate([tensor.to_float32() for tensor in tensors]).astype(np.float32, copy=False)
        return NativeWeight(tensors, quantization)

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
    ) -> NativeExecutable:
        """See `Backend.compile`. Packs the weights that the model uses, on all threads."""
        ops = RecordingOps(lambda weight: weight.shape)
        logits = build_fn(ops, config, weights)
        graph = Graph(ops.nodes, [logits])
        if hidden is not None:
            graph.outputs.append(hidden_view(graph, logits, hidden))
        if self.fusion:
            fuse(graph, lambda weight: weight.is_pair)
        graph.remove_unused()
        pack_weights(graph)
        max_position = min(max_model_len or config.max_position_embeddings, num_blocks * block_size)
        cache = _make_cache(graph, num_blocks, block_size, kv_cache_dtype)
        return _emit(graph, cache, max_rows, max_logits_rows, max_position)


def compile_beside(
    other: NativeExecutable, build_fn: BuildFn, config: Any, weights: Mapping[str, Weight], *, max_rows: int,
    max_position: int,
) -> _native.Program:  # fmt: skip
    """A program over the cache of a compiled one, for what it leaves there: it has no output."""
    ops = RecordingOps(lambda weight: weight.shape)
    graph = Graph(ops.nodes, [build_fn(ops, config, weights)])
    fuse(graph, lambda weight: weight.is_pair)
    graph.remove_unused()
    pack_weights(graph)
    return _emit(graph, other.cache, max_rows, 1, max_position).program


def pack_weights(graph: Graph) -> None:
    """Pack every weight of the graph, several at a time, lay them next to each other in order of use, and
    put them in its nodes: in a linear a list, since a weight whose tensors differ in format takes several
    kernels."""
    nodes = [node for op in ("linear", "embedding") for node in graph.nodes if node.op == op]
    layouts: dict[NativeWeight, bool] = {}
    for node in nodes:
        layouts.setdefault(node.params[_WEIGHT[node.op]], node.params.get("epilogue") in GATED)
    new = [weight for weight in layouts if not weight.is_packed]
    with ThreadPoolExecutor(_native.num_threads()) as pool:
        list(pool.map(lambda weight: weight.pack(layouts[weight]), new))
    _native.settle([part for weight in new for part in weight.pack(layouts[weight])])
    for node in nodes:
        weight = node.params[_WEIGHT[node.op]]
        packed = weight.pack(node.params.get("epilogue") in GATED)
        node.params[_WEIGHT[node.op]] = packed if node.op == "linear" else packed[0]


def rope_table(spec: RopeSpec, max_position: int) -> _native.RopeTable:
    """cos and sin of every position below `max_position`, rounded once from float64."""
    angles = np.outer(np.arange(max_position, dtype=np.float64), np.asarray(spec.inv_freq, np.float64))
    cos, sin = (np.ascontiguousarray(f(angles) * spec.attention_factor, np.float32) for f in (np.cos, np.sin))
    return _native.RopeTable(cos, sin, spec.layout)


def _make_cache(graph: Graph, num_blocks: int, block_size: int, dtype: str) -> _native.KVCache | None:
    """A cache for the attention nodes, which must agree on heads; None if there are none."""
    if dtype not in KV_CACHE_BYTES:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_BYTES)}, got {dtype!r}")
    nodes = [node for node in graph.nodes if node.op == "append_attention"]
    shapes = {(node.params["kv_heads"], node.params["head_dim"]) for node in nodes}
    if not nodes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"all layers need the same (kv heads, head size), got {sorted(shapes)}")
    num_layers = 1 + max(node.params["layer"] for node in nodes)
    return _native.KVCache(num_layers, num_blocks, block_size, *shapes.pop(), dtype)


def _emit(
    graph: Graph, cache: _native.KVCache | None, max_rows: int, max_logits_rows: int, max_position: int
) -> NativeExecutable:
    storage = assign_storage(graph, max_rows, max_logits_rows)
    program = _native.Program(max_rows, max_logits_rows, storage.sizes, cache)
    buffers = {
        value: program.add_buffer(value.width, place, value.gathered)
        for value, place in storage.places.items()
    }
    tables: dict[RopeSpec, _native.RopeTable] = {}

    def address(view: View) -> tuple[int, int, int]:
        return buffers[view.value], view.column, view.width

    def argument(value: Any) -> Any:
        if isinstance(value, RopeSpec):
            if value not in tables:
                tables[value] = rope_table(value, max_position)
            return tables[value]
        return value

    for node in graph.nodes:
        params = {name: argument(value) for name, value in node.params.items()}
        inputs = [address(view) for view in node.inputs]
        for out, call in _calls(node, params):
            getattr(program, node.op)(address(out), *inputs, **call)
    return NativeExecutable(program, cache, [buffers[view.value] for view in graph.outputs])


def _calls(node: Node, params: dict[str, Any]) -> Iterator[tuple[View, dict[str, Any]]]:
    """The instructions of a node: the columns that each writes, and its parameters."""
    if node.op == "append_attention":
        for name in ("kv_heads", "head_dim"):
            del params[name]
    if node.op != "linear":
        yield View(node.out, 0, node.out.width), params
        return
    parts, bias = params.pop("weight"), params.pop("bias")
    column = 0
    for part in parts:
        width = part.n if len(parts) > 1 else node.out.width
        part_bias = bias if bias is None or len(parts) == 1 else bias[column : column + width]
        yield View(node.out, column, width), {**params, "weight": part, "bias": part_bias}
        column += width


class NativeExecutable:
    """A program with its cache. One caller at a time."""

    def __init__(self, program: _native.Program, cache: _native.KVCache | None, outputs: list[int]) -> None:
        self.program = program
        self.cache = cache
        self.kv_bytes_per_block = cache.nbytes // cache.num_blocks if cache else 0
        self.outputs = outputs  # the program's buffers of logits and, if asked for, hidden states
        self._outputs: list[NDArray[np.float32]] = [program.array(buffer) for buffer in outputs]

    def run(self, batch: StepBatch, hidden: NDArray[np.float32] | None = None) -> ModelOutput:
        """One step; the next overwrites the arrays returned. ValueError if the batch is out of range."""
        self.program.run(
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables,
            batch.logits_indices,
            batch.parents,
            hidden,
        )
        logits = self._outputs[0][: len(batch.logits_indices)]
        own = self._outputs[1][: len(batch.token_ids)] if len(self._outputs) > 1 else None
        return ModelOutput(logits, own)

    def move_slots(self, from_slots: NDArray[np.int32], to_slots: NDArray[np.int32]) -> None:
        """See `Executable.move_slots`."""
        if self.cache is not None:
            self.cache.move_slots(from_slots, to_slots)
