"""Faults of draft trees: batches, and moving the accepted path."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from planting import Patch, fault

import outrider.engine.engine as engine_module
from outrider.engine.batch import Batch
from outrider.engine.scheduler import Plan
from outrider.sampling.verifier import Walk
from outrider.spec_decode.proposer import Drafts


@fault
def accepted_paths_left_where_they_are(patch: Patch) -> None:
    patch.setattr(engine_module, "moves_of", lambda plan, walks, block_size: None)


@fault
def accepted_paths_moved_from_the_last_node_on(patch: Patch) -> None:
    original = engine_module.moves_of

    def moves_of(plan: Plan, walks: Sequence[Walk | None], block_size: int) -> Any:
        moves = original(plan, walks, block_size)
        return moves and (moves[0][::-1], moves[1][::-1])

    patch.setattr(engine_module, "moves_of", moves_of)


@fault
def moves_that_forget_the_final_tokens_of_the_step(patch: Patch) -> None:
    original = engine_module.moves_of

    def moves_of(plan: Plan, walks: Sequence[Walk | None], block_size: int) -> Any:
        rows = tuple(dataclasses.replace(row, start=row.start - 1) for row in plan.rows)
        return original(dataclasses.replace(plan, rows=rows), walks, block_size)

    patch.setattr(engine_module, "moves_of", moves_of)


def _with_drafts(patch: Patch, change: Callable[[Drafts], Drafts]) -> None:
    """Plant it in what the model and the sampler are told of the drafts; the walk knows the true tree."""
    original = engine_module.build_batch

    def build_batch(plan: Plan, block_size: int) -> Batch:
        rows = tuple(dataclasses.replace(row, drafts=change(row.drafts)) for row in plan.rows)
        return original(dataclasses.replace(plan, rows=rows), block_size)

    patch.setattr(engine_module, "build_batch", build_batch)


@fault
def siblings_taken_for_a_chain(patch: Patch) -> None:
    _with_drafts(patch, lambda drafts: dataclasses.replace(drafts, parents=tuple(range(-1, len(drafts) - 1))))


@fault
def grandparents_taken_for_parents(patch: Patch) -> None:
    def change(drafts: Drafts) -> Drafts:
        parents = drafts.parents
        if drafts.is_chain:
            return drafts
        return dataclasses.replace(drafts, parents=tuple(parents[p] if p > 0 else p for p in parents))

    _with_drafts(patch, change)


def _with_tree_batches(patch: Patch, change: Callable[[Batch], Batch]) -> None:
    original = engine_module.build_batch

    def build_batch(plan: Plan, block_size: int) -> Batch:
        batch = original(plan, block_size)
        return change(batch) if len(batch.parents) else batch

    patch.setattr(engine_module, "build_batch", build_batch)


@fault
def attention_that_sees_siblings(patch: Patch) -> None:
    _with_tree_batches(patch, lambda batch: dataclasses.replace(batch, parents=batch.parents[:0]))


@fault
def positions_of_nodes_by_index(patch: Patch) -> None:
    def change(batch: Batch) -> Batch:
        positions = batch.positions.copy()
        for begin, end in itertools.pairwise(batch.query_start_loc.tolist()):
            positions[begin:end] = range(positions[begin], positions[begin] + end - begin)
        return dataclasses.replace(batch, positions=positions)

    _with_tree_batches(patch, change)


@fault
def penalties_that_see_siblings(patch: Patch) -> None:
    def change(batch: Batch) -> Batch:
        sampling = batch.sampling
        start, ids = [0], []
        for row, node in enumerate(sampling.prefix_start.tolist()[1:]):
            own = sampling.prefix_ids[sampling.prefix_start[row] : node].tolist()
            first = sampling.row_state.tolist().index(sampling.row_state[row])
            lasts = [
                int(sampling.prefix_ids[sampling.prefix_start[r + 1] - 1]) for r in range(first + 1, row)
            ]
            ids += [*lasts, *own[-1:]] if row > first else own
            start.append(len(ids))
        changed = dataclasses.replace(
            sampling, prefix_start=np.array(start, np.int32), prefix_ids=np.array(ids, np.int32)
        )
        return dataclasses.replace(batch, sampling=changed)

    _with_tree_batches(patch, change)
