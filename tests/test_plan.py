"""What becomes of several sources' drafts, and that none can spoil the others'."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_proposers import FakeRequest, FakeResult

from outrider.config import SpeculativeConfig
from outrider.request import SamplingParams, SpeculationParams
from outrider.spec_decode.merge import merge
from outrider.spec_decode.ngram import NgramProposer
from outrider.spec_decode.plan import Append, Plan
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts, Parts, make_proposer


class Source:
    """Gives the same chain to everybody; as a model, so many tokens as it is asked for."""

    needs_hidden = False

    def __init__(self, name: str, tokens: Sequence[int], chance: float = 0.5, max_steps: int = 4) -> None:
        self.name, self.tokens, self.chance = name, list(tokens), chance
        self.max_model_steps = max_steps
        self.choose_model_steps: Any = None
        self.fault: str | None = None
        self.asked: list[list[str]] = []
        self.observed = self.forgotten = 0

    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Drafts]:
        self.asked.append([request.request_id for request in requests])
        if self.fault == "raises":
            raise RuntimeError("no idea")
        if self.fault == "too few":
            return []
        if self.choose_model_steps is not None:
            limits = [min(p) for p in zip(limits, self.choose_model_steps(requests, []), strict=True)]
        proposals = [self.continue_after(request, (), n) for request, n in zip(requests, limits, strict=True)]
        if self.fault == "too long":
            return [Drafts.chain([1] * 50, [0.5] * 50, self.name)] * len(requests)
        if self.fault == "garbage":
            return [Drafts((-4,), (0,), (2.0,), (self.name,))] * len(requests)
        return proposals

    def continue_after(self, request: Any, after: Sequence[int], limit: int) -> Drafts:
        tokens = self.tokens[:limit]
        survival = [self.chance ** (i + 1) for i in range(len(tokens))]
        return Drafts.chain(tokens, survival, self.name) if tokens else NO_DRAFTS

    def observe(self, results: Any, hidden: Any) -> None:
        self.observed += 1
        if self.fault == "raises":
            raise RuntimeError("cannot learn")

    def forget(self, request_id: str) -> None:
        self.forgotten += 1
        if self.fault == "raises":
            raise RuntimeError("cannot forget")

    def stats(self) -> dict[str, Any]:
        if self.fault == "raises":
            raise RuntimeError("does not know")
        return {}


def ask(plan: Plan, limit: int = 8, params: SamplingParams | None = None) -> Drafts:
    return plan.propose([FakeRequest("a", [1, 2], params or SamplingParams())], [limit])[0]


# --- operators ---


def test_race_takes_the_draft_that_expects_most() -> None:
    plan = Plan({"a": Source("a", [1, 2], 0.4), "b": Source("b", [3, 4, 5], 0.6), "c": Source("c", [6], 0.9)})
    assert ask(plan).source == ("b",) * 3
    assert ask(plan, limit=1).source == ("c",)


def test_merge_shares_prefixes_and_credits_the_first() -> None:
    sources = {"a": Source("a", [1, 2, 3], 0.8), "b": Source("b", [1, 2, 9], 0.7), "c": Source("c", [1], 0.5)}
    drafts = ask(Plan(sources, branches=True))
    assert drafts.token_ids == (1, 2, 3, 9) and drafts.parents == (-1, 0, 1, 1)
    assert drafts.source == ("a", "a", "a", "b")
    # 9 can only be right where 3 is wrong.
    assert drafts.survival[3] == pytest.approx(0.8 * 0.8 * 0.7 * 0.2)


def test_a_prediction_is_credited_with_what_others_drafted_too() -> None:
    sources = {"predicted": Source("predicted", [1, 2], 0.5), "suffix": Source("suffix", [1, 2, 3], 0.9)}
    drafts = ask(Plan(sources, branches=True))
    assert drafts.token_ids == (1, 2, 3) and drafts.source == ("predicted", "predicted", "suffix")


def test_merge_drops_the_least_likely_nodes() -> None:
    plan = Plan(
        {"a": Source("a", [1, 2, 3], 0.8), "b": Source("b", [7, 8], 0.6)}, branches=True, most_nodes=4
    )
    assert ask(plan).token_ids == (1, 2, 3, 7)
    assert ask(plan, limit=2).token_ids == (1, 2)


def test_append_goes_on_with_an_ngram_tail_over_the_fresh_drafts() -> None:
    # FastDeploy's example: two tokens from the model, then up to three n-gram matches, five in all.
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    model = Source("mtp", [3, 4, 30, 40], max_steps=2)
    append = Append("ngram", NgramProposer(max_n=3, min_n=2), max_tokens=5)
    plan = Plan({}, ("mtp", model), append=append)
    (drafts,) = plan.propose([FakeRequest("a", text)], [9])
    assert drafts.token_ids == (3, 4, 5, 6, 7)
    assert drafts.source == ("mtp", "mtp", "ngram", "ngram", "ngram")
    assert list(drafts.survival) == sorted(drafts.survival, reverse=True)
    (short,) = plan.propose([FakeRequest("a", text)], [3])
    assert short.token_ids == (3, 4, 5)


def test_a_free_draft_that_expects_as_much_replaces_the_models() -> None:
    model = Source("mtp", [9, 9, 9], max_steps=3)
    plan = Plan({"suffix": Source("suffix", range(8), 0.95)}, ("mtp", model))
    assert ask(plan).source == ("suffix",) * 8 and not model.asked
    plan.free["suffix"].chance = 0.5  # type: ignore[attr-defined]
    ask(plan)
    assert model.asked == [["a"]]


def test_the_controller_says_for_whom_a_model_runs_and_how_far() -> None:
    model = Source("mtp", [7, 8, 9], max_steps=3)
    plan = Plan({"suffix": Source("suffix", [1, 2])}, ("mtp", model), branches=True)
    seen: list[Any] = []

    def choose(requests: Sequence[Any], free: Sequence[Drafts]) -> list[int]:
        seen.append(([request.request_id for request in requests], [len(drafts) for drafts in free]))
        return [2, 0]

    plan.choose_model_steps = choose
    only_ngram = SamplingParams(speculation=SpeculationParams(method="suffix"))
    requests = [FakeRequest("x", [1], only_ngram), FakeRequest("y", [1]), FakeRequest("z", [1])]
    x, y, z = plan.propose(requests, [4, 4, 4])
    assert seen == [(["y", "z"], [2, 2])] and model.asked == [["y"]]
    assert set(y.source) == {"mtp", "suffix"} and y.source.count("mtp") == 2
    assert set(x.source) == set(z.source) == {"suffix"}


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.floats(0.05, 1.0)), max_size=6), max_size=4),
    st.lists(st.integers(0, 5), max_size=4), st.integers(0, 12),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_merged_tree_is_whole_and_holds_the_paths_of_its_parts(
    chains: list[list[tuple[int, float]]], branch_at: list[int], limit: int
) -> None:
    proposals = []
    for i, chain in enumerate(chains):
        tokens, survival, parents, alive = [], [], [], 1.0
        for j, (token, chance) in enumerate(chain):
            parent = min(j - 1, branch_at[i]) if i < len(branch_at) and j > 2 else j - 1
            alive = (survival[parent] if parent >= 0 else 1.0) * chance
            tokens.append(token)
            survival.append(alive)
            parents.append(parent)
        proposals.append(Drafts(tuple(tokens), tuple(parents), tuple(survival), (f"s{i}",) * len(tokens)))
    merged = merge(proposals, limit)
    merged.check(4)
    assert len(merged) <= limit
    known = {path for drafts in proposals for path in paths(drafts)}
    found = paths(merged)
    assert set(found) <= known
    if limit >= sum(map(len, proposals)):
        assert set(found) == known


def paths(drafts: Drafts) -> list[tuple[int, ...]]:
    return [tuple(drafts.token_ids[n] for n in (*drafts.ancestors(i), i)) for i in range(len(drafts))]


# --- faults ---


@pytest.mark.parametrize("fault", ["raises", "too few", "too long", "garbage"])
@pytest.mark.parametrize("broken", ["ngram", "mtp"])
def test_a_source_that_fails_does_not_silence_the_others(
    fault: str, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    sources = {"ngram": Source("ngram", [1, 2]), "mtp": Source("mtp", [3, 4])}
    sources[broken].fault = fault
    plan = Plan({"ngram": sources["ngram"]}, ("mtp", sources["mtp"]), branches=True)
    plan.choose_model_steps = lambda requests, drafts: [2] * len(requests)
    for _ in range(3):
        drafts = ask(plan)
        assert set(drafts.source) == {"ngram", "mtp"} - {broken}
        plan.observe([FakeResult("a", [1], drafts, [])], None)
        plan.forget("a")
    stats = plan.stats()
    assert stats["errors"][broken] >= 3 and set(stats["errors"]) == {broken}
    assert caplog.text.count(f"the draft source {broken} failed") == 1
    other = sources["mtp" if broken == "ngram" else "ngram"]
    assert (other.observed, other.forgotten) == (3, 3)


def test_a_tail_that_fails_leaves_the_head(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Source):
        def continue_after(self, request: Any, after: Sequence[int], limit: int) -> Drafts:
            raise RuntimeError("no tail")

    append = Append("ngram", Broken("ngram", []), max_tokens=5)
    with caplog.at_level(logging.ERROR):
        assert ask(Plan({}, ("mtp", Source("mtp", [3, 4])), append=append)).token_ids == (3, 4)
    assert "the draft source ngram failed" in caplog.text


# --- what methods stand for ---


@pytest.mark.parametrize(
    ("config", "parts", "names"),
    [
        ({}, {}, ["predicted", "suffix", "ngram"]),
        ({}, {"mtp": True}, ["predicted", "suffix", "ngram", "mtp"]),
        ({}, {"phrases": True}, ["predicted", "suffix", "ngram", "phrases"]),
        ({"method": "suffix"}, {"mtp": True, "phrases": True}, ["predicted", "suffix"]),
        ({"method": "ngram"}, {}, ["predicted", "ngram"]),
        ({"method": "mtp"}, {"mtp": True}, ["predicted", "mtp"]),
        ({"method": "mtp", "mtp_strategy": "with_ngram"}, {"mtp": True}, ["predicted", "mtp", "ngram"]),
        ({"method": "draft_model", "model": "m"}, {"draft_model": True}, ["predicted", "draft_model"]),
    ],
    ids=str,
)
def test_a_method_stands_for_these_sources(
    config: dict[str, Any], parts: dict[str, bool], names: list[str]
) -> None:
    available = Parts(
        mtp=(lambda: Source("mtp", [1])) if parts.get("mtp") else None,
        draft_model=(lambda: Source("draft_model", [1])) if parts.get("draft_model") else None,
        phrases=(lambda branches: Source("phrases", [1])) if parts.get("phrases") else None,
    )
    plan = make_proposer(SpeculativeConfig(**config), available)
    assert [name for name in plan.stats()["sources"] if name != "grammar"] == names


def test_a_request_names_the_only_source_it_wants() -> None:
    text = [1, 2, 3, 4, 1, 2, 3]
    plan = make_proposer(SpeculativeConfig(), Parts(mtp=lambda: Source("mtp", [9, 9]), branches=True))
    for method, sources in (
        ("suffix", {"suffix"}),
        ("mtp", {"mtp"}),
        ("auto", {"ngram"}),  # it drafts what the trees do and more, enough to replace the model
        ("ngram", {"ngram"}),
        ("draft_model", set()),
    ):
        params = SamplingParams(speculation=SpeculationParams(method=method))
        (drafts,) = plan.propose([FakeRequest(method, text, params)], [8])
        assert set(drafts.source) == sources
