"""MTP drafting inside the engine: the law, and that the module is a true shadow of its target."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from mtp_heads import chain_prompt, save_chain_model

from outrider.config import EngineConfig
from outrider.engine.factory import build_engine
from outrider.llm import LLM
from outrider.request import SamplingParams, SpeculationParams
from outrider.spec_decode.mtp import MTPProposer

OFF = {"method": "off"}
MTP = {"method": "mtp", "adaptive": False, "num_speculative_tokens": 3}
SIZES: dict[str, Any] = {
    "num_threads": 2,
    "max_model_len": 256,
    "block_size": 16,
    "kv_cache_dtype": "float32",
}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its head is never wrong about the likeliest token of a text that goes as the model likes."""
    return str(save_chain_model(tmp_path_factory.mktemp("exact")))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_chain_model(tmp_path_factory.mktemp("noisy"), noise=2.0))


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [chain_prompt(rng.randrange(90), rng.randint(1, 70)) for _ in range(num)]


def generate(
    model: str, texts: Sequence[Any], params: Any, speculative: dict[str, Any], **options: Any
) -> Any:
    with LLM(model, speculative_config=speculative, **(SIZES | options)) as llm:
        done = llm.generate(texts, params)
        return done, llm.engine.stats()


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3,
            "repetition_penalty": 1.1},
}  # fmt: skip


def mixed(num: int, max_tokens: int) -> list[SamplingParams]:
    ways = list(WAYS.values())
    return [
        SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True, **ways[i % len(ways)])
        for i in range(num)
    ]


def test_a_head_that_must_agree_is_always_accepted(exact: str) -> None:
    """Positions, hidden states and the recursion stand where they must: one off, and nothing is right."""
    params = SamplingParams(temperature=0.0, max_tokens=61, ignore_eos=True)
    done, _ = generate(exact, [chain_prompt(3, 20), chain_prompt(40, 1)], params, MTP)
    for one in done:
        spoken = one.speculation
        assert spoken["accepted_tokens"] == spoken["draft_tokens"] == 45 and spoken["steps"] == 16


def test_wrong_hidden_states_cost_acceptance_and_nothing_else(
    exact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    texts = [chain_prompt(3, 20), chain_prompt(8, 33)]
    plain, _ = generate(exact, texts, params, OFF)

    class Wrong:
        def __init__(self, head: Any) -> None:
            self.head = head
            self.draft, self.count_fed, self.max_rows = head.draft, head.count_fed, head.max_rows
            self.nbytes, self.move_slots = head.nbytes, head.move_slots

        def keep(self, hidden: np.ndarray, slots: np.ndarray) -> None:
            self.head.keep(np.ascontiguousarray(np.roll(hidden, 7, axis=1)), slots)

    from outrider.engine import factory

    right = factory.compile_draft_head
    monkeypatch.setattr(factory, "compile_draft_head", lambda *args: Wrong(right(*args)))
    wrong, _ = generate(exact, texts, params, MTP)
    assert [c.token_ids for c in wrong] == [c.token_ids for c in plain]
    assert all(c.speculation["draft_tokens"] > 100 for c in wrong)
    assert all(c.speculation["acceptance_rate"] < 0.2 for c in wrong)


TIGHT: dict[str, dict[str, Any]] = {
    "a batch of 8": {"max_num_seqs": 8},
    "one at a time": {"max_num_seqs": 1, "num_kv_blocks": 200},
    "preemptions": {"max_num_seqs": 8, "num_kv_blocks": 18},
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 16},
    "no prefix cache": {"max_num_seqs": 8, "enable_prefix_caching": False},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "fixed": MTP,
    "adaptive": {"method": "mtp"},
    "eight steps": {"method": "mtp", "adaptive": False, "num_model_steps": 8, "num_speculative_tokens": 8},
    "branches": MTP | {"num_speculative_tokens": 8},
    "branches, adaptive": {"method": "mtp", "num_speculative_tokens": 12},
    "with_ngram": MTP | {"mtp_strategy": "with_ngram", "num_model_steps": 2, "num_speculative_tokens": 6},
    "auto": {"method": "auto", "adaptive": False},
}


@pytest.mark.parametrize("pool", TIGHT)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_law(noisy: str, pool: str, drafter: str) -> None:
    texts = prompts(6)
    texts += [[*text, 7] for text in texts[:3]]  # begin as others do
    params = mixed(9, 40)
    plain, _ = generate(noisy, texts, params, OFF)
    done, stats = generate(noisy, texts, params, DRAFTERS[drafter], **TIGHT[pool])
    assert [(c.token_ids, c.finish_reason) for c in done] == [(c.token_ids, c.finish_reason) for c in plain]
    assert stats["num_draft_errors"] == 0
    if pool == "preemptions":
        assert stats["num_preemptions"] > 0
    if drafter == "branches":
        assert stats["num_accepted_tokens"]["mtp_second"] > 5
    if drafter == "fixed":
        counts = [c.speculation for c in done]
        assert sum(c["accepted_tokens"] for c in counts) > 50
        assert sum(c["draft_tokens"] - c["accepted_tokens"] for c in counts) > 50


class Scratch:
    """Drafts for a text, computed from nothing: the target over all of it, then the module."""

    def __init__(self, model: str) -> None:
        config = EngineConfig.from_dict({"model": model, "speculative_config": MTP} | SIZES)
        engine = build_engine(config)
        self.runner = engine.runner
        self.head: Any = engine.runner.draft_head
        self.table = np.arange(16, dtype=np.int32)[None]

    def drafts(self, token_ids: Sequence[int], state: Any, steps: int) -> tuple[list[int], list[float]]:
        from native_models import StepArrays

        num = len(token_ids)
        ids = np.array(token_ids, np.int32)
        at = np.arange(num, dtype=np.int32)
        loc, one = np.array([0, num], np.int32), np.array([num], np.int32)
        none = np.zeros(0, np.int32)
        step = StepArrays(ids, at, at, loc, one, self.table, none)
        self.runner.run(step)  # type: ignore[arg-type]
        zero, many = np.zeros(1, np.int32), np.array([steps], np.int32)
        drafted, chances = self.head.draft(ids, loc, zero, self.table, many, [state])
        return drafted[0, 0].tolist(), np.cumprod(chances[0, 0].astype(float)).tolist()


@pytest.mark.parametrize("pool", TIGHT)
def test_the_module_is_a_shadow_of_the_target(noisy: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happened before (accepted and rejected drafts, rounds without drafts, preemption, prefixes
    of others), a draft is the one that is made from nothing, to the last bit of its probability."""
    scratch, rng = Scratch(noisy), random.Random(1)
    propose = MTPProposer.propose
    seen = {"drafts": 0, "skipped": 0}

    def checked(self: Any, requests: Any, limits: Any) -> Any:
        self.choose_model_steps = lambda requests, drafts: [rng.choice((0, 0, 1, 2, 3)) for _ in requests]
        result = propose(self, requests, limits)
        for request, drafts in zip(requests, result, strict=True):
            if not drafts:
                seen["skipped"] += 1
                continue
            drafts = drafts.first(drafts.source.count("mtp"))  # without second choices
            tokens, survival = scratch.drafts(request.token_ids, request.sampling_state, len(drafts))
            assert list(drafts.token_ids) == tokens
            assert list(drafts.survival) == pytest.approx(survival, abs=1e-4 + 1e-12)
            assert drafts.survival[0] == max(survival[0], 1e-4)
            seen["drafts"] += 1
        return result

    monkeypatch.setattr(MTPProposer, "propose", checked)
    texts = prompts(6)
    texts += [[*text, 7] for text in texts]
    params = mixed(12, 30)
    done, stats = generate(noisy, texts, params, MTP, **TIGHT[pool])
    assert stats["num_draft_errors"] == 0 and not any(stats["speculation"]["proposer"]["errors"].values())
    assert seen["drafts"] > 100 and seen["skipped"] > 50
    assert sum(c.speculation["accepted_tokens"] for c in done) > 20
    if pool == "preemptions":
        assert stats["num_preemptions"] > 0
    if pool == "one at a time":
        assert stats["prefix_cache_hits"] > 0


def test_a_request_can_do_without(exact: str) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, speculation=override)
        for override in (
            None,
            SpeculationParams(method="off"),
            SpeculationParams(method="mtp", max_draft_tokens=1),
        )
    ]
    done, _ = generate(exact, [chain_prompt(3, 20)] * 3, params, MTP, enable_prefix_caching=False)
    assert done[0].token_ids == done[1].token_ids == done[2].token_ids
    assert [c.speculation["steps"] for c in done] == [6, 20, 11]


def test_a_prompt_that_is_too_long_for_one_round_is_caught_up_with(
    exact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.spec_decode.mtp.CATCH_UP_ROWS", 40)
    monkeypatch.setattr("outrider.spec_decode.mtp.MOST_PENDING", 5)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    done, stats = generate(exact, [chain_prompt(3, 150)], params, MTP)
    spoken = done[0].speculation
    assert spoken["accepted_tokens"] == spoken["draft_tokens"] > 20
    assert spoken["steps"] == 3 + 10  # three rounds of 40 tokens, then the rest and a draft each time
    assert stats["speculation"]["proposer"]["sources"]["mtp"]["fed_tokens"] < 200


def test_no_preemption_for_the_slots_of_drafts(exact: str) -> None:
    """Two requests that just fill the cache together: drafts take only what neither needs."""
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    texts = [chain_prompt(3, 15), chain_prompt(50, 15)]
    _, stats = generate(exact, texts, params, MTP | {"num_speculative_tokens": 8, "num_model_steps": 8},
                        num_kv_blocks=6, max_model_len=64, enable_prefix_caching=False)  # fmt: skip
    assert stats["num_preemptions"] == 0
    assert stats["num_draft_errors"] == 0
