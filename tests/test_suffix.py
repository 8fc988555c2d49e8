"""Suffix trees against a count of the whole text, and who may see whose outputs."""

from __future__ import annotations

import logging
import random
from typing import Any

import outrider._native as native
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_proposers import FakeRequest, FakeResult

from outrider.request import SamplingParams
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts
from outrider.spec_decode.suffix import PRIOR, WEIGHT, Memories, SuffixProposer

DEPTH = 6
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=14) | st.lists(st.integers(0, 7), max_size=14)
GRAMS = st.lists(st.integers(0, 3), min_size=1, max_size=DEPTH)


def occurrences(text: list[int], gram: list[int]) -> list[int]:
    """Where a gram begins in a text."""
    return [i for i in range(len(text) - len(gram) + 1) if text[i : i + len(gram)] == gram]


def recorded_starts(text: list[int]) -> tuple[set[int], int]:
    """Which suffixes a request's tree has a leaf for, and how many tokens at its end occurred before."""
    starts: set[int] = set()
    pending = 0
    for end in range(1, len(text) + 1):
        pending += 1
        while pending:
            suffix = text[end - pending : end]
            if any(text[s : s + pending] == suffix for s in starts):
                pending -= pending >= DEPTH  # too long to go on with: its first token is let go
                break
            starts.add(end - pending)
            pending -= 1
    return starts, pending


class TreesMachine(RuleBasedStateMachine):
    """Both trees beside the plain texts they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = native.MemoryTree(DEPTH)
        self.texts: list[list[int]] = []
        self.request = native.RequestTree(DEPTH)
        self.text: list[int] = []

    @rule(text=TEXTS)
    def remember(self, text: list[int]) -> None:
        self.memory.insert(text)
        if text:
            self.texts.append(text)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=TEXTS)
    def remember_a_variant(self, data: st.DataObject, more: list[int]) -> None:
        base = data.draw(st.sampled_from(self.texts))
        self.remember(base[data.draw(st.integers(0, len(base) - 1)) :] + more)

    @precondition(lambda self: self.texts)
    @rule()
    def forget_the_oldest(self) -> None:
        self.memory.evict()
        self.texts.pop(0)

    @rule(text=TEXTS)
    def go_on(self, text: list[int]) -> None:
        self.request.append(text)
        self.text += text

    @rule(gram=GRAMS)
    def count(self, gram: list[int]) -> None:
        assert self.memory.count(gram) == sum(len(occurrences(text, gram)) for text in self.texts)
        starts, _ = recorded_starts(self.text)
        assert self.request.count(gram) == len(starts & set(occurrences(self.text, gram)))

    @invariant()
    def whole(self) -> None:
        self.memory.check_integrity()
        self.request.check_integrity()
        assert self.memory.texts() == self.texts and self.memory.num_texts == len(self.texts)
        assert self.memory.num_tokens == sum(map(len, self.texts))
        assert self.request.match_length == recorded_starts(self.text)[1]
        assert self.request.tokens(0) == self.text
        if not self.texts:
            assert self.memory.num_nodes == 0

    @rule(limit=st.integers(1, 8), branches=st.booleans(), after=st.lists(st.integers(0, 2), max_size=2))
    def propose(self, limit: int, branches: bool, after: list[int]) -> None:
        scoring = native.SuffixScoring(weight=1.0, prior=[0.5], spec_factor=9.0, min_survival=0.01)
        own, past = self.request.propose([self.memory], after, limit, branches, scoring)
        text = self.text + after
        for proposal, count in ((own, self.request.count), (past, self.memory.count)):
            token_ids, parents, chances, match, _ = proposal
            assert len(token_ids) <= limit and len(chances) == len(parents) == len(token_ids)
            context = text[len(text) - match :]
            if not token_ids or len(context) + 1 > DEPTH - 1 or (proposal is own and after):
                continue
            # The first is the likeliest continuation of the match, and its chance is that of the counts.
            following = [count([*context, token]) for token in range(8)]
            if not sum(following):
                continue
            assert following[token_ids[0]] == max(following)
            expected = (following[token_ids[0]] + 0.5) / (count(context) + 1.0)
            assert chances[0] == pytest.approx(expected, rel=1e-5)


TestTrees = TreesMachine.TestCase
TestTrees.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(st.lists(st.integers(0, 1), max_size=400))
@settings(max_examples=60, deadline=None)
def test_long_repetitions_keep_a_tree_whole(text: list[int]) -> None:
    tree = native.RequestTree(8)
    for begin in range(0, len(text), 7):
        tree.append(text[begin : begin + 7])
    tree.check_integrity()
    assert tree.num_nodes <= 2 * len(text)
    assert tree.match_length < 8


def test_a_repetition_goes_on_past_the_end_of_the_text() -> None:
    request = FakeRequest("a", [7, *[1, 2] * 6])
    (drafts,) = SuffixProposer().propose([request], [9])
    assert drafts.token_ids == (1, 2, 1, 2, 1, 2, 1, 2, 1)


def test_what_came_often_is_drafted_not_what_came_last() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2]
    (drafts,) = SuffixProposer().propose([FakeRequest("a", text)], [2])
    assert drafts.token_ids[0] == 3


def test_chances_are_counts_smoothed_by_the_length_of_the_match() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]
    (drafts,) = SuffixProposer().propose([FakeRequest("a", text)], [1])
    assert drafts.token_ids == (3,)
    assert drafts.survival[0] == pytest.approx((2 + WEIGHT * PRIOR[2]) / (3 + WEIGHT), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "length"),
    [({}, 6), ({"max_spec_factor": 0.5}, 3), ({"max_draft_tokens": 2}, 2), ({"min_token_prob": 0.75}, 1)],
    ids=str,
)
def test_options_bound_the_draft(options: dict[str, Any], length: int) -> None:
    match = [11, 12, 13, 14, 15, 16]
    text = [*match, *range(30, 40), *match]
    (drafts,) = SuffixProposer(**options).propose([FakeRequest("a", text)], [20])
    assert drafts.token_ids == tuple(range(30, 30 + length))


# --- past outputs ---


def write(proposer: SuffixProposer, name: str, output: list[int], salt: str = "", prompt: int = 50) -> None:
    """A request of this tenant that writes `output` and ends."""
    request = FakeRequest(name, [prompt], num_prompt_tokens=1, cache_salt=salt)
    proposer.propose([request], [4])
    proposer.observe([FakeResult(name, output, NO_DRAFTS, [])], None)
    proposer.forget(name)


def drafted(proposer: SuffixProposer, text: list[int], salt: str = "") -> Drafts:
    request = FakeRequest("asks", text, num_prompt_tokens=len(text), cache_salt=salt)
    (drafts,) = proposer.propose([request], [8])
    proposer._requests.clear()  # it was only a question
    return drafts


SECRET = list(range(1000, 1040))


def test_a_tenant_is_drafted_for_from_its_own_outputs_only() -> None:
    proposer = SuffixProposer()
    write(proposer, "a", SECRET, salt="key-a")
    assert drafted(proposer, SECRET[:6], "key-a").token_ids == tuple(SECRET[6:12])
    for salt in ("key-b", "", "key-a:x", "KEY-A"):
        assert drafted(proposer, SECRET[:6], salt) == NO_DRAFTS
    assert b"key-a" not in b"".join(proposer._memories._trees)  # keys are not even kept


def test_random_tenants_never_see_each_others_tokens() -> None:
    rng = random.Random(0)
    proposer = SuffixProposer(max_cached_requests=30)
    num_drafted = 0
    for i in range(300):
        tenant = rng.randrange(3)
        # Every tenant writes with tokens of its own, after prompts that all share.
        words = [10 + tenant, 20 + tenant, 30 + tenant]
        output = [rng.choice(words) for _ in range(12)]
        request = FakeRequest(f"r{i}", [1, 2, *output[:4]], num_prompt_tokens=2, cache_salt=f"t{tenant}")
        (drafts,) = proposer.propose([request], [8])
        num_drafted += len(drafts)
        assert all(token % 10 == tenant for token in drafts.token_ids if token > 2)
        proposer.observe([FakeResult(f"r{i}", output[4:], drafts, [])], None)
        if rng.random() < 0.9:
            proposer.forget(f"r{i}")
    assert num_drafted > 300


def test_global_memory_is_shared_and_request_memory_is_none() -> None:
    shared, alone = SuffixProposer(draft_memory="global"), SuffixProposer(draft_memory="request")
    for proposer in (shared, alone):
        write(proposer, "a", SECRET, salt="key-a")
    assert drafted(shared, SECRET[:6], "key-b").token_ids == tuple(SECRET[6:12])
    assert drafted(alone, SECRET[:6], "key-a") == NO_DRAFTS
    assert alone.stats()["past_outputs"]["outputs"] == 0


def test_prompts_are_not_remembered() -> None:
    proposer = SuffixProposer()
    request = FakeRequest("a", SECRET, num_prompt_tokens=len(SECRET))
    proposer.propose([request], [4])
    proposer.observe([FakeResult("a", [1, 2], NO_DRAFTS, [])], None)
    proposer.forget("a")
    assert proposer._memories.texts() == [(proposer._key(""), [1, 2])]


def test_the_oldest_output_of_anybody_makes_room() -> None:
    proposer = SuffixProposer(max_cached_requests=2)
    for i, salt in enumerate(["a", "b", "a"]):
        write(proposer, f"r{i}", [100 * i + j for j in range(1, 20)], salt=salt)
    assert drafted(proposer, [1, 2, 3], "a") == NO_DRAFTS
    assert drafted(proposer, [101, 102, 103], "b").token_ids == (104, 105, 106)
    assert drafted(proposer, [201, 202, 203], "a").token_ids == (204, 205, 206)
    none = SuffixProposer(max_cached_requests=0)
    write(none, "a", SECRET)
    assert none.stats()["past_outputs"] == {"outputs": 0, "tokens": 0, "tenants": 0, "bytes": 0}


def test_memory_stays_within_its_bytes() -> None:
    rng = random.Random(1)
    memories = Memories(64, -1, max_bytes=200_000)
    for i in range(300):
        memories.insert(b"%d" % (i % 5), [rng.randrange(1000) for _ in range(60)])
        assert memories.stats()["bytes"] <= 200_000
    assert 10 < memories.stats()["outputs"] < 300
    for tree in memories._trees.values():
        tree.check_integrity()


def test_a_preempted_request_is_remembered_once() -> None:
    proposer = SuffixProposer()
    request = FakeRequest("a", [50, *SECRET[:10]], num_prompt_tokens=1)
    proposer.propose([request], [4])
    proposer.forget("a")  # preempted
    request.token_ids += SECRET[10:20]
    proposer.propose([request], [4])
    proposer.forget("a")
    assert [text for _, text in proposer._memories.texts()] == [SECRET[:10], SECRET[10:20]]


def test_requests_that_want_no_drafts_are_not_remembered() -> None:
    from outrider.request import SpeculationParams

    proposer = SuffixProposer()
    request = FakeRequest("a", [50], SamplingParams(speculation=SpeculationParams(method="off")))
    proposer.propose([request], [4])
    proposer.observe([FakeResult("a", SECRET, NO_DRAFTS, [])], None)
    proposer.forget("a")
    assert proposer.stats()["past_outputs"]["outputs"] == 0


def test_outputs_come_back_from_the_store_and_a_failing_store_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Store:
        def __init__(self) -> None:
            self.texts: list[Any] = []
            self.fails = False

        def load(self) -> list[Any]:
            return self.texts

        def save(self, texts: Any) -> None:
            if self.fails:
                raise OSError("disk full")
            self.texts = list(texts)

    store = Store()
    first = SuffixProposer(store=store)
    write(first, "a", SECRET, salt="t")
    first.close()
    second = SuffixProposer(store=store)
    assert drafted(second, SECRET[:6], "t").token_ids == tuple(SECRET[6:12])
    assert drafted(second, SECRET[:6], "u") == NO_DRAFTS
    store.fails = True
    with caplog.at_level(logging.WARNING):
        second.close()
    assert "past outputs cannot be saved: disk full" in caplog.text
