"""A table of what a target usually writes after a few tokens: a free source of drafts.

It is made from the conversations that train a head (`outrider.training.data`), whose rows keep the head of
the target's own distribution: so a context seen once tells more than which token happened to follow it.
Chances of longer contexts are smoothed with those of their ends, and a context is kept only where it says
something that its end does not.

    python -m outrider.training.phrases DATA OUT.npz [--model MODEL] [--most N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import outrider._native as _native
from outrider.training.data import Store
from outrider.training.prompts import GIVEN

Hashes = NDArray[np.uint64]

LONGEST: int = _native.LONGEST_PHRASE
WIDTH = 2  # next tokens of a context
CANDIDATES = 8  # of each distribution
SMOOTHING = 3.0  # how many observations the shorter context is worth
LEAST = 0.08  # chance below which a next token is not worth a draft
NEWS = 0.10  # change of a chance that is worth an entry
FORMAT = 1
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


@dataclass
class _Order:
    """What follows the contexts of one length."""

    contexts: Hashes  # [C] ascending
    counts: NDArray[np.float64]  # [C]
    shorter: NDArray[np.int64]  # [C] the context without its first token, in the order below
    keys: Hashes  # [P] of (context, next token), ascending
    chances: NDArray[np.float64]  # [P]
    best_ids: NDArray[np.int32]  # [C, WIDTH]
    best: NDArray[np.float64]  # [C, WIDTH]
    is_kept: NDArray[np.bool_]  # [C]
    said_ids: NDArray[np.int32]  # [C, WIDTH] what a lookup of the context finds: its own entry or its end's
    said: NDArray[np.float64]


def hashes(columns: Sequence[NDArray[Any]]) -> Hashes:
    """Of contexts given as one array for each place; the upper half is the native fingerprint."""
    value = np.full(len(columns[0]), _FIRST * np.uint64(len(columns)), np.uint64)
    for column in columns:
        value = (value ^ column.astype(np.uint64)) * _SECOND
        value ^= value >> np.uint64(32)
    return value * _SECOND


def build(
    tokens: list[NDArray[np.int32]],
    wanted: list[NDArray[np.bool_]],
    top_ids: list[NDArray[np.int32]],
    top_chances: list[NDArray[np.float32]],
    most: int,
) -> dict[str, NDArray[Any]]:
    """The table's arrays from texts: row j of a text predicts token j + 1; `wanted` marks rows that count.
    At most `most` contexts, those first whose entries say more."""
    orders: list[_Order] = []
    below: NDArray[np.int64] | None = None  # per row: its context in the order before
    with np.errstate(over="ignore"):
        for length in range(1, LONGEST + 1):
            order, below = _order(length, tokens, wanted, top_ids, top_chances, orders, below)
            orders.append(order)
    return _pack(orders, most)


def _order(
    length: int, tokens: Any, wanted: Any, top_ids: Any, top_chances: Any, orders: list[_Order], below: Any
) -> tuple[_Order, NDArray[np.int64]]:
    columns: list[list[NDArray[Any]]] = [[] for _ in range(length)]
    rows, ids, chances = [], [], []
    base = 0
    for text, counts, candidates, shares in zip(tokens, wanted, top_ids, top_chances, strict=True):
        at = np.flatnonzero(counts)
        at = at[at + 1 >= length]
        for place in range(length):
            columns[place].append(text[at - (length - 1 - place)])
        rows.append(at + base)
        ids.append(candidates[at, :CANDIDATES])
        chances.append(shares[at, :CANDIDATES])
        base += len(counts)
    row = np.concatenate(rows)
    context_of_row = hashes([np.concatenate(column) for column in columns])
    contexts, first, inverse, counted = np.unique(
        context_of_row, return_index=True, return_inverse=True, return_counts=True
    )
    of_row = np.full(base, -1, np.int64)
    of_row[row] = inverse
    shorter = below[row[first]] if below is not None else np.full(len(contexts), -1, np.int64)
    pairs = _pairs(inverse, np.concatenate(ids), np.concatenate(chances), contexts, counted, shorter, orders)
    return _settled(contexts, counted, shorter, *pairs, orders), of_row


def _pairs(
    inverse: Any, ids: Any, chances: Any, contexts: Any, counted: Any, shorter: Any, orders: list[_Order]
) -> tuple[Any, Any, Any, Any]:
    """(context, next token, key, smoothed chance) of every pair that was seen."""
    is_there = ids.reshape(-1) >= 0
    token = ids.reshape(-1)[is_there].astype(np.uint64)
    context = np.repeat(inverse, ids.shape[1])[is_there]
    pair = _pair_keys(contexts[context], token)
    keys, first, where = np.unique(pair, return_index=True, return_inverse=True)
    sums: Any = np.bincount(where, chances.reshape(-1)[is_there].astype(np.float64), len(keys))
    context, token = context[first], token[first]
    smoothed = sums
    if orders:
        lower = orders[-1]
        wanted = _pair_keys(lower.contexts[shorter[context]], token)
        at = np.minimum(np.searchsorted(lower.keys, wanted), len(lower.keys) - 1)
        smoothed = sums + SMOOTHING * np.where(lower.keys[at] == wanted, lower.chances[at], 0.0)
    return context, token, keys, smoothed / (counted[context] + SMOOTHING)


def _pair_keys(contexts: Hashes, token: Hashes) -> Hashes:
    return (contexts ^ (token + _FIRST)) * _SECOND


def _settled(
    contexts: Any, counted: Any, shorter: Any, context: Any, token: Any, keys: Any, chance: Any,
    orders: list[_Order],
) -> _Order:  # fmt: skip
    """Choose each context's best next tokens, and whether they are news."""
    order = np.lexsort((-chance, context))
    context, token, sorted_chance = context[order], token[order], chance[order]
    starts = np.searchsorted(context, np.arange(len(contexts)))
    ends = np.searchsorted(context, np.arange(len(contexts)), side="right")
    best_ids = np.full((len(contexts), WIDTH), -1, np.int32)
    best = np.zeros((len(contexts), WIDTH))
    for place in range(WIDTH):
        has = (ends - starts > place) & (sorted_chance[np.minimum(starts + place, len(token) - 1)] >= LEAST)
        best_ids[has, place] = token[starts[has] + place]
        best[has, place] = sorted_chance[starts[has] + place]
    is_kept = best_ids[:, 0] >= 0
    said_ids, said = best_ids.copy(), best.copy()
    if orders:
        lower = orders[-1]
        end_ids, end = lower.said_ids[shorter], lower.said[shorter]
        is_news = (best_ids[:, 0] != end_ids[:, 0]) | (np.abs(best[:, 0] - end[:, 0]) >= NEWS)
        is_kept &= is_news
        said_ids = np.where(is_kept[:, None], best_ids, end_ids)
        said = np.where(is_kept[:, None], best, end)
    return _Order(
        contexts, counted.astype(np.float64), shorter, keys, chance, best_ids, best, is_kept, said_ids, said
    )


def _pack(orders: list[_Order], most: int) -> dict[str, NDArray[Any]]:
    kept = [np.flatnonzero(order.is_kept) for order in orders]
    prints = np.concatenate(
        [order.contexts[at] >> np.uint64(32) for order, at in zip(orders, kept, strict=True)]
    )
    ids = np.concatenate([order.best_ids[at] for order, at in zip(orders, kept, strict=True)])
    chances = np.concatenate([order.best[at] for order, at in zip(orders, kept, strict=True)])
    counts = np.concatenate([order.counts[at] for order, at in zip(orders, kept, strict=True)])
    # What is asked often and answered surely is worth most; of equal fingerprints the first stays.
    worth = np.sqrt(counts) * chances[:, 0]
    chosen = np.argsort(-worth, kind="stable")[:most]
    _, first = np.unique(prints[chosen], return_index=True)
    chosen = chosen[first]
    return {
        "fingerprints": prints[chosen].astype(np.uint32).view(np.int32),
        "token_ids": ids[chosen],
        "chances": np.clip(np.round(chances[chosen] * 255), 0, 255).astype(np.uint8),
    }


def from_store(path: str | Path, most: int) -> dict[str, NDArray[Any]]:
    """A table from stored conversations."""
    tokens, wanted, top_ids, top_chances = [], [], [], []
    for record in Store(path).read():
        tokens.append(record.tokens)
        wanted.append(record.roles[1:] != GIVEN)
        top_ids.append(record.top_ids[:, :CANDIDATES])
        top_chances.append(np.exp(record.top_logprobs[:, :CANDIDATES].astype(np.float32)))
    if not tokens:
        raise ValueError(f"{path} holds no conversations; make some with outrider train-mtp")
    print(f"{sum(map(len, tokens))} tokens in {len(tokens)} conversations", file=sys.stderr)
    return build(tokens, wanted, top_ids, top_chances, most)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from outrider.models.loader import DEFAULT_MODEL, load_checkpoint
    from outrider.spec_decode.phrases import save_phrases, vocabulary_name

    parser = argparse.ArgumentParser(prog="python -m outrider.training.phrases", description=__doc__)
    parser.add_argument("data", help="folder of conversations, as train-mtp makes them")
    parser.add_argument("out", help="file to write (.npz)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose conversations they are")
    parser.add_argument("--most", type=int, default=250_000, help="contexts to keep")
    chosen = parser.parse_args(arguments)
    table = from_store(chosen.data, chosen.most)
    token_bytes = load_checkpoint(chosen.model).tokenizer.token_bytes()
    save_phrases(chosen.out, table, vocabulary_name(token_bytes))
    size = Path(chosen.out).stat().st_size
    print(f"{len(table['fingerprints'])} contexts, {size / 2**20:.2f} MiB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
