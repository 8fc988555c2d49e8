"""A hundred schemas on the real model: every answer keeps its schema and is the one of plain decoding.

The sample (one schema of each kind) runs with `-m model`; all of them are `slow`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from test_law_model import Adversary, events
from test_law_mtp import mtp  # noqa: F401 (a fixture)

from outrider.llm import LLM, Completion
from outrider.request import FinishReason, GrammarSpec, SamplingParams
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts

FOLDER = Path(__file__).parent / "schemas"
SCHEMAS: dict[str, Any] = {
    f"{path.stem}: {name}": schema
    for path in sorted(FOLDER.glob("*.json"))
    for name, schema in json.loads(path.read_text(encoding="utf-8")).items()
}
PLAIN: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "speculative_config": {"method": "off"}}


def test_there_are_a_hundred_schemas_that_are_schemas() -> None:
    assert len(SCHEMAS) == 100
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@dataclass(frozen=True)
class Work:
    """Each schema, greedy and at temperature 0.8."""

    names: list[str]
    prompts: list[list[dict[str, str]]]
    params: list[SamplingParams]


def work_of(names: Sequence[str], max_tokens: int) -> Work:
    asked = [(name, temperature) for name in names for temperature in (0.0, 0.8)]
    return Work(
        [name for name, _ in asked],
        [
            [{"role": "user", "content": f"Give me an example of this kind ({name}) in JSON."}]
            for name, _ in asked
        ],
        [
            SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=i, logprobs=1 if i % 5 == 0 else None,
                grammar=GrammarSpec.json_schema(SCHEMAS[name]),
            )
            for i, (name, temperature) in enumerate(asked)
        ],
    )  # fmt: skip


@dataclass(frozen=True)
class Reference:
    work: Work
    completions: list[Completion]


def reference(names: Sequence[str], max_tokens: int) -> Reference:
    work = work_of(names, max_tokens)
    with LLM(**PLAIN) as llm:
        completions = llm.chat(work.prompts, work.params)
    for name, completion in zip(work.names, completions, strict=True):
        check_answer(name, completion)
    return Reference(work, completions)


def check_answer(name: str, completion: Completion) -> None:
    assert completion.error is None, f"{name}: {completion.error}"
    if completion.finish_reason is FinishReason.STOP:
        value = json.loads(completion.text)
        jsonschema.validate(value, SCHEMAS[name], format_checker=jsonschema.FormatChecker())


@pytest.fixture(scope="module")
def sample(builtin_model: Path) -> Iterator[Reference]:
    yield reference([name for i, name in enumerate(SCHEMAS) if i % 10 == i // 10], max_tokens=40)


@pytest.fixture(scope="module")
def whole(builtin_model: Path) -> Iterator[Reference]:
    yield reference(list(SCHEMAS), max_tokens=160)


def answers(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in completions]


def check_variant(expected: Reference, speculative: dict[str, Any]) -> dict[str, Any]:
    with LLM(**(PLAIN | {"speculative_config": speculative})) as llm:
        given = llm.chat(expected.work.prompts, expected.work.params)
        stats: dict[str, Any] = llm.engine.stats()
    assert answers(given) == answers(expected.completions)
    return stats


VARIANTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "auto": {"method": "auto"},
    "everything verified": {"method": "auto", "adaptive": False, "num_speculative_tokens": 12},
}


@pytest.mark.model
@pytest.mark.parametrize("name", VARIANTS)
def test_the_sample_keeps_its_schemas_and_its_tokens(sample: Reference, name: str) -> None:
    stats = check_variant(sample, VARIANTS[name])
    assert stats["num_accepted_tokens"]["grammar"] > 20


@pytest.mark.model
def test_the_sample_gets_the_same_tokens_with_a_head(sample: Reference, mtp: dict[str, Any]) -> None:  # noqa: F811
    check_variant(sample, mtp)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_get_the_same_tokens_with_a_head(whole: Reference, mtp: dict[str, Any]) -> None:  # noqa: F811
    stats = check_variant(whole, mtp)
    assert stats["num_accepted_tokens"]["grammar"] > 500


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", VARIANTS)
def test_all_keep_their_schemas_and_their_tokens(whole: Reference, name: str) -> None:
    finished = [c for c in whole.completions if c.finish_reason is FinishReason.STOP]
    assert len(finished) > 190
    stats = check_variant(whole, VARIANTS[name])
    assert stats["num_accepted_tokens"]["grammar"] > 500
    assert stats["num_draft_tokens"]["grammar"] >= stats["num_accepted_tokens"]["grammar"]


class Saboteur(Adversary):
    """Draws trees around the answers: right and wrong children at every depth, most of them forbidden."""

    def _drafts(self, request: Any, limit: int) -> Drafts:
        chain = super()._drafts(request, limit)
        if not chain.token_ids:
            return NO_DRAFTS
        token_ids, parents = list(chain.token_ids), list(chain.parents)
        while len(token_ids) < limit and self.rng.random() < 0.8:
            parents.append(self.rng.randrange(-1, len(token_ids)))
            token_ids.append(self.rng.choice([*chain.token_ids, self.rng.randrange(self.vocab_size)]))
        num = len(token_ids)
        return Drafts(tuple(token_ids), tuple(parents), (0.5,) * num, ("saboteur",) * num)


def check_sabotage(expected: Reference) -> None:
    speculative = {"method": "ngram", "adaptive": False, "num_speculative_tokens": 12}
    with LLM(**(PLAIN | {"speculative_config": speculative})) as llm:
        llm.engine.drafting.proposer = Saboteur(expected.completions, len(llm.engine.vocabulary))
        given = llm.chat(expected.work.prompts, expected.work.params)
        happened = events(llm)
    assert answers(given) == answers(expected.completions)
    assert happened["accepted"] > 50 and happened["rejected"] > 50


@pytest.mark.model
def test_the_sample_gets_the_same_tokens_against_a_saboteur(sample: Reference) -> None:
    check_sabotage(sample)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_get_the_same_tokens_against_a_saboteur(whole: Reference) -> None:
    check_sabotage(whole)
