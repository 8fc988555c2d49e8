"""Data for a draft head, written by the target itself.

`Generator` keeps many conversations going in one batch and stores, for every token, the target's hidden state
and the head of its next-token distribution. What is made of conversation n does not depend on the batch it
ran in (the engine's law), so a data set is the same however often making it was interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.backends import make_backend
from outrider.engine.batch import Batch, SamplingBatch
from outrider.models.loader import Checkpoint
from outrider.models.registry import build_function, weight_plan
from outrider.request import SamplingParams
from outrider.sampling.sampler import Sampler
from outrider.training.prompts import PromptSource, Script, Turn

Int32 = NDArray[np.int32]

TOP = 24  # tokens of each distribution that are kept
_MARGIN = 12.0  # nats below the best at which a token is not worth keeping
_BLOCK = 32


@dataclass
class Record:
    """A finished conversation of n tokens. Rows belong to tokens 0 .. n-2; each predicts the next."""

    index: int
    kind: str
    seed: int
    tokens: NDArray[np.int32]  # [n]
    roles: NDArray[np.uint8]  # [n]
    temperatures: NDArray[np.float16]  # [n] at which the token was drawn; -1 where it was given
    hidden: NDArray[np.float16]  # [n-1, H] before the final norm
    top_ids: NDArray[np.int32]  # [n-1, TOP], best first; -1 where there is none
    top_logprobs: NDArray[np.float16]  # [n-1, TOP]


_ARRAYS = ("tokens", "roles", "temperatures", "hidden", "top_ids", "top_logprobs")


@dataclass
class _Live:
    """A conversation that is being written, in one of the generator's places."""

    script: Script
    place: int
    turn: int = 0
    written: int = 0  # tokens drawn in this turn
    pending: list[int] = field(default_factory=list)  # tokens that have not been through the model
    tokens: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)  # (hidden, top ids, top log-probabilities)
    done: int = 0  # tokens that have been through the model
    state: Any = None  # of the sampler

    def add(self, ids: list[int], role: int, temperature: float) -> None:
        self.tokens += ids
        self.pending += ids
        self.roles += [role] * len(ids)
        self.temperatures += [temperature] * len(ids)


class Generator:
    """Acts out scripts with a target, `places` of them at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        places: int = 48,
        max_rows: int = 256,
        max_tokens: int = 1024,
        num_threads: int | None = None,
        backend: str = "native",
        hidden_source: str = "pre_norm",
    ) -> None:
        self._blocks = -(-max_tokens // _BLOCK)
        self._max_tokens = self._blocks * _BLOCK
        self._max_rows = max_rows
        self._places = places
        self._sampler = Sampler()
        self._eos = checkpoint.config.eos_token_ids  # the first is that of a turn
        made = make_backend(backend, num_threads=num_threads)
        weights = {
            handle: made.weight([checkpoint.tensors[name] for name in names], None)
            for handle, names in weight_plan(checkpoint.config).items()
        }
        self._executable = made.compile(
            build_function(checkpoint.config),
            checkpoint.config,
            weights,
            max_rows=max_rows,
            max_logits_rows=max_rows,
            num_blocks=places * self._blocks,
            block_size=_BLOCK,
            max_model_len=min(self._max_tokens, checkpoint.config.max_position_embeddings),
            hidden=hidden_source,
        )

    def run(self, scripts: Iterator[Script]) -> Iterator[Record]:
        """The conversations, in the order in which they end."""
        free = list(range(self._places))
        live: list[_Live] = []
        while True:
            while free:
                script = next(scripts, None)
                if script is None:
                    break
                one = _Live(script, free.pop())
                if self._next_turn(one):
                    live.append(one)
                else:
                    free.append(one.place)
            if not live:
                return
            for one in self._step(live):
                live.remove(one)
                free.append(one.place)
                yield _record(one)

    def _next_turn(self, one: _Live) -> bool:
        """Add given turns until one is to be drawn; False if that was the last or there is no room."""
        while one.turn < len(one.script.turns):
            turn = one.script.turns[one.turn]
            if turn.ids is None:
                one.written = 0
                one.state = self._sampler.make_state(
                    SamplingParams(temperature=turn.temperature), [], [], one.script.seed
                )
                return True
            if len(one.tokens) + len(turn.ids) + 2 > self._max_tokens:
                return False
            one.add(list(turn.ids), turn.role, -1.0)
            one.turn += 1
        return False

    def _step(self, live: list[_Live]) -> list[_Live]:
        """One forward pass; those that ended."""
        chunks: list[tuple[_Live, int]] = []
        room = self._max_rows
        for one in sorted(live, key=lambda one: len(one.pending)):  # drawing goes on while prompts are read
            count = min(room, len(one.pending))
            if count:
                chunks.append((one, count))
                room -= count
        batch = self._batch(chunks)
        output = self._executable.run(batch)
        drawn = self._sampler.sample(output.logits[batch.query_start_loc[1:] - 1], batch.sampling)
        top = top_of(output.logits)
        hidden = np.asarray(output.hidden).astype(np.float16)
        ended = []
        start = 0
        for (one, count), token in zip(chunks, drawn.token_ids, strict=True):
            one.rows.append(tuple(part[start : start + count] for part in (hidden, *top)))
            start += count
            one.done += count
            del one.pending[:count]
            if not one.pending and not self._advance(one, token):
                ended.append(one)
        return ended

    def _advance(self, one: _Live, token: int) -> bool:
        """Take a drawn token; False if the conversation is over."""
        turn = one.script.turns[one.turn]
        one.written += 1
        is_cut = one.written >= turn.limit or len(one.tokens) + 1 >= self._max_tokens
        one.add([token], turn.role, turn.temperature)
        if token not in self._eos:
            if not is_cut:
                return True
            if turn.role == max(t.role for t in one.script.turns) or len(one.tokens) >= self._max_tokens:
                return False  # an answer that is cut off ends the conversation
            one.add([self._eos[0]], 0, -1.0)
        one.turn += 1
        return self._next_turn(one)

    def _batch(self, chunks: list[tuple[_Live, int]]) -> Batch:
        counts = [count for _, count in chunks]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([np.arange(one.done, one.done + n) for one, n in chunks]).astype(np.int32)
        places = np.repeat([one.place for one, _ in chunks], counts).astype(np.int32)
        tables = np.array([[one.place * self._blocks + b for b in range(self._blocks)] for one, _ in chunks])
        ends = np.array([one.done + n for one, n in chunks], np.int32)
        rows = len(chunks)
        sampling = SamplingBatch(
            [one.state for one, _ in chunks],
            np.arange(rows, dtype=np.int32),
            ends.astype(np.int64),
            np.zeros(rows + 1, np.int32),
            np.zeros(0, np.int32),
        )
        return Batch(
            token_ids=np.array([token for one, n in chunks for token in one.pending[:n]], np.int32),
            positions=positions,
            slot_mapping=places * self._max_tokens + positions,
            query_start_loc=starts,
            seq_lens=ends,
            block_tables=tables.astype(np.int32),
            logits_indices=np.arange(starts[-1], dtype=np.int32),
            parents=np.empty(0, np.int32),
            sampling=sampling,
        )


def top_of(logits: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """The TOP best tokens of each row and their log-probabilities, best first."""
    rows = len(logits)
    ids = np.full((rows, TOP), -1, np.int32)
    logprobs = np.full((rows, TOP), -np.inf, np.float16)
    for r, row in enumerate(logits):
        best = row.max()
        shifted = row - best
        total = np.log(np.exp(shifted).sum(dtype=np.float64))
        found = np.flatnonzero(shifted > -_MARGIN)
        values = shifted[found]
        if len(found) > TOP:
            kept = np.argpartition(values, -TOP)[-TOP:]
            found, values = found[kept], values[kept]
        order = np.lexsort((found, -values))
        ids[r, : len(order)] = found[order]
        logprobs[r, : len(order)] = values[order] - total
    return ids, logprobs


def _record(one: _Live) -> Record:
    rows = len(one.tokens) - 1
    parts = [np.concatenate(list(part))[:rows] for part in zip(*one.rows, strict=True)]
    return Record(
        one.script.index,
        one.script.kind,
        one.script.seed,
        np.array(one.tokens, np.int32),
        np.array(one.roles, np.uint8),
        np.array(one.temperatures, np.float16),
        *parts,
    )


class Store:
    """A directory of shards, each some conversations in one .npz file, written whole or not at all.

    Several workers may write to one directory, each under its own number.
    """

    def __init__(self, path: str | Path, worker: int = 0) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._prefix = f"shard-{worker:02d}"

    def shards(self) -> list[Path]:
        return sorted(self.path.glob("shard-*.npz"))

    def indices(self) -> set[int]:
        """Numbers of the conversations that are stored."""
        return {meta["index"] for shard in self.shards() for meta in _metas(shard)}

    def num_tokens(self, *, own: bool = False) -> int:
        """Tokens of all workers, or of this one."""
        pattern = f"{self._prefix}-*.npz" if own else "shard-*.npz"
        return sum(meta["length"] for shard in self.path.glob(pattern) for meta in _metas(shard))

    def write(self, records: list[Record]) -> None:
        """Add a shard."""
        mine = self.path.glob(f"{self._prefix}-*.npz")
        number = 1 + max((int(shard.stem.rpartition("-")[2]) for shard in mine), default=-1)
        target = self.path / f"{self._prefix}-{number:05d}.npz"
        metas = [{"index": r.index, "kind": r.kind, "seed": r.seed, "length": len(r.tokens)} for r in records]
        arrays: Mapping[str, Any] = {
            name: np.concatenate([getattr(record, name) for record in records]) for name in _ARRAYS
        }
        temporary = target.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            np.savez(file, metas=np.frombuffer(json.dumps(metas).encode(), np.uint8), **arrays)
        os.replace(temporary, target)

    def read(self, shards: list[Path] | None = None) -> Iterator[Record]:
        """All records, shard by shard."""
        for shard in self.shards() if shards is None else shards:
            with np.load(shard) as file:
                metas = json.loads(file["metas"].tobytes())
                arrays = {name: file[name] for name in _ARRAYS}
            at = rows_at = 0
            for meta in metas:
                end, rows_end = at + meta["length"], rows_at + meta["length"] - 1
                cut = {
                    name: array[at:end] if name in _ARRAYS[:3] else array[rows_at:rows_end]
                    for name, array in arrays.items()
                }
                yield Record(meta["index"], meta["kind"], meta["seed"], **cut)
                at, rows_at = end, rows_end


def _metas(shard: Path) -> list[dict[str, Any]]:
    with np.load(shard) as file:
        metas: list[dict[str, Any]] = json.loads(file["metas"].tobytes())
    return metas


def generate(
    generator: Generator,
    source: PromptSource,
    store: Store,
    *,
    num_tokens: int,
    worker: int = 0,
    num_workers: int = 1,
    shard_tokens: int = 20000,
    progress: Any = None,
) -> None:
    """Add conversations until the store holds `num_tokens` tokens of this worker; goes on where it stopped.

    Worker w makes the conversations whose number is w modulo `num_workers`.
    """
    have = store.indices()
    total = store.num_tokens(own=True)
    started = (index for index in range(worker, 1 << 62, num_workers) if index not in have)
    buffer: list[Record] = []

    def scripts() -> Iterator[Script]:
        while total < num_tokens:
            yield source.script(next(started))

    for record in generator.run(scripts()):
        buffer.append(record)
        total += len(record.tokens)
        if progress is not None:
            progress(len(record.tokens))
        if sum(len(r.tokens) for r in buffer) >= shard_tokens:
            store.write(buffer)
            buffer = []
    if buffer:
        store.write(buffer)


__all__ = ["Generator", "Record", "Store", "Turn", "generate", "top_of"]
