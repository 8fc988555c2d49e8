"""From a plan to the arrays of one step: the only place that computes positions and slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.scheduler import Plan

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the sampler must know of each row of logits.

    Row r belongs to `states[row_state[r]]` and draws the token at `positions[r]`, as if the drafted
    tokens `prefix_ids[prefix_start[r] : prefix_start[r + 1]]` had been emitted after the final ones.
    """

    states: list[Any]
    row_state: Int32  # [num_logits]
    positions: NDArray[np.int64]  # [num_logits]
    prefix_start: Int32  # [num_logits + 1]
    prefix_ids: Int32


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, complete. Rows of a request stand together, in position order."""

    token_ids: Int32  # [num_tokens]
    positions: Int32  # [num_tokens]
    slot_mapping: Int32  # [num_tokens] where the row's keys and values go
    query_start_loc: Int32  # [num_requests + 1]
    seq_lens: Int32  # [num_requests] tokens that exist after this step's rows, drafts included
    block_tables: Int32  # [num_requests, max_blocks] padded with 0
    logits_indices: Int32  # [num_logits] rows whose logits are needed
    sampling: SamplingBatch


def build_batch(plan: Plan, block_size: int) -> Batch:
    """The arrays of `plan`. Drafts must be chains.

    Made of lists: most steps have few rows, and there an array's set-up costs more than the loop it saves.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start_loc = [0]
    seq_lens: list[int] = []
    tables = np.zeros((len(plan.rows), max(len(row.request.block_table) for row in plan.rows)), np.int32)
    for i, row in enumerate(plan.rows):
        table = row.request.block_table
        end = row.start + row.num_tokens
        token_ids += row.request.token_ids[row.start : end]
        token_ids += row.drafts.token_ids
        positions += range(row.start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(row.start, end)]
        query_start_loc.append(len(token_ids))
        seq_lens.append(end)
        tables[i, : len(table)] = table
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int32),
        query_start_loc=np.array(query_start_loc, np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        block_tables=tables,
        logits_indices=_logits_indices(plan),
        sampling=_sampling(plan),
    )


def _logits_indices(plan: Plan) -> Int32:
    indices: list[int] = []
    end = 0
    for row in plan.rows:
        end += row.num_tokens
        if row.has_logits:
            indices += range(end - len(row.drafts) - 1, end)
    return np.array(indices, np.int32)


def _sampling(plan: Plan) -> SamplingBatch:
    states: list[Any] = []
    row_state: list[int] = []
    positions: list[int] = []
    prefix_start = [0]
    prefix_ids: list[int] = []
    for row in plan.rows:
        if not row.has_logits:
            continue
        draft_ids = row.drafts.token_ids
        num_tokens = row.request.num_tokens
        for depth in range(len(draft_ids) + 1):
            row_state.append(len(states))
            positions.append(num_tokens + depth)
            prefix_ids += draft_ids[:depth]
            prefix_start.append(len(prefix_ids))
        states.append(row.request.sampling_state)
    return SamplingBatch(
        states,
        np.array(row_state, np.int32),
        np.array(positions, np.int64),
        np.array(prefix_start, np.int32),
        np.array(prefix_ids, np.int32),
    )
