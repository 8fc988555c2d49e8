"""The native sampler against a plain one, and the properties that make it the verifier."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import outrider._native as native
import pytest
import sampler_reference as reference
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from sampler_reference import Settings

from outrider.engine.batch import SamplingBatch
from outrider.request import SamplingParams
from outrider.sampling.sampler import Sampler

VOCAB = 49152
EXAMPLES = settings(max_examples=120, deadline=None)


def make_state(
    config: Settings,
    *,
    seed: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    num_logprobs: int = -1,
) -> native.SamplerState:
    state = native.SamplerState(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        repetition_penalty=config.repetition_penalty,
        logit_bias_ids=list(config.logit_bias),
        logit_bias_values=list(config.logit_bias.values()),
        min_tokens=config.min_tokens,
        masked_until_min_tokens=config.ending,
        bad_words=config.bad_words,
        seed=seed,
        num_logprobs=num_logprobs,
        prompt_token_ids=list(prompt),
    )
    state.append(list(output))
    return state


def batch(
    states: list[native.SamplerState],
    positions: Sequence[int],
    row_state: Sequence[int] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> SamplingBatch:
    prefixes = prefixes or [[]] * len(positions)
    return SamplingBatch(
        states,
        np.array(range(len(positions)) if row_state is None else row_state, np.int32),
        np.array(positions, np.int64),
        np.cumsum([0, *map(len, prefixes)], dtype=np.int32),
        np.array([token for prefix in prefixes for token in prefix], np.int32),
    )


def draw(row: np.ndarray, state: native.SamplerState, position: int = 0, prefix: Sequence[int] = ()) -> int:
    rows = batch([state], [position], prefixes=[prefix])
    return Sampler().sample(np.asarray(row, np.float32)[None], rows).token_ids[0]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Settings, list[int], list[int]]:
    """Logits with ties and holes, settings with everything in play, a prompt and an output."""
    vocab = draw(st.integers(4, 50))
    token = st.integers(0, vocab - 1)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = (rng.standard_normal(vocab) * draw(st.sampled_from([0.3, 3.0, 8.0]))).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    logits[rng.random(vocab) < draw(st.sampled_from([0.0, 0.0, 0.3, 0.95]))] = -np.inf
    tokens = st.lists(token, max_size=12)
    penalty = st.sampled_from([0.0, 0.0, -0.5, 0.25, 1.5])
    config = Settings(
        temperature=draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 49, 50, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.0, 0.3, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0])),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.8, 1.3])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.5, 2.0]), max_size=3)),
        min_tokens=draw(st.sampled_from([0, 0, 4, 9])),
        ending=draw(st.lists(token, max_size=2)),
        bad_words=draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=3)),
    )
    return logits, config, draw(tokens), draw(tokens)


# --- noise ---


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert native.philox4x32(counter, key) == expected == reference.philox4x32(counter, key)


@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 2**20), min_size=1, max_size=5)
)
@settings(max_examples=30, deadline=None)
def test_noise_is_a_function_of_seed_position_and_token(seed: int, position: int, tokens: list[int]) -> None:
    noise = native.gumbel_noise(seed, position, np.array(tokens, np.int32))
    expected = [reference.gumbel(seed, position, token) for token in tokens]
    # The reference's logarithm is the platform's: equal up to its last bits.
    np.testing.assert_allclose(noise, expected, rtol=1e-13, atol=1e-13)


# --- processors and filters, against the plain version ---


@given(cases())
@EXAMPLES
def test_processors_equal_the_plain_ones_bit_for_bit(case: tuple) -> None:
    logits, config, prompt, output = case
    state = make_state(config, prompt=prompt, output=output)
    row = native.processed_logits(logits, state, [])
    np.testing.assert_array_equal(row, reference.processed(logits, config, prompt, output))


@given(cases(), st.integers(0, 2**64 - 1), st.integers(0, 2**33))
@EXAMPLES
def test_a_token_equals_the_plain_samplers(case: tuple, seed: int, position: int) -> None:
    logits, config, prompt, output = case
    try:
        row = reference.processed(logits, config, prompt, output)
        expected = reference.sample(row, config, seed, position)
    except reference.Doubtful:
        assume(False)
    assert draw(logits, make_state(config, seed=seed, prompt=prompt, output=output), position) == expected


@given(cases(), st.data())
@EXAMPLES
def test_a_drafted_prefix_counts_like_emitted_tokens_bit_for_bit(case: tuple, data: st.DataObject) -> None:
    logits, config, prompt, output = case
    cut = data.draw(st.integers(0, len(output)))
    drafted = make_state(config, prompt=prompt, output=output[:cut])
    emitted = make_state(config, prompt=prompt, output=output)
    np.testing.assert_array_equal(
        native.processed_logits(logits, drafted, output[cut:]), native.processed_logits(logits, emitted, [])
    )
    for position in range(4):
        assert draw(logits, drafted, position, output[cut:]) == draw(logits, emitted, position)


@given(st.lists(cases(), min_size=2, max_size=6), st.integers(0, 2**64 - 1))
@settings(max_examples=30, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(cases: list[tuple], seed: int) -> None:
    vocab = min(len(case[0]) for case in cases)
    sampler = Sampler()
    logits = np.stack([case[0][:vocab] for case in cases])
    before = logits.copy()
    configs = [Settings(case[1].temperature, case[1].top_k, case[1].top_p, case[1].min_p) for case in cases]
    states = [make_state(config, seed=seed, num_logprobs=2) for config in configs]
    together = sampler.sample(logits, batch(states, range(len(states))))
    assert together.logprobs is not None
    for r, state in enumerate(states):
        alone = sampler.sample(logits[r : r + 1], batch([state], [r]))
        assert alone.token_ids == together.token_ids[r : r + 1]
        assert alone.logprobs == together.logprobs[r : r + 1]
    np.testing.assert_array_equal(logits, before)


# --- a large vocabulary: blocks, slabs, threads, instruction sets ---

LARGE = [
    Settings(temperature=0.0),
    Settings(),
    Settings(temperature=0.3),
    Settings(temperature=2.5),
    Settings(top_k=50),
    Settings(top_k=5000, temperature=2.0),
    Settings(top_p=0.9),
    Settings(top_p=0.99, temperature=1.5),
    Settings(min_p=0.05),
    Settings(
        temperature=0.8, top_k=100, top_p=0.95, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.4
    ),
]


def large_rows(num_rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Peaked and flat rows, with ties at the top in some."""
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((num_rows, vocab)) * rng.uniform(0.5, 4, (num_rows, 1))).astype(np.float32)
    rows[::2] = np.round(rows[::2] * 2) / 2
    return rows


def numpy_noise(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    return native.gumbel_noise(seed, position, tokens.astype(np.int32))


@pytest.mark.parametrize("config", LARGE, ids=str)
@pytest.mark.parametrize("vocab", [1003, VOCAB])
def test_a_large_row_is_searched_as_if_every_token_were_tried(config: Settings, vocab: int) -> None:
    prompt, output = list(range(0, 900, 7)), [3, 5, 3, 900]
    for r, logits in enumerate(large_rows(6, vocab)):
        state = make_state(config, seed=r, prompt=prompt, output=output)
        row = native.processed_logits(logits, state, [])
        token = draw(logits, state, position=r)
        if config.temperature == 0:
            assert token == np.argmax(row)
            continue
        values = reference.scaled(row, config.temperature)
        kept = reference.survivors(values, config)
        scores = values[kept].astype(np.float64) + numpy_noise(r, r, kept)
        assert token == kept[np.argmax(scores)]


def test_unlikely_tokens_win_by_their_noise_alone() -> None:
    # In flat rows over a large vocabulary almost every winner has a coarse noise byte of 255. The search must
    # find it wherever it is, the incomplete last block included.
    vocab, num = 5003, 1000
    logits = np.zeros((num, vocab), np.float32)
    logits[:, 17] = 3.0
    state = make_state(Settings(), seed=9)
    tokens = Sampler().sample(logits, batch([state], range(num), row_state=[0] * num)).token_ids
    ids = np.arange(vocab)
    for position, token in enumerate(tokens):
        assert token == np.argmax(logits[0] + numpy_noise(9, position, ids))
    assert len(set(tokens)) > num / 2 and max(tokens) >= vocab // 64 * 64


def test_rows_that_share_threads_equal_rows_alone() -> None:
    logits = large_rows(12, VOCAB)
    states = [make_state(LARGE[r % len(LARGE)], seed=r, num_logprobs=3) for r in range(12)]
    together = Sampler().sample(logits, batch(states, range(12)))
    assert together.logprobs is not None
    for r in range(12):
        alone = Sampler().sample(logits[r : r + 1], batch(states[r : r + 1], [r]))
        assert alone.token_ids == together.token_ids[r : r + 1]
        assert alone.logprobs == together.logprobs[r : r + 1]


def digest_of_many_draws() -> str:
    """Tokens and log-probabilities, to the bit, of rows that use every kernel."""
    digest = hashlib.sha256()
    for vocab in (257, 20001):
        for r, logits in enumerate(large_rows(4, vocab)):
            for config in LARGE:
                rows = batch([make_state(config, seed=r, prompt=range(200), num_logprobs=4)], [r])
                digest.update(repr(Sampler().sample(logits[None], rows)).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("isa", native.supported_isas())
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    code = "import test_sampler; print(test_sampler.digest_of_many_draws())"
    env = {**os.environ, "OUTRIDER_ISA": isa, "PYTHONPATH": os.path.dirname(__file__)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == digest_of_many_draws()


# --- ties, rows without a distribution ---


def test_equal_values_go_to_the_lowest_id() -> None:
    logits = np.zeros(300, np.float32)
    logits[[70, 200, 299]] = 1.0
    assert draw(logits, make_state(Settings(temperature=0.0))) == 70
    for position in range(20):
        assert draw(logits, make_state(Settings(top_k=1)), position) == 70
        assert draw(logits, make_state(Settings(top_k=2)), position) in (70, 200)
        assert draw(logits, make_state(Settings(top_k=4)), position) in (0, 70, 200, 299)


def test_top_p_of_equal_tokens_keeps_the_lowest_ids_that_reach_it() -> None:
    logits = np.zeros(8, np.float32)
    state = make_state(Settings(top_p=0.5))
    assert {draw(logits, state, position) for position in range(200)} == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 77, 199])
def test_a_row_with_nan_or_infinity_has_no_token_and_leaves_the_others_alone(
    temperature: float, bad: float, place: int
) -> None:
    logits = large_rows(3, 200)
    states = [make_state(Settings(temperature=temperature), seed=1, num_logprobs=1)]
    rows = batch(states, [5, 5, 5], row_state=[0, 0, 0])
    good = Sampler().sample(logits, rows)
    logits[1, place] = bad
    sampled = Sampler().sample(logits, rows)
    assert sampled.token_ids == [good.token_ids[0], -1, good.token_ids[2]]
    assert sampled.logprobs is not None and good.logprobs is not None
    assert sampled.logprobs == [good.logprobs[0], None, good.logprobs[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_masked_has_no_token(temperature: float) -> None:
    config = Settings(temperature=temperature, min_tokens=1, ending=[0, 1], bad_words=[[2], [1, 3]])
    logits = np.zeros(4, np.float32)
    assert draw(logits, make_state(config, prompt=[1])) == -1
    assert draw(logits, make_state(config, prompt=[0])) == 3
    assert draw(np.full(4, -np.inf), make_state(Settings(temperature=temperature))) == -1


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    logits = np.array([1.0, 3.0, 2.0, -80.0], np.float32)
    cold, hot = make_state(Settings(temperature=1e-30)), make_state(Settings(temperature=1e30))
    assert {draw(logits, cold, position) for position in range(100)} == {1}
    assert {draw(logits, hot, position) for position in range(100)} == {0, 1, 2, 3}


# --- log-probabilities ---


@given(cases(), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
@example((np.full(5, -np.inf), Settings(logit_bias={1: 1.0}), [], []), 2)
def test_logprobs_are_of_the_raw_distribution(case: tuple, num_top: int) -> None:
    logits, config, prompt, output = case
    state = make_state(config, prompt=prompt, output=output, num_logprobs=num_top)
    sampled = Sampler().sample(np.asarray(logits, np.float32)[None], batch([state], [3]))
    token = sampled.token_ids[0]
    assert sampled.logprobs is not None
    if token < 0:
        assert sampled.logprobs == [None]
        return
    found = sampled.logprobs[0]
    assert found is not None
    exact = logits.astype(np.float64) - logits.max()
    exact -= np.log(np.exp(exact).sum())
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert found.top_token_ids == order[: min(num_top, len(logits))]
    assert found.rank == order.index(token) + 1
    np.testing.assert_allclose(found.logprob, exact[token], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(found.top_logprobs, exact[found.top_token_ids], rtol=2e-6, atol=2e-6)


def test_logprobs_come_only_where_they_were_asked_for() -> None:
    logits = large_rows(3, 100)
    plain, asked = make_state(Settings()), make_state(Settings(), num_logprobs=0)
    assert Sampler().sample(logits[:1], batch([plain], [0])).logprobs is None
    mixed = Sampler().sample(logits, batch([plain, asked], [0, 1, 2], row_state=[0, 1, 0])).logprobs
    assert mixed is not None and mixed[0] is None and mixed[2] is None
    assert mixed[1] is not None and mixed[1].top_token_ids == [] and mixed[1].rank >= 1


def test_a_mask_that_hides_a_nan_leaves_a_token_but_no_logprobs() -> None:
    state = make_state(Settings(temperature=0.0, min_tokens=1, ending=[2]), num_logprobs=1)
    logits = np.array([[0.0, 1.0, np.nan]], np.float32)
    sampled = Sampler().sample(logits, batch([state], [0]))
    assert sampled.token_ids == [1] and sampled.logprobs == [None]


# --- the Python side ---


def test_params_reach_the_state() -> None:
    params = SamplingParams(
        temperature=0.0,
        min_tokens=2,
        stop_token_ids=[4],
        logit_bias={1: 5.0},
        bad_words=[[2]],
        logprobs=1,
        seed=3,
    )
    logits = np.array([9.0, 3.0, 10.0, 7.0, 11.0], np.float32)
    state = Sampler().make_state(params, [0], eos_ids=[0], seed=2**64 + 3)
    assert (state.seed, state.num_logprobs, state.num_output_tokens) == (3, 1, 0)
    assert draw(logits, state) == 1
    assert draw(logits, state, prefix=[1, 1]) == 4
    state.append([1, 1])
    assert draw(logits, state) == 4
    ignoring = SamplingParams(
        temperature=0.0, min_tokens=2, stop_token_ids=[4], bad_words=[[2]], ignore_eos=True
    )
    assert draw(logits, Sampler().make_state(ignoring, [0], eos_ids=[0], seed=0)) == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [[-1]]}, "bad_words"),
        ({"logit_bias_ids": [1]}, "logit_bias"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
    ],
)
def test_wrong_parameters_are_refused_by_name(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.SamplerState(**wrong)


def test_a_batch_that_does_not_fit_its_logits_is_refused() -> None:
    logits = np.zeros((1, 4), np.float32)
    state = make_state(Settings())
    with pytest.raises(ValueError, match="row_state"):
        Sampler().sample(logits, batch([state], [0], row_state=[1]))
    with pytest.raises(ValueError, match="prefix_ids"):
        Sampler().sample(logits, batch([state], [0], prefixes=[[4]]))
    with pytest.raises(ValueError, match="prefix_start"):
        Sampler().sample(logits, batch([state], [0, 1], row_state=[0, 0]))
    with pytest.raises(ValueError, match="vocabulary"):
        Sampler().sample(logits, batch([make_state(Settings(logit_bias={4: 1.0}))], [0]))
    with pytest.raises(TypeError):
        Sampler().sample(logits.astype(np.float64), batch([state], [0]))
