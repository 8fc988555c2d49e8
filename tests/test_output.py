"""How requests end and how tokens become text: for every text, and every way to cut it."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest
from fakes import EOS, VOCABULARY, plain_decode
from hypothesis import given
from hypothesis import strategies as st
from strategies import random_params

from outrider.engine.admission import check_params, check_request
from outrider.engine.draft_counts import DraftCounts
from outrider.engine.output import OutputStream, Vocabulary
from outrider.request import AddRequest, FinishReason, SamplingParams
from outrider.spec_decode.proposer import Drafts

TEXT = "naïve café 🦉 – 日本語 ends. The end."


def vocabulary_of(pieces: list[bytes]) -> Vocabulary:
    return Vocabulary(pieces)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


def show(pieces: list[bytes], params: SamplingParams) -> tuple[list[str], OutputStream]:
    """The increments that a text cut like this gives."""
    stream = OutputStream(params, len(pieces) + 1, Vocabulary(pieces))
    increments = []
    for token_id in range(len(pieces)):
        ended = stream.append(token_id)
        increments.append(stream.take_text())
        if ended:
            return increments, stream
    stream.close(FinishReason.ABORT)
    return [*increments, stream.take_text()], stream


cuts = st.lists(st.integers(0, 200), max_size=60)


@given(cuts)
def test_increments_join_to_the_text_and_never_show_half_a_character(cuts: list[int]) -> None:
    increments, _ = show(pieces_of(TEXT.encode(), cuts), SamplingParams())
    assert "".join(increments) == TEXT
    assert all("\ufffd" not in text for text in increments)


@given(st.binary(max_size=40), cuts)
def test_bytes_that_are_no_text_are_shown_as_a_whole_decoding_shows_them(
    data: bytes, cuts: list[int]
) -> None:
    increments, _ = show(pieces_of(data, cuts), SamplingParams())
    assert "".join(increments) == data.decode(errors="replace")


@given(cuts, st.sampled_from(["ends", ".", "é", "本", "end.", "🦉 –", "a"]), st.booleans())
def test_a_stop_string_is_found_across_any_cut(cuts: list[int], stop: str, include: bool) -> None:
    params = SamplingParams(stop=[stop], include_stop_str_in_output=include)
    increments, stream = show(pieces_of(TEXT.encode(), cuts), params)
    end = TEXT.index(stop)
    assert "".join(increments) == TEXT[: end + len(stop) if include else end]
    assert (stream.finish_reason, stream.stop_reason) == (FinishReason.STOP, stop)


@given(
    cuts,
    st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), min_size=1, max_size=4),
    st.text(st.sampled_from("abc"), max_size=20),
)
def test_of_several_stop_strings_the_one_that_is_complete_first_ends_it(
    cuts: list[int], stops: list[str], text: str
) -> None:
    increments, stream = show(pieces_of(text.encode(), cuts), SamplingParams(stop=stops))
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            assert "".join(increments) == text[: end - len(longest)]
            assert stream.stop_reason == longest
            return
    assert "".join(increments) == text
    assert stream.finish_reason is FinishReason.ABORT


@given(cuts)
def test_nothing_is_shown_that_a_stop_string_may_take_back(cuts: list[int]) -> None:
    pieces = pieces_of(TEXT.encode(), cuts)
    stream = OutputStream(SamplingParams(stop=["The end!"]), 1000, Vocabulary(pieces))
    shown, seen = "", b""
    for token_id, piece in enumerate(pieces):
        stream.append(token_id)
        shown += stream.take_text()
        seen += piece
        hidden = seen.decode(errors="ignore").removeprefix(shown)
        assert "The end!".startswith(hidden) or hidden == ""


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_the_machine_agrees_with_the_oracle_token_by_token(seed: int, prompt: list[int]) -> None:
    params = msgspec.structs.replace(random_params(random.Random(seed)), grammar=None)
    assert params.seed is not None
    expected = plain_decode(prompt, params, params.seed, 40)
    limit = min(params.max_tokens or 40, 40 - len(prompt))
    stream = OutputStream(params, limit, VOCABULARY)
    shown = ""
    for i, token_id in enumerate(expected.token_ids):
        ended = stream.append(token_id)
        shown += stream.take_text()
        assert shown == expected.texts[i + 1]
        is_last = i == len(expected.token_ids) - 1 and expected.finish_reason is not FinishReason.ERROR
        assert ended == is_last
    if expected.finish_reason is not FinishReason.ERROR:
        assert (stream.finish_reason, stream.stop_reason) == (expected.finish_reason, expected.stop_reason)


def test_min_tokens_come_before_any_stop() -> None:
    params = SamplingParams(min_tokens=2, stop=["a"])
    stream = OutputStream(params, 10, VOCABULARY)
    assert not stream.append(0)  # "a", too early
    assert stream.append(0)
    assert (stream.take_text(), stream.stop_reason) == ("a", "a")


def test_the_end_of_sequence_ends_it_unless_ignored() -> None:
    assert OutputStream(SamplingParams(), 10, VOCABULARY).append(EOS)
    assert not OutputStream(SamplingParams(ignore_eos=True), 10, VOCABULARY).append(EOS)


def test_a_stop_wins_over_the_length_at_the_same_token() -> None:
    stream = OutputStream(SamplingParams(stop_token_ids=[0]), 1, VOCABULARY)
    assert stream.append(0)
    assert (stream.finish_reason, stream.stop_reason, stream.take_text()) == (FinishReason.STOP, 0, "")


def test_half_a_character_at_the_end_is_shown_as_a_replacement() -> None:
    stream = OutputStream(SamplingParams(), 1, VOCABULARY)
    assert stream.append(1)
    assert (stream.finish_reason, stream.take_text()) == (FinishReason.LENGTH, "\ufffd")


def test_special_tokens_show_only_when_asked_for() -> None:
    for skip, text in ((True, "a"), (False, "a<end>")):
        params = SamplingParams(skip_special_tokens=skip, ignore_eos=True)
        stream = OutputStream(params, 10, VOCABULARY)
        stream.append(0)
        stream.append(EOS)
        assert stream.take_text() == text


def test_drafts_are_counted_per_source_and_position() -> None:
    counts = DraftCounts()
    chain = Drafts.chain([1, 2, 3], [0.9, 0.8, 0.7], "ngram")
    counts.add(chain, [0, 1])
    counts.add(chain, [])
    counts.add(Drafts((1, 2), (-1, 0), (0.5, 0.4), ("mtp", "ngram")), [0, 1])
    assert counts.windows() == {"ngram": 3, "mtp": 1}
    assert counts.totals(accepted=False) == {"ngram": 7, "mtp": 1}
    assert counts.per_position(accepted=False) == {"mtp": [1], "ngram": [2, 3, 2]}
    assert counts.per_position(accepted=True) == {"mtp": [1], "ngram": [1, 2, 0]}
    stats = counts.to_stats(3)
    assert (stats.steps, stats.draft_tokens, stats.accepted_tokens) == (3, 8, 4)
    assert stats.by_source == {"mtp": [1, 1], "ngram": [7, 3]}
    assert stats.per_position == [[3, 2], [3, 2], [2, 0]]


def request(**changes: object) -> AddRequest:
    return AddRequest("r", [0, 1], SamplingParams(**changes), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0),
        ("top_p", 1.1), ("min_p", -0.1), ("top_k", -1), ("presence_penalty", 3), ("frequency_penalty", -3),
        ("repetition_penalty", 0), ("max_tokens", 0), ("max_tokens", -1), ("min_tokens", -1), ("seed", -1),
        ("seed", 2**64), ("logprobs", -1), ("stop", [""]), ("stop_token_ids", [4]), ("logit_bias", {4: 1.0}),
        ("logit_bias", {1: 1000.0}), ("bad_words", [[]]), ("bad_words", [[1, 9]]),
        ("top_k", 2**31), ("min_tokens", 2**31),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field if field != "stop" else "stop strings"):
        check_params(request(**{field: value}).params, vocab_size=4)


@given(st.integers(0, 2**32 - 1))
def test_what_the_strategies_ask_is_allowed(seed: int) -> None:
    check_params(random_params(random.Random(seed)), vocab_size=4)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([0] * 40, "40 tokens, but at most 39"), ([4], "0..3, got 4"), ([-1], "0..3, got -1")],
)
def test_prompts_the_model_cannot_read_are_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(AddRequest("r", prompt, SamplingParams(), 0.0), vocab_size=4, max_model_len=40)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens"):
        check_params(SamplingParams(max_tokens=2, min_tokens=3), vocab_size=4)
