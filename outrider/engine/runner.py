"""One model with its cache: a batch in, logits out. Knows arrays, not requests."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engine.batch import Batch
from outrider.spec_decode.draft_head import DraftHead


class ModelOutput(Protocol):
    """What a model made of a step."""

    @property
    def logits(self) -> NDArray[np.float32]: ...  # [num_logits, vocab], valid until the next run
    @property
    def hidden(self) -> NDArray[np.float32] | None: ...  # [num_tokens, hidden] if the executable keeps it


class Executable(Protocol):
    """A compiled model: what a backend gives."""

    def run(self, batch: Batch) -> ModelOutput: ...
    def move_slots(self, from_slots: NDArray[np.int32], to_slots: NDArray[np.int32]) -> None: ...


class Runner:
    """Runs an executable and says how long that took."""

    def __init__(self, executable: Executable, draft_head: DraftHead | None = None) -> None:
        """`draft_head` gets the hidden states of every row, wherever its keys and values go."""
        self.executable = executable
        self.draft_head = draft_head
        self.seconds = 0.0  # in the model, all steps together

    def run(self, batch: Batch) -> ModelOutput:
        """One forward pass. Writes the keys and values of every row to the batch's slots."""
        begin = time.perf_counter()
        output = self.executable.run(batch)
        if self.draft_head is not None and output.hidden is not None:
            self.draft_head.keep(output.hidden, batch.slot_mapping)
        self.seconds += time.perf_counter() - begin
        return output

    def move_slots(self, from_slots: NDArray[np.int32], to_slots: NDArray[np.int32]) -> None:
        """Copy keys and values of every layer from slot to slot, one after the other in this order."""
        begin = time.perf_counter()
        self.executable.move_slots(from_slots, to_slots)
        if self.draft_head is not None:
            self.draft_head.move_slots(from_slots, to_slots)
        self.seconds += time.perf_counter() - begin
