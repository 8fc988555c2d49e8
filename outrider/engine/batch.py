"""From a plan to the arrays of one step: the only place that computes positions and slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.scheduler import Plan, PlanRow
from outrider.engine.state import Request
from outrider.sampling.grammar import Mask
from outrider.sampling.verifier import Walk
from outrider.spec_decode.proposer import Drafts

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the sampler must know of each row of logits.

    Row r belongs to `states[row_state[r]]` and draws the token at `positions[r]`, as if the drafted
    tokens `prefix_ids[prefix_start[r] : prefix_start[r + 1]]` had been emitted after the final ones. A
    grammar may allow it some tokens only: those of `masks[row_mask[r]]` (-1, or no masks at all: any).
    """

    states: list[Any]
    row_state: Int32  # [num_logits]
    positions: NDArray[np.int64]  # [num_logits]
    prefix_start: Int32  # [num_logits + 1]
    prefix_ids: Int32
    masks: NDArray[np.uint32] | None = None  # [num_masks, vocab / 32] a bit for each token
    row_mask: Int32 | None = None  # [num_logits]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, complete. Rows of a request stand together, each behind the row whose token it follows.

    Row i of a request goes to the i-th slot from its first row's on. For committed tokens and a chain of
    drafts that is the slot of the position; nodes of a tree that share a position need a slot each.
    """

    token_ids: Int32  # [num_tokens]
    positions: Int32  # [num_tokens]
    slot_mapping: Int32  # [num_tokens] where the row's keys and values go
    query_start_loc: Int32  # [num_requests + 1]
    seq_lens: Int32  # [num_requests] slots in use after this step's rows, one for every draft
    block_tables: Int32  # [num_requests, max_blocks] padded with 0
    logits_indices: Int32  # [num_logits] rows whose logits are needed: those to draw from, then scored ones
    parents: Int32  # [num_tokens] row of the token before, -1: it is cached already; empty without trees
    sampling: SamplingBatch


def build_batch(plan: Plan, block_size: int) -> Batch:
    """The arrays of `plan`.

    Made of lists, and all integers travel into one array whose parts the batch shows: most steps have few
    rows, and there an array's set-up costs more than the loop it saves.
    """
    rows = plan.rows
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start_loc = [0]
    seq_lens: list[int] = []
    logits_indices: list[int] = []
    states: list[Any] = []
    row_state: list[int] = []
    draw_positions: list[int] = []
    prefix_start = [0]
    prefix_ids: list[int] = []
    trees: dict[int, Drafts] = {}  # by the row of the token that the tree continues
    tables = np.zeros((len(rows), max([len(row.request.block_table) for row in rows])), np.int32)
    for i, row in enumerate(rows):
        request, draft_ids = row.request, row.drafts.token_ids
        table = request.block_table
        end = row.start + row.num_tokens
        token_ids += request.token_ids[row.start : end]
        token_ids += draft_ids
        positions += range(row.start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(row.start, end)]
        query_start_loc.append(len(token_ids))
        seq_lens.append(end)
        tables[i, : len(table)] = table
        if row.has_logits:
            num_rows = len(draft_ids) + 1
            logits_indices += range(len(token_ids) - num_rows, len(token_ids))
            row_state += [len(states)] * num_rows
            states.append(request.sampling_state)
            if row.drafts.is_chain:
                paths = [draft_ids[:depth] for depth in range(num_rows)]
                draw_positions += range(end - num_rows + 1, end + 1)
            else:
                trees[len(token_ids) - num_rows] = row.drafts
                paths = _paths(row.drafts)
                draw_positions += [end - num_rows + 1 + len(path) for path in paths]
                positions[1 - num_rows :] = [position - 1 for position in draw_positions[1 - num_rows :]]
            for path in paths:
                prefix_ids += path
                prefix_start.append(len(prefix_ids))
    logits_indices += [row for row, _, _ in scored_rows(plan)]
    parts = _as_arrays(
        token_ids, positions, slots, query_start_loc, seq_lens, logits_indices, row_state, prefix_start,
        prefix_ids, _parents(trees, query_start_loc) if trees else [],
    )  # fmt: skip
    return Batch(
        token_ids=parts[0],
        positions=parts[1],
        slot_mapping=parts[2],
        query_start_loc=parts[3],
        seq_lens=parts[4],
        block_tables=tables,
        logits_indices=parts[5],
        parents=parts[9],
        sampling=SamplingBatch(
            states, parts[6], np.array(draw_positions, np.int64), parts[7], parts[8], *_masks(rows)
        ),
    )


def scored_rows(plan: Plan) -> Iterator[tuple[int, Request, int]]:
    """Rows of prompt tokens whose logits are asked for: the row, its request, the position of its token."""
    first = 0
    for row in plan.rows:
        request = row.request
        if request.prompt_scores is not None:
            for position in range(row.start, min(row.start + row.num_tokens, len(request.prompt_scores))):
                yield first + position - row.start, request, position
        first += row.num_tokens


def _masks(rows: Sequence[PlanRow]) -> tuple[NDArray[np.uint32] | None, Int32 | None]:
    """What the grammars of a step's requests allow, as if the drafts before each row had been emitted."""
    if all([row.request.stream.grammar is None for row in rows]):
        return None, None
    masks: list[Mask] = []
    row_mask: list[int] = []
    for row in rows:
        if not row.has_logits:
            continue
        grammar, drafts = row.request.stream.grammar, row.drafts
        if grammar is None:
            row_mask += [-1] * (len(drafts) + 1)
            continue
        for mask in grammar.masks(drafts.token_ids, drafts.parents):
            row_mask.append(-1 if mask is None else len(masks))
            if mask is not None:
                masks.append(mask)
    return (np.stack(masks), np.array(row_mask, np.int32)) if masks else (None, None)


def moves_of(plan: Plan, walks: Sequence[Walk | None], block_size: int) -> tuple[Int32, Int32] | None:
    """From which slots to which the keys and values of accepted nodes go, so that they lie in position order
    like those of any other token. None: they do already, as when every first path was the accepted one.

    A request's moves are in order of depth, so that no slot is overwritten before it has been read.
    """
    from_slots: list[int] = []
    to_slots: list[int] = []
    for row, walk in zip(plan.rows, walks, strict=True):
        if walk is None or not walk.path or walk.path[-1] == len(walk.path) - 1:
            continue
        first = row.start + row.num_tokens - len(row.drafts)
        table = row.request.block_table
        for depth, node in enumerate(walk.path):
            if node != depth:
                from_slots.append(_slot(table, first + node, block_size))
                to_slots.append(_slot(table, first + depth, block_size))
    return (np.array(from_slots, np.int32), np.array(to_slots, np.int32)) if from_slots else None


def _slot(table: Sequence[int], index: int, block_size: int) -> int:
    return table[index // block_size] * block_size + index % block_size


def _paths(drafts: Drafts) -> list[tuple[int, ...]]:
    """The drafted tokens that lead to the committed token (none) and to each node, its own included."""
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(drafts.token_ids, drafts.parents, strict=True):
        paths.append((*paths[parent + 1], token_id))
    return paths


def _parents(trees: dict[int, Drafts], query_start_loc: list[int]) -> list[int]:
    """Every row's parent: the row before it, but in trees."""
    parents = list(range(-1, query_start_loc[-1] - 1))
    for first in query_start_loc[:-1]:
        parents[first] = -1
    for root, drafts in trees.items():
        parents[root + 1 : root + 1 + len(drafts)] = [root + 1 + parent for parent in drafts.parents]
    return parents


def _as_arrays(*lists: list[int]) -> list[Int32]:
    """Each list as an int32 array; all are parts of one."""
    whole: list[int] = []
    ends: list[int] = []
    for part in lists:
        whole += part
        ends.append(len(whole))
    array = np.array(whole, np.int32)
    return [array[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
