"""The law for every source and for what becomes of several: none changes a token, whatever it drafts."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import outrider._native as native
import pytest
import test_lossless
from fakes import VOCABULARY, ScriptedProposer
from hypothesis import Phase, given, settings
from strategies import Arrival, Traffic, traffic

from outrider.config import SpeculativeConfig
from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.request import FinishReason, RequestOutput
from outrider.spec_decode.phrases import PhraseProposer
from outrider.spec_decode.proposer import Parts, Proposer, make_proposer
from outrider.spec_decode.suffix import SuffixProposer

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)


class ScriptedModel(ScriptedProposer):
    """Stands for a model that drafts: it is asked for steps, and may break every rule."""

    max_model_steps = 3
    choose_model_steps: Any = None

    def _drafts(self, request: Any, limit: int) -> Any:
        steps = {} if self.choose_model_steps is None else self.choose_model_steps([request], [])
        return super()._drafts(request, min(limit, self.max_model_steps, *steps))


def phrases(rng: random.Random) -> native.PhraseTable:
    """A table that knows something of contexts of every length, true or not."""
    contexts = [[rng.randrange(4) for _ in range(rng.randint(1, 4))] for _ in range(60)]
    prints = np.unique(np.array([native.PhraseTable.fingerprint(c) for c in contexts], np.uint32))
    ids = np.array([rng.sample(range(4), 2) for _ in prints], np.int32)
    chances = np.array([[rng.randint(80, 255), rng.randint(0, 80)] for _ in prints], np.uint8)
    return native.PhraseTable(prints.view(np.int32), ids, chances)


def made(branches: bool = True, **config: Any) -> Callable[[Traffic], Proposer]:
    """The proposer that a configuration makes, over a scripted model and a random table."""

    def make(load: Traffic) -> Proposer:
        rng = random.Random(load.seed)
        model = ScriptedModel(rng, load.hit, load.answers, load.misbehave)
        parts = Parts(
            mtp=lambda: model,
            draft_model=lambda: model,
            phrases=lambda branches: PhraseProposer(phrases(rng), branches=branches),
            branches=branches,
            vocab_size=len(VOCABULARY),
        )
        return make_proposer(SpeculativeConfig(adaptive=False, **config), parts)

    return make


PLANS: dict[str, Callable[[Traffic], Proposer]] = {
    "auto": made(num_speculative_tokens=6),
    "auto, chains": made(branches=False, num_speculative_tokens=6),
    "auto, at most 3 nodes": made(num_speculative_tokens=6, tree=3),
    "suffix": made(method="suffix", num_speculative_tokens=5),
    "suffix, global, few": made(
        method="suffix", draft_memory="global", suffix_decoding_max_cached_requests=2,
        suffix_decoding_max_tree_depth=4, suffix_decoding_max_spec_factor=3.0,
    ),
    "suffix, request": made(branches=False, method="suffix", draft_memory="request"),
    "ngram": made(method="ngram", prompt_lookup_min=1),
    "mtp": made(method="mtp"),
    "mtp with ngram": made(
        method="mtp", mtp_strategy="with_ngram", num_speculative_tokens=6, prompt_lookup_min=1
    ),
    "draft model": made(method="draft_model", model="m", num_speculative_tokens=4),
}  # fmt: skip


def with_predictions(load: Traffic) -> Traffic:
    """The same traffic; a third of the requests bring a prediction: right, changed somewhere, or wrong."""
    rng = random.Random(load.seed)
    arrivals: list[Arrival] = []
    for arrival in load.arrivals:
        predicted = list(arrival.expected.token_ids)
        for _ in range(rng.randint(0, 3)):
            at = rng.randint(0, len(predicted))
            predicted[at : at + rng.randint(0, 2)] = [rng.randrange(4) for _ in range(rng.randint(0, 2))]
        if rng.random() < 2 / 3:
            predicted = []
        params = msgspec.structs.replace(arrival.request.params, prediction_token_ids=predicted)
        request = msgspec.structs.replace(arrival.request, params=params)
        arrivals.append(dataclasses.replace(arrival, request=request))
    return dataclasses.replace(load, arrivals=arrivals)


def check_stream(arrival: Arrival, stream: Sequence[RequestOutput]) -> Counter[str]:
    """What it got is what plain decoding gives, up to where it was cancelled; returns tokens by source."""
    expected, last = arrival.expected, stream[-1]
    token_ids = [token for output in stream for token in output.token_ids]
    sources = Counter(source for output in stream for source in output.sources)
    assert token_ids == expected.token_ids[: len(token_ids)]
    assert last.speculation is not None
    assert sources.total() - sources["model"] == last.speculation.accepted_tokens
    if last.finish_reason is not FinishReason.ABORT:
        assert token_ids == expected.token_ids
        if last.finish_reason is not FinishReason.ERROR:
            assert "".join(output.text for output in stream) == expected.texts[-1]
        assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason)
    return sources


@pytest.mark.parametrize("name", PLANS)
def test_no_source_changes_a_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: Counter[str] = Counter()
    build = test_lossless.build_engine

    def build_engine(load: Traffic, *rest: Any) -> Engine:
        engine = build(load, *rest)
        limit = max(load.max_draft_tokens, 1)
        engine.drafting = Drafting(
            PLANS[name](load), method="auto", max_draft_tokens=limit, vocab_size=len(VOCABULARY)
        )
        return engine

    monkeypatch.setattr(test_lossless, "build_engine", build_engine)
    monkeypatch.setattr(
        test_lossless, "check_stream", lambda arrival, stream: events.update(check_stream(arrival, stream))
    )

    @settings(max_examples=40, phases=NO_SHRINKING)
    @given(traffic)
    def law(load: Traffic) -> None:
        events.update(test_lossless.run_traffic(with_predictions(load)))

    law()
    print(name, dict(events))
    assert events["preemptions"]
    for event in ("accepted", "rejected", "predicted", "ended by abort"):
        assert events[event] >= 5, f"{event} hardly happened: {events[event]}"
    for source in {"auto": ["suffix", "phrases", "script"], "mtp with ngram": ["script", "ngram"]}.get(
        name, []
    ):
        assert events[source] >= 5, f"nothing of {source} was accepted"


def test_a_sources_own_failure_is_told_and_the_law_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: SuffixProposer, requests: Sequence[Any], limits: Sequence[int]) -> Any:
        raise RuntimeError("lost the tree")

    monkeypatch.setattr(SuffixProposer, "propose", broken)
    test_no_source_changes_a_token("auto, chains", monkeypatch)
