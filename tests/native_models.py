"""Tiny models on the native backend, and steps for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outrider.backends.native import NativeBackend, NativeExecutable
from outrider.backends.ops import RopeSpec
from outrider.models.config import ModelConfig
from outrider.models.llama import build
from outrider.models.registry import tensor_shapes, weight_plan
from outrider.models.tensors import RawTensor

BLOCK_SIZE = 16
NUM_BLOCKS = 24
MAX_ROWS = 64


@dataclass
class StepArrays:
    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    logits_indices: np.ndarray
    parents: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))


def step(*requests: tuple[list[int], list[int], int], logits: list[int] | None = None) -> StepArrays:
    """A batch of requests, each (token ids, block table, position of the first token)."""
    token_ids, positions, slots, starts, lengths = [], [], [], [0], []
    tables = np.zeros((len(requests), max(len(table) for _, table, _ in requests)), np.int32)
    for i, (ids, table, first) in enumerate(requests):
        here = range(first, first + len(ids))
        token_ids += ids
        positions += here
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in here]
        starts.append(len(token_ids))
        lengths.append(first + len(ids))
        tables[i, : len(table)] = table
    rows = list(range(len(token_ids))) if logits is None else logits
    as_ints = [np.array(x, np.int32) for x in (token_ids, positions, slots, starts, lengths)]
    return StepArrays(*as_ints, block_tables=tables, logits_indices=np.array(rows, np.int32))


def tiny_config(**changes: Any) -> ModelConfig:
    head_dim = changes.pop("head_dim", 16)
    rope = RopeSpec(tuple(1e4 ** (-i / (head_dim // 2)) for i in range(head_dim // 2)), head_dim)
    config = ModelConfig(
        architecture="llama", vocab_size=50, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=head_dim, intermediate_size=96, rms_eps=1e-5, rope=rope, max_position_embeddings=4096,
        tie_embeddings=False, attention_bias=False, attention_out_bias=False, qk_norm=False,
        sliding_window=(None, None), eos_token_ids=(0,), bos_token_id=None,
    )  # fmt: skip
    return replace(config, **changes)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, RawTensor]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for names in weight_plan(config).values():
        for name in names:
            shape = tensor_shapes(config)[name]
            values = rng.standard_normal(shape) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.3)
            values += name.endswith("norm")
            data = values.astype(np.float32).reshape(-1).view(np.uint8)
            tensors[name] = RawTensor(name, shape, "f32", data, "random")
    return tensors


def compile_model(
    config: ModelConfig,
    *,
    fusion: bool = True,
    quantization: str | None = None,
    seed: int = 0,
    build_fn: Any = build,
    backend: Any = None,
    **options: Any,
) -> Any:
    backend = backend or NativeBackend(fusion=fusion)
    tensors = random_tensors(config, seed)
    weights = {
        handle: backend.weight([tensors[name] for name in names], quantization)
        for handle, names in weight_plan(config).items()
    }
    limits = dict(max_rows=MAX_ROWS, max_logits_rows=MAX_ROWS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return backend.compile(build_fn, config, weights, **{**limits, **options})


def instructions(executable: NativeExecutable) -> list[str]:
    return [name for name, _ in executable.program.profile()]


TRAFFIC = [
    step(([1, 2, 3, 4, 5, 6, 7], [3, 1], 0), ([9, 8, 7], [5], 0)),
    step(([10], [3, 1], 7), ([11, 12], [5], 3), ([13] * 20, [7, 2], 0), logits=[0, 2, 22]),
    step(([14, 15, 16], [3, 1], 8), logits=[2]),
    step(([17] * 12, [3, 1], 11), ([3], [7, 2], 20), logits=[12, 0, 5]),
]


def outputs(executable: NativeExecutable, batches: list[StepArrays] = TRAFFIC) -> list[bytes]:
    return [executable.run(batch).logits.tobytes() for batch in batches]


CONFIGS = {
    "llama": tiny_config(),
    "tied, biased": tiny_config(tie_embeddings=True, attention_bias=True, attention_out_bias=True),
    "qk_norm, gelu, window": tiny_config(qk_norm=True, hidden_act="gelu_tanh", sliding_window=(5, None)),
    "odd sizes": tiny_config(hidden_size=96, num_heads=3, num_kv_heads=1, head_dim=24, intermediate_size=160),
    "interleaved, partial rope": tiny_config(
        rope=RopeSpec((1.0, 0.3, 0.01, 0.2), 8, layout="interleaved", attention_factor=1.2)
    ),
}
