"""How many of a head's drafts the target would accept, position by position, on held-out conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from outrider import _native
from outrider.training.corpus import make_batch
from outrider.training.data import Record
from outrider.training.mtp import MTPHead
from outrider.training.prompts import ANSWER


@dataclass
class Acceptance:
    """Counts by position: drafts made where all before were accepted, and those accepted."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    covered: int = 0  # of the tokens drafted first, those that are in the draft vocabulary

    @property
    def conditional(self) -> list[float]:
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        """With a draft of as many tokens at every step: 1 + the mean number accepted."""
        return 1.0 + sum(self.accepted) / self.drafted[0] if self.drafted and self.drafted[0] else 1.0

    def view(self) -> dict[str, Any]:
        return {
            "conditional": [round(value, 4) for value in self.conditional],
            "tokens_per_step": round(self.tokens_per_step, 3),
            "positions": self.drafted[0] if self.drafted else 0,
            "coverage": round(self.covered / self.drafted[0], 4) if self.drafted and self.drafted[0] else 0.0,
        }


@torch.no_grad()
def measure(head: MTPHead, records: list[Record], *, num_steps: int = 3, batch_size: int = 8) -> Acceptance:
    """The acceptance on conversations that the target wrote: greedy where it wrote greedily, else with the
    noise it drew by, as the engine drafts."""
    slot_of = np.zeros(head.embedding.shape[0] + 1, np.int32)
    result = Acceptance([0] * num_steps, [0] * num_steps)
    ids = head.token_ids.cpu().numpy()
    records = sorted(records, key=lambda record: len(record.tokens))
    device = head.embedding.device
    for start in range(0, len(records), batch_size):
        part = records[start : start + batch_size]
        batch = make_batch(part, slot_of, np.zeros(3, np.float32), 1 << 20)
        states = head.passes(batch.tokens.to(device), batch.hidden.to(device), num_steps)
        for r, record in enumerate(part):
            _count(head, record, [state[r] for state in states], ids, result)
    return result


def _count(
    head: MTPHead, record: Record, states: list[torch.Tensor], ids: np.ndarray, result: Acceptance
) -> None:
    slots = np.flatnonzero(record.roles[1:] == ANSWER)  # slot j predicts token j+1
    hits = [np.zeros(len(record.tokens), bool) for _ in states]
    noise = _noise(record, slots, ids)
    for state, hit in zip(states, hits, strict=True):
        logits = head.logits(state[torch.from_numpy(slots)]).cpu().numpy()
        hit[slots] = ids[_draw(logits, record, slots, noise)] == record.tokens[slots + 1]
    result.covered += int(np.isin(record.tokens[slots + 1], ids).sum())
    is_answer = np.zeros(len(record.tokens) + len(states), bool)
    is_answer[slots] = True
    alive = slots
    for k, hit in enumerate(hits):
        alive = alive[is_answer[alive + k]]
        result.drafted[k] += len(alive)
        alive = alive[hit[alive + k]]
        result.accepted[k] += len(alive)


def _noise(record: Record, slots: np.ndarray, ids: np.ndarray) -> dict[int, np.ndarray]:
    return {
        slot: np.asarray(_native.gumbel_noise(record.seed, slot + 1, ids))
        for slot in slots.tolist()
        if record.temperatures[slot + 1] > 0
    }


def _draw(logits: np.ndarray, record: Record, slots: np.ndarray, noise: dict[int, np.ndarray]) -> np.ndarray:
    drawn = logits.argmax(1)
    for row, slot in enumerate(slots.tolist()):
        if slot in noise:
            temperature = float(record.temperatures[slot + 1])
            drawn[row] = int((logits[row] / temperature + noise[slot]).argmax())
    return drawn
