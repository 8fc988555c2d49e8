"""A second model as a drafter.

One that drafts for itself must be right every time: kernels give a row the same bits whatever stands
beside it, and target and drafter draw with the same noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pruned_model import prune

import outrider.engine.draft_model_parts as parts
from outrider.config_fields import ConfigError
from outrider.engine.draft_model_parts import check_vocabularies
from outrider.engine.draft_runner import DraftRunner
from outrider.llm import LLM, Completion
from outrider.models.loader import Checkpoint, load_checkpoint
from outrider.request import SamplingParams

pytestmark = pytest.mark.model
PROMPTS = [
    "Cats purr because",
    "def add(a, b):\n",
    "one two three one two three one two",
    "The old mill " * 9,
]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(
        temperature=1.0, seed=6, top_p=0.9, repetition_penalty=1.2, max_tokens=24, logprobs=2, ignore_eos=True
    ),
    SamplingParams(temperature=0, max_tokens=24, min_tokens=20, logit_bias={28: 2.0}, ignore_eos=True),
]
SMALL: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 40, "max_num_seqs": 4, "num_threads": 2}


@pytest.fixture(scope="module")
def whole(builtin_model: Path) -> Checkpoint:
    return load_checkpoint(str(builtin_model))


@pytest.fixture(scope="module")
def plain(builtin_model: Path) -> list[Completion]:
    with LLM(str(builtin_model), speculative_config={"method": "off"}, **SMALL) as llm:
        return llm.generate(PROMPTS, SAMPLING)


def drafted_by(
    monkeypatch: pytest.MonkeyPatch, draft: Checkpoint, path: Path, **options: Any
) -> Iterator[LLM]:
    """An LLM whose draft model is `draft`, whatever the configuration names."""
    monkeypatch.setattr(parts, "load_checkpoint", lambda *args, **kwargs: draft)
    speculative = {"method": "draft_model", "model": "a draft model", "adaptive": False}
    speculative["num_speculative_tokens"] = options.pop("tokens", 4)
    with LLM(str(path), speculative_config=speculative, **(SMALL | options)) as llm:
        yield llm


def same_answers(completions: list[Completion], plain: list[Completion]) -> None:
    for completion, expected in zip(completions, plain, strict=True):
        assert completion.token_ids == expected.token_ids
        assert completion.text == expected.text and completion.logprobs == expected.logprobs


def runner_of(llm: LLM) -> DraftRunner:
    runner: DraftRunner = llm.engine.drafting.proposer.model[1]._model  # type: ignore[attr-defined]
    return runner


@pytest.mark.parametrize("options", [{}, {"tokens": 1}, {"tokens": 7, "max_num_batched_tokens": 16}], ids=str)
def test_a_model_that_drafts_for_itself_is_always_right(
    monkeypatch: pytest.MonkeyPatch, whole: Checkpoint, builtin_model: Path, plain: list[Completion],
    options: dict[str, Any],
) -> None:  # fmt: skip
    for llm in drafted_by(monkeypatch, whole, builtin_model, **options):
        same_answers(completions := llm.generate(PROMPTS, SAMPLING), plain)
        for completion in completions:
            drafted, accepted = completion.speculation["by_source"]["draft_model"].values()
            assert accepted == drafted > 8
        cache = runner_of(llm).kv_cache
        assert cache.num_free_blocks == cache.num_blocks


def test_a_smaller_model_is_often_right_and_changes_no_token(
    monkeypatch: pytest.MonkeyPatch, whole: Checkpoint, builtin_model: Path, plain: list[Completion]
) -> None:
    for llm in drafted_by(monkeypatch, prune(whole), builtin_model):
        for _ in range(2):  # the second time with the prompts in both prefix caches
            same_answers(completions := llm.generate(PROMPTS, SAMPLING), plain)
        first = [completion.speculation["per_position"][0] for completion in completions]
        share = sum(accepted for _, accepted in first) / sum(drafted for drafted, _ in first)
        assert 0.3 < share < 0.98
        assert runner_of(llm).kv_cache.num_hit_tokens == 0  # admission is not counted, only used


def test_a_draft_cache_that_is_too_small_gives_fewer_drafts_and_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, whole: Checkpoint, builtin_model: Path, plain: list[Completion]
) -> None:
    manager = parts.KVCacheManager
    monkeypatch.setattr(parts, "KVCacheManager", lambda blocks, *rest: manager(3, *rest))
    for llm in drafted_by(monkeypatch, whole, builtin_model):
        same_answers(llm.generate(PROMPTS, SAMPLING), plain)
        assert runner_of(llm).kv_cache.num_free_blocks == 3
        assert llm.engine.stats()["num_draft_errors"] == 0


def test_another_tokenizer_is_refused_with_the_token_that_differs(whole: Checkpoint) -> None:
    class Other:
        def token_bytes(self) -> list[bytes]:
            table = list(whole.tokenizer.token_bytes())
            table[7000] = b"something else"
            return table

    other = replace(whole, tokenizer=Other(), name="other")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"other has another tokenizer than .*token 7000 is b'something else'"
    ):
        check_vocabularies(whole, other)
    bigger = replace(whole, config=replace(whole.config, vocab_size=60_000), name="bigger")
    with pytest.raises(ConfigError, match=r"the draft model bigger has 49152 tokens \(60000 padded\)"):
        check_vocabularies(whole, bigger)
    check_vocabularies(whole, whole)
