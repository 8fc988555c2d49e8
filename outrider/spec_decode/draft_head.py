"""A compiled draft module with its cache and the target's hidden states: fed with final tokens, it drafts.

The native one does a round in one call (csrc/draft_head.h says how slots and hidden states go together).
`SteppedDraftHead` does the same step by step for any backend: the oracle of the tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import outrider._native as _native
from outrider.backends import Executable
from outrider.backends.native import NativeExecutable

Int32 = NDArray[np.int32]


class DraftHead(Protocol):
    """Follows the target's cache slot by slot. `states` are those of the sampler."""

    @property
    def max_rows(self) -> int: ...  # tokens that one `draft` can be fed
    @property
    def nbytes(self) -> int: ...  # of the hidden states it can hold

    def keep(self, hidden: NDArray[np.float32], slots: Int32) -> None:
        """Remember hidden states that the target computed."""

    def move_slots(self, from_slots: Int32, to_slots: Int32) -> None:
        """As the target's cache was moved."""

    def count_fed(self, block_table: Int32, num_blocks: int) -> int:
        """How many of the first blocks of a table need not be fed: others had the same prefix."""

    def draft(
        self,
        token_ids: Int32,
        query_start_loc: Int32,
        starts: Int32,
        block_tables: Int32,
        steps: Int32,
        states: list[Any],
    ) -> tuple[Int32, NDArray[np.float32]]:
        """Feed request i with `token_ids[query_start_loc[i]:query_start_loc[i + 1]]` from position
        `starts[i]` on, then draft `steps[i]` tokens: (token ids, their probabilities), [2, requests, most
        steps], -1 after the end. [0] is the draft, [1] the second choice at each of its places."""


def make_draft_head(
    executable: Executable,
    *,
    width: int,
    num_blocks: int,
    block_size: int,
    max_rows: int,
    token_ids: Int32 | None,
    vocab_size: int,
    feeder: Any = None,
) -> DraftHead:
    """For a compiled module whose logits are those of `token_ids` (None: of the whole vocabulary). `feeder`:
    a native program that only writes its cache."""
    ids = np.arange(vocab_size, dtype=np.int32) if token_ids is None else token_ids
    if isinstance(executable, NativeExecutable):
        return _native.DraftHead(  # type: ignore[no-any-return]
            executable.program, *executable.outputs, num_blocks, block_size, ids.tolist(), vocab_size, feeder
        )
    return SteppedDraftHead(executable, width, num_blocks, block_size, max_rows, ids, vocab_size)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the module."""

    token_ids: Int32
    positions: Int32
    slot_mapping: Int32
    query_start_loc: Int32
    seq_lens: Int32
    block_tables: Int32
    logits_indices: Int32
    parents: Int32


class SteppedDraftHead:
    """One run of the executable for each step; see `DraftHead`."""

    def __init__(
        self,
        executable: Executable,
        width: int,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        token_ids: Int32,
        vocab_size: int,
    ) -> None:
        self.executable = executable
        self.max_rows = max_rows
        self._block_size = block_size
        self._kept = np.zeros((num_blocks * block_size, width), np.float32)  # rounded to bfloat16
        self._is_fed = np.zeros(num_blocks, bool)
        self._vocabulary = _native.DraftVocabulary(token_ids.tolist(), vocab_size)

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes

    def keep(self, hidden: NDArray[np.float32], slots: Int32) -> None:
        bits = np.ascontiguousarray(hidden, np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
            0xFFFF0000
        )
        self._kept[slots] = rounded.view(np.float32)
        self._is_fed[slots[slots % self._block_size == 0] // self._block_size] = False

    def move_slots(self, from_slots: Int32, to_slots: Int32) -> None:
        for source, target in zip(from_slots.tolist(), to_slots.tolist(), strict=True):
            self._kept[target] = self._kept[source]

    def count_fed(self, block_table: Int32, num_blocks: int) -> int:
        return sum(itertools.takewhile(bool, self._is_fed[block_table[:num_blocks]].tolist()))

    def draft(
        self,
        token_ids: Int32,
        query_start_loc: Int32,
        starts: Int32,
        block_tables: Int32,
        steps: Int32,
        states: list[Any],
    ) -> tuple[Int32, NDArray[np.float32]]:
        counts = np.diff(query_start_loc)
        ends = starts + counts
        most = max(1, int(steps.max(initial=0)))
        drafted = np.full((2, len(starts), most), -1, np.int32)
        probabilities = np.zeros((2, len(starts), most), np.float32)
        positions = np.concatenate([np.arange(*pair) for pair in zip(starts, ends, strict=True)])
        tables = np.repeat(block_tables, counts, axis=0)
        hidden = np.where(
            positions[:, None] > 0, self._kept[self._slots(tables, positions - 1)], np.float32(0)
        )
        active = np.flatnonzero(steps > 0)
        last: Any = query_start_loc[1:][active] - 1
        own, logits = self._run(
            token_ids, positions, tables, query_start_loc, ends, block_tables, last, hidden
        )
        for table, start, end in zip(block_tables, starts, ends, strict=True):
            self._is_fed[table[start // self._block_size : end // self._block_size]] = True
        for depth in range(most):
            for row, i in enumerate(active):
                token, chance, second, its_chance = _native.draft_row(
                    np.ascontiguousarray(logits[row]), self._vocabulary, states[i],
                    drafted[0, i, :depth].tolist(), int(ends[i]) + depth,
                )  # fmt: skip
                drafted[:, i, depth] = token, second
                probabilities[:, i, depth] = chance, its_chance
            goes_on = (steps[active] > depth + 1) & (drafted[0, active, depth] >= 0)
            active, last = active[goes_on], last[goes_on]
            if not len(active):
                break
            at = np.arange(len(active))
            tables, positions = block_tables[active], ends[active] + depth
            loc = np.arange(len(active) + 1)
            own, logits = self._run(
                drafted[0, active, depth], positions, tables, loc, positions + 1, tables, at, own[last]
            )
            last = at
        return drafted, probabilities

    def _slots(self, tables: Int32, positions: NDArray[Any]) -> NDArray[Any]:
        positions = np.maximum(positions, 0)
        blocks = np.take_along_axis(tables, (positions // self._block_size)[:, None], axis=1)[:, 0]
        return blocks * self._block_size + positions % self._block_size

    def _run(
        self, token_ids: Int32, positions: Any, tables: Any, loc: Any, lengths: Any, block_tables: Any,
        last: Any, hidden: NDArray[np.float32],
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # fmt: skip
        """One step of the module -> (its hidden states, logits)."""
        parts: Sequence[Any] = (
            token_ids, positions, self._slots(tables, positions), loc, lengths, block_tables, last, [],
        )  # fmt: skip
        step = _Step(*(np.ascontiguousarray(part, np.int32) for part in parts))
        output = self.executable.run(step, np.ascontiguousarray(hidden))
        assert output.hidden is not None
        return output.hidden.copy(), output.logits.copy()
