"""What every proposer must keep, and n-gram lookup against a search of the whole text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import outrider._native as native
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import SpeculativeConfig
from outrider.config_fields import ConfigError
from outrider.request import SamplingParams, SpeculationParams
from outrider.spec_decode.ngram import NgramProposer
from outrider.spec_decode.predicted import PredictedProposer
from outrider.spec_decode.proposer import (
    NO_DRAFTS,
    Drafts,
    NoProposer,
    Parts,
    Proposer,
    draft_limit,
    make_proposer,
)

VOCAB = 3
EXAMPLES = settings(max_examples=40, deadline=None)


@dataclass
class FakeRequest:
    request_id: str
    token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    num_prompt_tokens: int = 1
    cache_salt: str = ""


@dataclass
class FakeResult:
    request_id: str
    token_ids: list[int]
    drafts: Drafts
    path: list[int]


PROPOSERS = {
    "auto": lambda: make_proposer(SpeculativeConfig()),
    "ngram": lambda: make_proposer(SpeculativeConfig(method="ngram")),
    "ngram-fixed": lambda: make_proposer(
        SpeculativeConfig(method="ngram", num_speculative_tokens=4, adaptive=False)
    ),
    "suffix": lambda: make_proposer(SpeculativeConfig(method="suffix")),
    "suffix-request": lambda: make_proposer(
        SpeculativeConfig(method="suffix", draft_memory="request", suffix_decoding_max_tree_depth=4)
    ),
    "suffix-branches": lambda: make_proposer(SpeculativeConfig(method="suffix"), Parts(branches=True)),
    "predicted": lambda: PredictedProposer(),
    "ngram-1": lambda: NgramProposer(max_n=1, min_n=1),
    "naive": lambda: make_proposer(SpeculativeConfig(method="naive")),
    "off": lambda: make_proposer(SpeculativeConfig(method="off")),
}


# --- the contract ---


@given(data=st.data())
@EXAMPLES
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_proposer_keeps_its_contract_through_any_traffic(name: str, data: st.DataObject) -> None:
    proposer: Proposer = PROPOSERS[name]()
    texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
    requests = [FakeRequest(f"r{i}", data.draw(texts)) for i in range(data.draw(st.integers(1, 3)))]
    for _ in range(data.draw(st.integers(1, 8))):
        limits = [data.draw(st.integers(0, 40)) for _ in requests]
        before = copy.deepcopy(requests)
        proposals = proposer.propose(requests, limits)
        assert requests == before, "a proposer must not change a request"
        assert len(proposals) == len(requests)
        results = []
        for request, drafts, limit in zip(requests, proposals, limits, strict=True):
            assert len(drafts) <= limit
            drafts.check(VOCAB)
            verified = drafts.first(data.draw(st.integers(0, len(drafts))))
            path = list(range(data.draw(st.integers(0, len(verified)))))
            emitted = [*(verified.token_ids[i] for i in path), data.draw(st.integers(0, VOCAB - 1))]
            emitted = emitted[: data.draw(st.integers(1, len(emitted)))]  # a stop may cut it
            request.token_ids.extend(emitted)
            results.append(FakeResult(request.request_id, emitted, verified, path[: len(emitted)]))
        proposer.observe(results, None)
        if data.draw(st.booleans()):
            proposer.forget(requests[0].request_id)
    for request in requests:
        proposer.forget(request.request_id)
        proposer.forget(request.request_id)  # unknown by now, and that is fine
    assert proposer.stats().get("requests", 0) == proposer.stats().get("memory_bytes", 0) == 0


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_request_that_says_off_gets_no_drafts(name: str) -> None:
    repeating = [0, 1, 2] * 5
    proposer = PROPOSERS[name]()
    off = FakeRequest(
        "off",
        repeating,
        SamplingParams(speculation=SpeculationParams(method="off"), prediction_token_ids=[1, 2, 0] * 9),
    )
    plain = FakeRequest("plain", repeating, SamplingParams(prediction_token_ids=[1, 2, 0] * 9))
    for_off, for_plain = proposer.propose([off, plain], [3, 3])
    assert for_off == NO_DRAFTS
    assert len(for_plain) == (0 if isinstance(proposer, NoProposer) else 3)


@pytest.mark.parametrize(("method", "what"), [("mtp", "head"), ("draft_model", "draft model")])
def test_a_method_whose_part_is_missing_says_so(method: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"method '{method}' needs a {what}, and none was found"):
        make_proposer(SpeculativeConfig(method=method, model="somewhere"))


@pytest.mark.parametrize(
    ("override", "limit", "expected"),
    [
        (None, 5, (True, 5)),
        (None, 0, (False, 0)),
        (SpeculationParams(), 5, (True, 5)),
        (SpeculationParams(method="auto", max_draft_tokens=3), 5, (True, 3)),
        (SpeculationParams(method="ngram", max_draft_tokens=9), 5, (True, 5)),
        (SpeculationParams(max_draft_tokens=0), 5, (False, 0)),
        (SpeculationParams(method="off"), 5, (False, 5)),
        (SpeculationParams(method="naive"), 5, (False, 5)),
    ],
)
def test_a_request_may_lower_its_limit(
    override: SpeculationParams | None, limit: int, expected: tuple[bool, int]
) -> None:
    assert draft_limit(SamplingParams(speculation=override), "ngram", limit) == expected


# --- n-gram lookup ---


def brute_force(text: Sequence[int], min_n: int, max_n: int, limit: int) -> tuple[list[int], int]:
    """Longest n-gram first, newest place first; the draft goes on into itself."""
    for n in range(min(max_n, len(text)), min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):  # an occurrence before the text's own end
            if list(text[end - n : end]) == list(text[len(text) - n :]):
                length = n
                while length < 64 and length < end and text[end - length - 1] == text[len(text) - length - 1]:
                    length += 1
                extended = list(text)
                for i in range(limit):
                    extended.append(extended[end + i])
                return extended[len(text) :], length if limit else 0
    return [], 0


@given(
    st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 9), max_size=200),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 12),
    st.lists(st.integers(1, 30), max_size=10),
)
@settings(max_examples=200, deadline=None)
def test_the_index_equals_a_search_of_the_whole_text(
    text: list[int], min_n: int, more: int, limit: int, pieces: list[int]
) -> None:
    index = native.NgramIndex(min_n, min_n + more)
    begin = 0
    for size in [*pieces, len(text)]:  # appended in any pieces, asked in between
        index.append(text[begin : begin + size])
        begin = min(begin + size, len(text))
        assert index.propose(limit) == brute_force(text[:begin], min_n, min_n + more, limit)
    assert len(index) == len(text)


def test_repetition_goes_on_past_the_end_of_the_text() -> None:
    index = native.NgramIndex(2, 5)
    index.append([7, 1, 2, 1, 2, 1, 2])
    assert index.propose(5) == ([1, 2, 1, 2, 1], 4)


def test_the_longest_match_wins_over_a_newer_shorter_one() -> None:
    index = native.NgramIndex(1, 3)
    index.append([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3])
    assert index.propose(1) == ([50], 3)
    index.append([61, 2, 3])  # now only 2, 3 matches: its newest place is followed by 61
    assert index.propose(1) == ([61], 2)


def test_a_match_may_span_prompt_and_output() -> None:
    proposer = NgramProposer()
    request = FakeRequest("a", [5, 6])
    assert proposer.propose([request], [4]) == [NO_DRAFTS]
    request.token_ids += [7, 8, 9, 5, 6]
    assert proposer.propose([request], [4])[0].token_ids == (7, 8, 9, 5)


def test_memory_is_bounded_by_the_tokens_and_comes_back() -> None:
    proposer = NgramProposer(max_n=5, min_n=2)
    text = [i * i % 50021 for i in range(40_000)]  # hardly any n-gram twice: the worst case
    proposer.propose([FakeRequest("a", text)], [4])
    # Four tables of 4-byte entries, doubled in size when half full, beside the tokens.
    assert 4 * len(text) < proposer.stats()["memory_bytes"] < (4 * 16 + 8 + 1) * len(text)
    proposer.forget("a")
    assert proposer.stats()["memory_bytes"] == 0


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 3), (3, 2), (1, 65)])
def test_impossible_ngram_sizes_are_refused(min_n: int, max_n: int) -> None:
    with pytest.raises(ValueError, match="1 <= min_n <= max_n <= 64"):
        native.NgramIndex(min_n, max_n)


def test_longer_matches_survive_better() -> None:
    first_survival = []
    for length in (1, 2, 3, 4, 5, 9, 15, 30):
        match = list(range(100, 100 + length))
        request = FakeRequest(f"m{length}", [1, *match, 7, 8, 2, *match])
        first_survival.append(NgramProposer(max_n=5, min_n=1).propose([request], [1])[0].survival[0])
    assert first_survival == sorted(first_survival) and len(set(first_survival)) == 8
