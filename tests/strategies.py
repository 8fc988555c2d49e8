"""Hypothesis strategies for everything a request can ask, and for traffic that bites.

What makes it bite: a vocabulary of four, prompts that extend earlier prompts and outputs, a pool in which the
largest request just fits, arrivals and cancellations in any step. A new parameter is added here in the
same change, so that every property is tested in combination with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from fakes import Expected, plain_decode
from outrider.request import AddRequest, SamplingParams, SpeculationParams

MAX_MODEL_LEN = 40

tokens = st.integers(0, 3)


def mostly(usual: object, others: st.SearchStrategy) -> st.SearchStrategy:
    """The usual value two times in three: a request with everything set at once tests less."""
    return st.one_of(st.just(usual), st.just(usual), others)


sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.one_of(st.none(), st.integers(1, 20), st.integers(8, 20)),
    temperature=st.one_of(st.just(0.0), st.sampled_from([0.3, 0.7, 1.0, 2.0])),
    top_k=mostly(0, st.integers(1, 3)),
    top_p=mostly(1.0, st.sampled_from([0.3, 0.7, 0.95])),
    min_p=mostly(0.0, st.sampled_from([0.05, 0.3])),
    presence_penalty=mostly(0.0, st.sampled_from([-1.5, 0.5, 2.0])),
    frequency_penalty=mostly(0.0, st.sampled_from([-0.5, 0.5, 1.5])),
    repetition_penalty=mostly(1.0, st.sampled_from([0.7, 1.3, 2.0])),
    logit_bias=mostly({}, st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0]), max_size=2)),
    min_tokens=mostly(0, st.integers(1, 8)),
    bad_words=mostly([], st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=2)),
    stop=mostly([], st.lists(st.sampled_from(["a", "aé", "éa", "aaa", "éé", "aéaé", "é"]), min_size=1, max_size=3)),
    stop_token_ids=mostly([], st.lists(tokens, min_size=1, max_size=2)),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    logprobs=mostly(None, st.integers(0, 4)),
    speculation=mostly(
        None,
        st.builds(
            SpeculationParams,
            method=st.sampled_from([None, "off"]),
            max_draft_tokens=st.one_of(st.none(), st.integers(0, 3)),
        ),
    ),
).filter(lambda p: p.max_tokens is None or p.min_tokens <= p.max_tokens)


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

    arrivals: list[Arrival]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prompt_tokens_beside_decode: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    max_draft_tokens: int
    hit: float
    misbehave: bool
    proposer_seed: int

    @property
    def answers(self) -> dict[str, list[int]]:
        return {a.request.request_id: a.expected.token_ids for a in self.arrivals}

    def proposer_rng(self) -> random.Random:
        return random.Random(self.proposer_seed)


@st.composite
def prompts(draw: st.DrawFn, earlier: list[Arrival]) -> list[int]:
    """Fresh tokens, or an earlier prompt with some of its output, cut somewhere and gone on with."""
    fresh = draw(st.lists(tokens, min_size=1, max_size=12))
    if not earlier or not draw(st.integers(0, 2)):
        return fresh
    base = draw(st.sampled_from(earlier))
    whole = [*base.request.prompt_token_ids, *base.expected.token_ids]
    cut = draw(st.one_of(st.just(len(whole)), st.integers(1, len(whole))))
    prompt = whole[:cut] + (fresh[: draw(st.integers(0, 4))])
    return prompt[: MAX_MODEL_LEN - 1]


@st.composite
def traffic(draw: st.DrawFn) -> Traffic:
    arrivals: list[Arrival] = []
    for i in range(draw(st.integers(1, 7))):
        prompt = draw(prompts(arrivals))
        params = draw(sampling_params)
        request = AddRequest(
            request_id=f"r{i}",
            prompt_token_ids=prompt,
            params=params,
            arrival_time=0.0,
            priority=draw(mostly(0, st.integers(-2, 2))),
            cache_salt=draw(mostly("", st.sampled_from(["s", "t"]))),
        )
        assert params.seed is not None
        expected = plain_decode(prompt, params, params.seed, MAX_MODEL_LEN)
        at_step = draw(st.integers(0, 25))
        cancel = draw(mostly(None, st.integers(0, 20)))
        arrivals.append(Arrival(request, expected, at_step, None if cancel is None else at_step + cancel))

    block_size = draw(st.sampled_from([1, 2, 4, 4, 8, 16]))
    # The largest request just fits, or there is a little more.
    smallest = -(-MAX_MODEL_LEN // block_size)
    chunked = draw(mostly(True, st.just(False)))
    max_num_seqs = draw(st.integers(1, 5))
    return Traffic(
        arrivals=arrivals,
        block_size=block_size,
        num_blocks=smallest + draw(st.integers(0, 3)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)) if chunked else MAX_MODEL_LEN + max_num_seqs,
        max_prompt_tokens_beside_decode=draw(st.integers(1, 20)),
        enable_prefix_caching=draw(mostly(True, st.just(False))),
        enable_chunked_prefill=chunked,
        max_draft_tokens=draw(st.integers(0, 6)),
        hit=draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])),
        misbehave=draw(mostly(False, st.just(True))),
        proposer_seed=draw(st.integers(0, 2**32)),
    )
