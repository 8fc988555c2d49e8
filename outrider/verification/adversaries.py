"""Drafters that know the answers and use them for and against the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from outrider.spec_decode.proposer import NO_DRAFTS, Drafts, RequestView, ResultView

Answers = dict[tuple[tuple[int, ...], int], list[int]]  # (prompt, seed) -> what plain decoding gave
SOURCE = "recorded"


class Adversary:
    """Drafts from recorded answers. What it drafts is up to `make`, of (next tokens, random, vocabulary)."""

    needs_hidden = False

    def __init__(
        self,
        answers: Answers,
        vocab_size: int,
        make: Callable[[Sequence[int], random.Random, int], Drafts],
    ) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._make = make
        self._rng = random.Random(0)

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        return [self._drafts(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _drafts(self, request: RequestView, limit: int) -> Drafts:
        token_ids = request.token_ids
        prompt = tuple(token_ids[: request.num_prompt_tokens])
        answer = self._answers.get((prompt, request.params.seed or 0), [])
        ahead = answer[len(token_ids) - len(prompt) :]
        return self._make(ahead[:limit], self._rng, self._vocab_size).first(limit) if ahead else NO_DRAFTS

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


def all_right(ahead: Sequence[int], rng: random.Random, vocab_size: int) -> Drafts:
    """An oracle."""
    return _chain(ahead[: rng.randint(1, 12)])


def all_wrong(ahead: Sequence[int], rng: random.Random, vocab_size: int) -> Drafts:
    """Never the model's token."""
    return _chain([(token + rng.randrange(1, vocab_size)) % vocab_size for token in ahead[:6]])


def at_random(ahead: Sequence[int], rng: random.Random, vocab_size: int) -> Drafts:
    """Right three times in four."""
    length = rng.randint(1, 8)
    return _chain([t if rng.random() < 0.75 else rng.randrange(vocab_size) for t in ahead[:length]])


def as_trees(ahead: Sequence[int], rng: random.Random, vocab_size: int) -> Drafts:
    """A tree in which the right path, as far as it goes, stands at a random place among wrong branches."""
    token_ids: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    right = -1  # the last node of the right path
    depth = 0
    for _ in range(rng.randint(2, 12)):
        if depth < len(ahead) and rng.random() < 0.5:
            parent, token, right = right, ahead[depth], len(token_ids)
            depth += 1
        else:
            parent, token = rng.randrange(-1, len(token_ids)), rng.randrange(vocab_size)
        token_ids.append(token)
        parents.append(parent)
        survival.append(0.9 * (survival[parent] if parent >= 0 else 1.0))
    return Drafts(tuple(token_ids), tuple(parents), tuple(survival), (SOURCE,) * len(token_ids))


def broken(ahead: Sequence[int], rng: random.Random, vocab_size: int) -> Drafts:
    """Fails in all ways in turn: exceptions, ids out of range, impossible trees; sometimes right."""
    way = rng.randrange(5)
    if way == 0:
        raise RuntimeError("a drafter that fails on purpose")
    if way == 1:
        return _chain([vocab_size + 7, -3])
    if way == 2:
        return Drafts((1, 2), (1, 0), (0.5, 0.5), (SOURCE,) * 2)
    return _chain(ahead[:4])


def _chain(token_ids: Sequence[int]) -> Drafts:
    return Drafts.chain(token_ids, [0.9 ** (i + 1) for i in range(len(token_ids))], SOURCE)
