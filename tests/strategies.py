"""Everything a request can ask, at random, and traffic that bites.

What makes it bite: a vocabulary of four, prompts that extend earlier prompts and outputs, a pool in which the
largest request just fits, arrivals and cancellations in any step. A new parameter is added here in the
same change, so that every property is tested in combination with it.

A load is a function of one seed, which is what a failing test prints. (Drawing every field through
Hypothesis costs five times the run itself, and shrinking a load takes minutes.)
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeVar

from fakes import Expected, plain_decode
from grammar_oracle import random_grammar
from hypothesis import strategies as st

from outrider.request import AddRequest, SamplingParams, SpeculationParams

MAX_MODEL_LEN = 40
STOPS = ["a", "aé", "éa", "aaa", "éé", "aéaé", "é"]
T = TypeVar("T")


def random_params(rng: random.Random) -> SamplingParams:
    """Any combination of parameters; each is at its default two times in three."""

    def some(usual: T, *others: T) -> T:
        return rng.choice(others) if rng.random() < 1 / 3 else usual

    def ids(most: int) -> list[int]:
        return [rng.randrange(4) for _ in range(rng.randint(1, most))]

    max_tokens = rng.choice([None, rng.randint(1, 20), rng.randint(8, 20)])
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 2.0]),
        top_k=some(0, 1, 2, 3),
        top_p=some(1.0, 0.3, 0.7, 0.95),
        min_p=some(0.0, 0.05, 0.3),
        presence_penalty=some(0.0, -1.5, 0.5, 2.0),
        frequency_penalty=some(0.0, -0.5, 0.5, 1.5),
        repetition_penalty=some(1.0, 0.7, 1.3, 2.0),
        logit_bias=some({}, {rng.randrange(4): rng.choice([-100.0, -1.0, 2.0])}),
        min_tokens=some(0, min(rng.randint(1, 8), max_tokens or 8)),
        bad_words=some([], [ids(3)], [ids(3), ids(2)]),
        stop=some([], [rng.choice(STOPS)], rng.sample(STOPS, 3)),
        stop_token_ids=some([], ids(2)),
        include_stop_str_in_output=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.5,
        skip_special_tokens=rng.random() < 0.5,
        seed=rng.getrandbits(64),
        logprobs=some(None, 0, 1, 4),
        prompt_logprobs=some(None, 0, 2),
        grammar=random_grammar(rng) if rng.random() < 1 / 3 else None,
        speculation=some(
            None, SpeculationParams(method="off"), SpeculationParams(max_draft_tokens=rng.randrange(4))
        ),
    )


sampling_params = st.integers(0, 2**32 - 1).map(lambda seed: random_params(random.Random(seed)))


@dataclass(frozen=True)
class Arrival:
    """One request of the traffic, and what it must get."""

    request: AddRequest
    expected: Expected
    at_step: int
    cancel_at_step: int | None


@dataclass(frozen=True)
class Traffic:
    """Requests, an engine too small for them, and a proposer that is against them."""

    seed: int
    arrivals: list[Arrival] = field(repr=False)
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prompt_tokens_beside_decode: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    max_draft_tokens: int
    hit: float  # how often a draft is right
    misbehave: bool

    @property
    def answers(self) -> dict[str, list[int]]:
        return {a.request.request_id: a.expected.token_ids for a in self.arrivals}


def random_prompt(rng: random.Random, earlier: list[Arrival]) -> list[int]:
    """Fresh tokens, or an earlier prompt with some of its output, cut somewhere and gone on with."""
    fresh = [rng.randrange(4) for _ in range(rng.randint(1, 12))]
    if not earlier or rng.random() < 0.25:
        return fresh
    base = rng.choice(earlier)
    whole = [*base.request.prompt_token_ids, *base.expected.token_ids]
    cut = len(whole) if rng.random() < 0.5 else rng.randint(1, len(whole))
    return [*whole[:cut], *fresh[: rng.randint(0, 4)]][: MAX_MODEL_LEN - 1]


def random_arrival(rng: random.Random, index: int, earlier: list[Arrival]) -> Arrival:
    params = random_params(rng)
    prompt = random_prompt(rng, earlier)
    request = AddRequest(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        params=params,
        arrival_time=0.0,
        priority=rng.choice([0, 0, 0, 0, -1, 1, 2]),
        cache_salt=rng.choice(["", "", "", "s", "t"]),
    )
    assert params.seed is not None
    expected = plain_decode(prompt, params, params.seed, MAX_MODEL_LEN)
    at_step = rng.randint(0, 25)
    cancel_at_step = at_step + rng.randint(0, 20) if rng.random() < 0.25 else None
    return Arrival(request, expected, at_step, cancel_at_step)


def random_traffic(seed: int, most_requests: int = 8) -> Traffic:
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    for index in range(rng.randint(1, most_requests)):
        arrivals.append(random_arrival(rng, index, arrivals))
    block_size = rng.choice([1, 2, 4, 4, 8, 16])
    # The largest request just fits, or there is a little more.
    num_blocks = -(-MAX_MODEL_LEN // block_size) + rng.choice([0, 0, 1, 3])
    chunked = rng.random() < 0.75
    max_num_seqs = rng.randint(1, 5)
    return Traffic(
        seed=seed,
        arrivals=arrivals,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + (rng.randint(0, 20) if chunked else MAX_MODEL_LEN),
        max_prompt_tokens_beside_decode=rng.randint(1, 20),
        enable_prefix_caching=rng.random() < 0.8,
        enable_chunked_prefill=chunked,
        max_draft_tokens=rng.randint(0, 9),
        hit=rng.choice([0.0, 0.5, 0.8, 1.0]),
        misbehave=rng.random() < 0.2,
    )


traffic = st.integers(0, 2**32 - 1).map(random_traffic)
small_traffic = st.integers(0, 2**32 - 1).map(lambda seed: random_traffic(seed, most_requests=3))
