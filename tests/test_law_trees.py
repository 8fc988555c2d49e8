"""The law on the real model when drafts are trees: whatever their shape, tokens are those of plain decoding.

Run with `-m model`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import tree_parents
from test_law_model import PLAIN, answers, events, make_work

import outrider.engine.engine as engine_module
from outrider.llm import LLM, Completion
from outrider.request import SamplingParams
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts

MOST_NODES = 16
TREES = {"method": "ngram", "num_speculative_tokens": MOST_NODES, "adaptive": False}

# (rng, number of nodes) -> parents, and which nodes carry the right token of their depth
Shape = Callable[[random.Random, int], tuple[tuple[int, ...], list[bool]]]


def all_wrong(rng: random.Random, size: int) -> tuple[tuple[int, ...], list[bool]]:
    return tree_parents(rng, size), [False] * size


def all_right(rng: random.Random, size: int) -> tuple[tuple[int, ...], list[bool]]:
    """So siblings are twins, and the walk takes the first of them."""
    return tree_parents(rng, size), [True] * size


def right_is_last(rng: random.Random, size: int) -> tuple[tuple[int, ...], list[bool]]:
    """Three siblings at every depth, the last of which is right and goes on."""
    return tuple(3 * (i // 3) - 1 for i in range(size)), [i % 3 == 2 for i in range(size)]


def two_chains(rng: random.Random, size: int) -> tuple[tuple[int, ...], list[bool]]:
    """A chain that is wrong from some node on, and one that leaves it there and is right."""
    good, first = rng.randint(0, size // 2), size // 2
    parents = [*range(-1, first - 1), min(good, first) - 1, *range(first, size - 1)]
    return tuple(parents), [i < good or i >= first for i in range(size)]


def any_tree(rng: random.Random, size: int) -> tuple[tuple[int, ...], list[bool]]:
    return tree_parents(rng, size), [rng.random() < 0.6 for _ in range(size)]


SHAPES: list[Shape] = [all_wrong, all_right, right_is_last, two_chains, any_tree]


class Gardener:
    """Knows the answers, and grows trees of one shape with them."""

    needs_hidden = False

    def __init__(self, shape: Shape, completions: Sequence[Completion], vocab_size: int) -> None:
        self.shape = shape
        self.rng = random.Random(0)
        self.answers = {
            (tuple(c.prompt_token_ids), c.seed): c.prompt_token_ids + c.token_ids for c in completions
        }
        self.vocab_size = vocab_size

    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Drafts]:
        return [self._drafts(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _drafts(self, request: Any, limit: int) -> Drafts:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        answer = self.answers[prompt, request.seed][request.num_tokens :]
        size = min(self.rng.choice([1, 3, 6, 8, MOST_NODES]), limit)
        if not size:
            return NO_DRAFTS
        parents, right = self.shape(self.rng, size)
        depths = Drafts((0,) * size, parents).depths()
        tokens = [
            answer[depth] if good and depth < len(answer) else self.rng.randrange(self.vocab_size)
            for depth, good in zip(depths, right, strict=True)
        ]
        survival = tuple(0.9 ** (depth + 1) for depth in depths)
        return Drafts(tuple(tokens), parents, survival, ("gardener",) * size)

    def observe(self, results: Any, hidden: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Reference:
    """Plain decoding of 24 requests, each alone, and of as many that go on where those ended."""

    first: list[Completion]
    second: list[Completion]
    params: list[SamplingParams]


def second_prompt(completion: Completion) -> list[int]:
    return [*completion.prompt_token_ids, *completion.token_ids, *completion.prompt_token_ids[:3]]


@pytest.fixture(scope="module")
def plain(builtin_model: Path) -> Iterator[Reference]:
    work = make_work(num_prompts=8, max_tokens=32)
    with LLM(**PLAIN, enable_prefix_caching=False) as llm:
        first = [llm.chat([prompt], each)[0] for prompt, each in zip(work.prompts, work.params, strict=True)]
        second = [llm.generate(second_prompt(c), each)[0] for c, each in zip(first, work.params, strict=True)]
    yield Reference(first, second, work.params)


def grow(plain: Reference, shape: Shape, options: dict[str, Any], again: bool = False) -> dict[str, int]:
    """Both rounds, or the first one alone, with trees; returns what happened."""
    with LLM(**(PLAIN | {"speculative_config": TREES, "max_num_seqs": 8} | options)) as llm:
        if "num_kv_blocks" in options:  # admit with no room to grow
            llm.engine.scheduler.leaves_room = False
        llm.engine.drafting.proposer = Gardener(
            shape, [*plain.first, *plain.second], len(llm.engine.vocabulary)
        )
        moves = count_moves(llm)
        given = llm.generate([c.prompt_token_ids for c in plain.first], plain.params)
        assert answers(given) == answers(plain.first)
        if again:
            given = llm.generate([second_prompt(c) for c in plain.first], plain.params)
            assert answers(given) == answers(plain.second)
        llm.engine.scheduler.check()
        assert llm.engine.stats()["num_draft_errors"] == 0
        return events(llm) | {
            "moves": len(moves),
            "reused": sum(
                c.usage.cached_tokens - len(a.prompt_token_ids)
                for c, a in zip(given, plain.first, strict=True)
            ),
        }


def count_moves(llm: LLM) -> list[int]:
    moves: list[int] = []
    move_slots = llm.engine.runner.executable.move_slots

    def counted(from_slots: Any, to_slots: Any) -> None:
        moves.extend(from_slots.tolist())
        move_slots(from_slots, to_slots)

    llm.engine.runner.executable.move_slots = counted  # type: ignore[method-assign]
    return moves


@pytest.mark.model
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_trees_of_every_shape_change_no_token(plain: Reference, shape: Shape) -> None:
    happened = grow(plain, shape, {})
    assert happened["rejected"] > 50
    if shape is not all_wrong:
        assert happened["accepted"] > 100 and happened["moves"] > 10


@pytest.mark.model
@pytest.mark.parametrize("block_size", [16, 128])
def test_what_follows_accepted_branches_reads_them_from_the_prefix_cache(
    plain: Reference, block_size: int
) -> None:
    happened = grow(plain, right_is_last, {"block_size": block_size}, again=True)
    assert happened["moves"] > 100
    if block_size == 16:
        assert happened["reused"] > 24 * 8  # tokens of answers, most of them drafted in branches


@pytest.mark.model
def test_trees_in_a_pool_that_is_too_small_change_no_token(plain: Reference) -> None:
    options = {"num_kv_blocks": 16, "block_size": 16, "max_model_len": 256}
    happened = grow(plain, any_tree, options)
    assert happened["preemptions"] > 2 and happened["accepted"] > 50 and happened["moves"] > 20


@pytest.mark.model
def test_trees_beside_chunks_of_prompts_on_one_thread_change_no_token(plain: Reference) -> None:
    happened = grow(plain, two_chains, {"max_num_batched_tokens": 40, "num_threads": 1})
    assert happened["accepted"] > 100 and happened["moves"] > 10


@pytest.mark.model
def test_it_is_the_moves_that_keep_the_law(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "moves_of", lambda plan, walks, block_size: None)
    with pytest.raises(AssertionError):
        grow(plain, right_is_last, {})
