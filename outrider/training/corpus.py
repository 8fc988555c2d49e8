"""Stored conversations as batches for the trainer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.training.data import Record, Store
from outrider.training.prompts import GIVEN

_POOL = 8  # batches whose documents are put together by length


@dataclass
class Batch:
    """Documents of about the same length, padded at the end."""

    tokens: Tensor  # [B, L]
    hidden: Tensor  # [B, L, H]; zero where there is none
    top_ids: Tensor  # [B, L, T] positions in the draft vocabulary, -1 for none
    top_logprobs: Tensor  # [B, L, T]
    weights: Tensor  # [B, L] of what slot j predicts, token j+1


@dataclass
class Corpus:
    """All records of a store in memory. `refresh` reads the shards that are new."""

    store: Store
    min_length: int = 16
    max_length: int = 1024
    records: list[Record] = field(default_factory=list)
    _seen: set[Path] = field(default_factory=set)

    def refresh(self, share: Callable[[list[str]], list[str]] = list) -> int:
        """Read new shards; the number of tokens there are now. `share` makes processes agree on the names."""
        names = share([shard.name for shard in self.store.shards()])
        new = [self.store.path / name for name in names if self.store.path / name not in self._seen]
        for record in self.store.read(new):
            if len(record.tokens) >= self.min_length:
                self.records.append(record)
        self._seen.update(new)
        return sum(len(record.tokens) for record in self.records)


def frequent_tokens(records: list[Record], count: int, vocab_size: int, always: list[int]) -> np.ndarray:
    """The ids that the target most expects to write, by the probability it gave them, sorted."""
    mass = np.zeros(vocab_size)
    for record in records:
        rows = record.roles[1:] != GIVEN
        ids, logprobs = record.top_ids[rows].ravel(), record.top_logprobs[rows].ravel()
        kept = ids >= 0
        mass += np.bincount(ids[kept], np.exp(logprobs[kept].astype(np.float32)), vocab_size)
    mass[always] = np.inf
    order = np.lexsort((np.arange(vocab_size), -mass))
    return np.sort(order[:count]).astype(np.int32)


class Batches:
    """An endless, repeatable stream of batches: the least used documents first, in random order."""

    def __init__(
        self,
        corpus: Corpus,
        token_ids: np.ndarray,
        vocab_size: int,
        *,
        batch_tokens: int,
        question_weight: float,
        prompt_weight: float = 0.0,
    ) -> None:
        self.corpus = corpus
        self._slot_of = np.full(vocab_size + 1, -1, np.int32)  # one more: -1 stays -1
        self._slot_of[token_ids] = np.arange(len(token_ids))
        self._batch_tokens = batch_tokens
        self._role_weights = np.array([prompt_weight, question_weight, 1.0], np.float32)
        self._uses: list[int] = []

    def plan(self, rng: random.Random) -> list[list[int]]:
        """The record numbers of the next few batches."""
        records = self.corpus.records
        self._uses += [0] * (len(records) - len(self._uses))
        keys = [(uses, rng.random()) for uses in self._uses]
        order = sorted(range(len(records)), key=keys.__getitem__)
        picked: list[int] = []
        total = 0
        for number in order:
            if total >= _POOL * self._batch_tokens:
                break
            picked.append(number)
            total += len(records[number].tokens)
            self._uses[number] += 1
        picked.sort(key=lambda number: (len(records[number].tokens), number))
        batches: list[list[int]] = [[]]
        for number in picked:
            length = len(records[number].tokens)  # the longest so far
            if batches[-1] and length * (len(batches[-1]) + 1) > self._batch_tokens:
                batches.append([])
            batches[-1].append(number)
        rng.shuffle(batches)
        return batches

    def batch(self, numbers: list[int]) -> Batch:
        """The batch of these records."""
        return make_batch(
            [self.corpus.records[number] for number in numbers],
            self._slot_of,
            self._role_weights,
            self.corpus.max_length,
        )

    def state(self) -> list[int]:
        return list(self._uses)

    def restore(self, uses: list[int]) -> None:
        self._uses = list(uses)


def make_batch(
    records: list[Record], slot_of: np.ndarray, role_weights: np.ndarray, max_length: int
) -> Batch:
    """Records side by side."""
    length = min(max_length, max(len(record.tokens) for record in records)) - 1
    rows, width, top = len(records), records[0].hidden.shape[1], records[0].top_ids.shape[1]
    tokens = np.zeros((rows, length), np.int64)
    hidden = np.zeros((rows, length, width), np.float16)
    top_ids = np.full((rows, length, top), -1, np.int64)
    top_logprobs = np.full((rows, length, top), -np.inf, np.float16)
    weights = np.zeros((rows, length), np.float32)
    for r, record in enumerate(records):
        n = min(length, len(record.hidden))
        tokens[r, :n] = record.tokens[:n]
        hidden[r, :n] = record.hidden[:n]
        top_ids[r, :n] = slot_of[record.top_ids[:n]]
        top_logprobs[r, :n] = record.top_logprobs[:n]
        weights[r, :n] = role_weights[record.roles[1 : n + 1]]
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(hidden).float(),
        torch.from_numpy(top_ids),
        torch.from_numpy(top_logprobs).float(),
        torch.from_numpy(weights),
    )
