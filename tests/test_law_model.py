"""The law on the real model: whatever the engine does, every request gets the tokens of plain decoding alone.

No tolerance anywhere: ids, texts, ends and log-probabilities are equal, bit for bit. The sample runs with
`-m model`; the whole (200 prompts) is `slow`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.llm import LLM, Completion
from outrider.request import SamplingParams
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts

TOPICS = ["the tides", "sourdough bread", "a lighthouse", "prime numbers", "winter in Norway", "old maps",
          "bees", "a lost umbrella", "the printing press", "jazz", "glaciers", "a chess game"]  # fmt: skip
TEMPLATES = [
    "Why do people care about {a}? Answer in one sentence.",
    "Write a short list of five facts about {a}, then one about {b}.",
    "Repeat this sentence three times: I read about {a} and {b} on the same day, and {a} won.",
    "Rewrite politely and keep every other word: Give me the book on {a}. Give me the book on {b}. Now.",
    "Translate to French: Tomorrow we shall talk about {a}, not about {b}.",
    "Fix the bug and print the whole function again:\n\ndef mean(values):\n    # used for {a}\n"
    "    total = 0\n    for value in values:\n        total += value\n    return total / len(value)\n",
    "Summarise: {a} came first. Then came {b}. People compared {a} with {b} for years, until "
    "{b} was forgotten. Today hardly anyone remembers {b}, while {a} is taught in every school.",
    "Continue: one, {a}; two, {b}; three, {a}; four, {b}; five,",
]
SYSTEM = [
    None,
    "You are a careful assistant who answers briefly.",
    "You are a careful assistant who answers briefly, in the words of the question wherever that is "
    "possible, and never adds an opinion, a greeting or an apology to the answer that was asked for.",
]


def conversation(rng: random.Random) -> list[dict[str, str]]:
    a, b = rng.sample(TOPICS, 2)
    messages = [{"role": "user", "content": rng.choice(TEMPLATES).format(a=a, b=b)}]
    system = rng.choice(SYSTEM)
    return [{"role": "system", "content": system}, *messages] if system else messages


@dataclass(frozen=True)
class Work:
    """What is asked: every prompt with every way of sampling, mixed."""

    prompts: list[list[dict[str, str]]]
    params: list[SamplingParams]

    def part(self, indices: Sequence[int]) -> Work:
        return Work([self.prompts[i] for i in indices], [self.params[i] for i in indices])


def make_work(num_prompts: int, max_tokens: int) -> Work:
    rng = random.Random(0)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3,
         "repetition_penalty": 1.1},
    ]  # fmt: skip
    prompts = [conversation(rng) for _ in range(num_prompts)]
    asked = [(prompt, way) for prompt in prompts for way in ways]
    rng.shuffle(asked)
    return Work(
        [prompt for prompt, _ in asked],
        [
            SamplingParams(max_tokens=max_tokens, seed=i, logprobs=2 if i % 4 == 0 else None, **way)
            for i, (_, way) in enumerate(asked)
        ],
    )


def answers(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in completions]


class Adversary:
    """Knows the answers, and tells them right three times in four."""

    needs_hidden = False

    def __init__(self, completions: list[Completion], vocab_size: int) -> None:
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
        length = min(self.rng.randint(0, 8), limit, len(answer))
        if not length:
            return NO_DRAFTS
        tokens = [
            t if self.rng.random() < 0.75 else self.rng.randrange(self.vocab_size) for t in answer[:length]
        ]
        return Drafts.chain(tokens, [0.5] * length, "adversary")

    def observe(self, results: Any, hidden: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "adaptive": False, "prompt_lookup_min": 1}
OFF = {"method": "off"}
PLAIN: dict[str, Any] = {
    "speculative_config": OFF,
    "num_threads": 2,
    "max_model_len": 1024,
    "num_kv_blocks": 2048,
}


@dataclass(frozen=True)
class Reference:
    work: Work
    completions: list[Completion]


def reference(num_prompts: int, max_tokens: int) -> Reference:
    """Plain decoding, each request alone, with an empty prefix cache."""
    work = make_work(num_prompts, max_tokens)
    with LLM(**PLAIN, enable_prefix_caching=False) as llm:
        completions = [
            llm.chat([prompt], each)[0] for prompt, each in zip(work.prompts, work.params, strict=True)
        ]
        assert llm.engine.stats()["num_preemptions"] == 0
    return Reference(work, completions)


@pytest.fixture(scope="module")
def sample(builtin_model: Path) -> Iterator[Reference]:
    yield reference(num_prompts=6, max_tokens=20)


@pytest.fixture(scope="module")
def whole(builtin_model: Path) -> Iterator[Reference]:
    yield reference(num_prompts=200, max_tokens=48)


# What must have happened, and the options that make it happen.
VARIANTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a batch of 32": ({"max_num_seqs": 32}, ()),
    "ngram, batch of 32": ({"max_num_seqs": 32, "speculative_config": NGRAM}, ("accepted", "rejected")),
    "ngram, one at a time": ({"max_num_seqs": 1, "speculative_config": NGRAM}, ("accepted", "rejected")),
    "the default": ({"speculative_config": {"method": "auto"}}, ()),
    "naive": ({"speculative_config": {"method": "naive"}}, ()),
    "chunks of 16, blocks of 16": (
        {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 16, "speculative_config": NGRAM},
        ("accepted",),
    ),
    "chunks of 100, blocks of 64": ({"max_num_batched_tokens": 100, "block_size": 64}, ()),
    "chunks of 512, blocks of 128": (
        {"max_num_batched_tokens": 512, "block_size": 128, "speculative_config": NGRAM},
        ("accepted",),
    ),
    "one thread": ({"num_threads": 1, "speculative_config": NGRAM}, ("accepted",)),
    "preemptions": (
        {"num_kv_blocks": 16, "block_size": 16, "max_model_len": 256, "speculative_config": NGRAM},
        ("preemptions", "accepted"),
    ),
    "no prefix cache": ({"enable_prefix_caching": False, "speculative_config": NGRAM}, ("accepted",)),
}


def events(llm: LLM) -> dict[str, int]:
    stats = llm.engine.stats()
    accepted = sum(stats["num_accepted_tokens"].values())
    return {
        "accepted": accepted,
        "rejected": sum(stats["num_draft_tokens"].values()) - accepted,
        "preemptions": stats["num_preemptions"],
        "prefix hits": stats["prefix_cache_hits"],
    }


def check_variant(expected: Reference, options: dict[str, Any], must_happen: tuple[str, ...]) -> None:
    with LLM(**(PLAIN | options)) as llm:
        if "preemptions" in must_happen:  # admit with no room to grow
            llm.engine.scheduler.leaves_room = False
        given = llm.chat(expected.work.prompts, expected.work.params)
        happened = events(llm)
        llm.engine.scheduler.check()
    assert answers(given) == answers(expected.completions)
    for name in must_happen:
        assert happened[name] > 2, f"{name} hardly happened: {happened}"


def check_warm_cache(expected: Reference) -> None:
    with LLM(**(PLAIN | {"speculative_config": NGRAM, "block_size": 16})) as llm:
        for _ in range(2):
            before = events(llm)["prefix hits"]
            given = llm.chat(expected.work.prompts, expected.work.params)
            assert answers(given) == answers(expected.completions)
        num_prompt_tokens = sum(len(c.prompt_token_ids) for c in given)
        assert events(llm)["prefix hits"] - before > num_prompt_tokens // 2
        assert sum(c.usage.cached_tokens for c in given) > num_prompt_tokens // 2


def check_adversary(expected: Reference) -> None:
    with LLM(**(PLAIN | {"speculative_config": NGRAM, "max_num_seqs": 24})) as llm:
        llm.engine.drafting.proposer = Adversary(expected.completions, len(llm.engine.vocabulary))
        given = llm.chat(expected.work.prompts, expected.work.params)
        happened = events(llm)
    assert answers(given) == answers(expected.completions)
    assert happened["accepted"] > 100 and happened["rejected"] > 100


@pytest.mark.model
@pytest.mark.parametrize("name", VARIANTS)
def test_the_sample_gets_the_same_tokens(sample: Reference, name: str) -> None:
    check_variant(sample, *VARIANTS[name])


@pytest.mark.model
def test_the_sample_gets_the_same_tokens_from_a_warm_prefix_cache(sample: Reference) -> None:
    check_warm_cache(sample)


@pytest.mark.model
def test_the_sample_gets_the_same_tokens_against_an_adversary(sample: Reference) -> None:
    check_adversary(sample)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", VARIANTS)
def test_all_prompts_get_the_same_tokens(whole: Reference, name: str) -> None:
    check_variant(whole, *VARIANTS[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_prompts_get_the_same_tokens_from_a_warm_prefix_cache(whole: Reference) -> None:
    check_warm_cache(whole)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_prompts_get_the_same_tokens_against_an_adversary(whole: Reference) -> None:
    check_adversary(whole)
