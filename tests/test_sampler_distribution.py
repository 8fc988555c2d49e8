"""What the sampler draws is distributed as it says: exact probabilities by enumeration, chi-square at
fixed seeds. A draw is a function of (seed, position), so both are varied in turn."""

from __future__ import annotations

import numpy as np
import outrider._native as native
import pytest
import sampler_reference as reference
from sampler_reference import Settings
from scipy import stats
from test_sampler import batch, make_state

from outrider.sampling.sampler import Sampler
from outrider.sampling.verifier import verify
from outrider.spec_decode.proposer import Drafts

NUM_DRAWS = 20_000
LOGITS = np.array([1.0, 0.2, -0.5, 1.7, -3.0, 0.9, 0.9], np.float32)
PROMPT, OUTPUT = [0, 3], [3, 3, 5]

CASES = [
    Settings(),
    Settings(temperature=0.6),
    Settings(temperature=1.7),
    Settings(top_k=3),
    Settings(top_p=0.8),
    Settings(min_p=0.3),
    Settings(temperature=1.3, top_k=6, top_p=0.9, min_p=0.1),
    Settings(presence_penalty=1.0, frequency_penalty=0.5),
    Settings(repetition_penalty=1.5),
    Settings(logit_bias={4: 4.0, 3: -2.0}),
    Settings(min_tokens=9, ending=[3], bad_words=[[5, 0], [6]]),
    Settings(temperature=0.8, top_p=0.95, repetition_penalty=1.2, presence_penalty=-0.5, logit_bias={1: 1.0}),
]


def assert_distributed(tokens: np.ndarray, expected: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(expected))
    possible = expected > 0
    assert not counts[~possible].any(), "a token that cannot come was drawn"
    assert stats.chisquare(counts[possible], expected[possible] * counts.sum()).pvalue > 1e-3


def draws_over_positions(config: Settings, logits: np.ndarray, num: int, seed: int = 5) -> np.ndarray:
    state = make_state(config, seed=seed, prompt=PROMPT, output=OUTPUT)
    rows = batch([state], range(num), row_state=[0] * num)
    return np.array(Sampler().sample(np.tile(logits, (num, 1)), rows).token_ids)


@pytest.mark.parametrize("config", CASES, ids=str)
def test_draws_have_the_exact_distribution(config: Settings) -> None:
    row = reference.processed(LOGITS, config, PROMPT, OUTPUT)
    expected = reference.probabilities(row, config)
    assert_distributed(draws_over_positions(config, LOGITS, NUM_DRAWS), expected)
    num_seeds = 4000
    states = [make_state(config, seed=seed, prompt=PROMPT, output=OUTPUT) for seed in range(num_seeds)]
    rows = batch(states, [12] * num_seeds)
    tokens = Sampler().sample(np.tile(LOGITS, (num_seeds, 1)), rows).token_ids
    assert_distributed(np.array(tokens), expected)


def test_draws_over_many_blocks_have_the_exact_distribution() -> None:
    # 700 tokens: likely and unlikely ones are found by different searches; groups of ids are compared.
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(700) * 2).astype(np.float32)
    expected = reference.probabilities(logits, Settings())
    groups = np.argsort(np.argsort(-expected)) // 10 * 10  # by rank of probability
    tokens = draws_over_positions(Settings(), logits, NUM_DRAWS)
    by_group = np.bincount(groups, weights=expected)
    assert_distributed(groups[tokens] // 10, by_group[by_group > 0])


def test_neighbouring_positions_seeds_and_tokens_are_independent() -> None:
    logits = np.zeros(5, np.float32)
    tokens = draws_over_positions(Settings(), logits, NUM_DRAWS)
    other = draws_over_positions(Settings(), logits, NUM_DRAWS, seed=6)
    for first, second in ((tokens[:-1], tokens[1:]), (tokens, other)):
        table = np.zeros((5, 5))
        np.add.at(table, (first, second), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_noise_is_gumbel_over_tokens_positions_and_seeds() -> None:
    ids = np.arange(NUM_DRAWS, dtype=np.int32)
    one = np.zeros(1, np.int32)
    samples = [
        native.gumbel_noise(1, 2, ids),
        np.concatenate([native.gumbel_noise(1, position, one) for position in range(NUM_DRAWS)]),
        np.concatenate([native.gumbel_noise(seed, 2, one) for seed in range(NUM_DRAWS)]),
    ]
    for sample in samples:
        assert stats.kstest(sample, stats.gumbel_r.cdf).pvalue > 1e-3
    # Tokens of one coarse group share a Philox block, but not their noise.
    for distance in (1, 4, 16):
        assert abs(stats.spearmanr(samples[0][:-distance], samples[0][distance:]).statistic) < 0.03


@pytest.mark.parametrize("draft", range(len(LOGITS)))
def test_a_drafted_token_is_accepted_as_often_as_it_is_likely(draft: int) -> None:
    config = Settings(temperature=0.9, top_p=0.9)
    expected = reference.probabilities(LOGITS, config)[draft]
    num = 5000
    state = make_state(config, seed=2)
    rows = batch(
        [state], np.repeat(np.arange(num), 2) + np.tile([0, 1], num), [0] * 2 * num, [[], [draft]] * num
    )
    sampled = np.array(Sampler().sample(np.tile(LOGITS, (2 * num, 1)), rows).token_ids).reshape(num, 2)
    drafts = Drafts.chain([draft], [0.5], "test")
    accepted = sum(len(verify(drafts, window.tolist()).path) for window in sampled)
    assert stats.binomtest(accepted, num, expected).pvalue > 1e-3
