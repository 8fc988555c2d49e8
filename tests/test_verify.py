"""`outrider verify` passes on honest code, fails on a planted fault, and says where."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_heads import save_chain_model

import outrider.engine.engine as engine_module
import outrider.verification.certificate as certificate_module
from outrider.engine.scheduler import Plan
from outrider.entrypoints import verify
from outrider.entrypoints.cli import main as outrider
from outrider.request import FinishReason, SamplingParams, TokenLogprobs
from outrider.sampling.verifier import Walk, walk_by_policy
from outrider.spec_decode.proposer import Drafts
from outrider.verification.adversaries import all_right, all_wrong, as_trees, at_random
from outrider.verification.cases import make_cases
from outrider.verification.certificate import Answer, first_difference
from outrider.verification.questions import Question


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "QUICK", (5, 20))


def run(*arguments: str) -> int:
    return outrider(["verify", "--num-threads", "2", *arguments])


@pytest.mark.model
def test_honest_code_gets_its_certificate(
    builtin_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "certificate.json"
    assert run("--only", "right", "--report", str(report)) == 0
    text = capsys.readouterr().out
    assert "lossless: every case gives the tokens of plain decoding" in text
    written = json.loads(report.read_text())
    assert written["lossless"] is True and written["threads"] == 2
    names = [case["case"] for case in written["cases"]]
    assert names[0] == "plain decoding, each request alone" and "drafts always right" in names
    assert all(case["verdict"] == "passed" for case in written["cases"])
    assert written["cases"][1]["events"]["accepted"] > 10


@pytest.mark.model
def test_a_wrong_token_in_the_walk_is_found_and_shown(
    builtin_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def careless(drafts: Drafts, sampled: Sequence[int], policy: str = "normal") -> Walk:
        """Keeps a first draft that shares its last digit with the model's token."""
        if drafts.token_ids and drafts.token_ids[0] % 10 == sampled[0] % 10:
            return Walk([0], [drafts.token_ids[0], sampled[1]])
        return walk_by_policy(drafts, sampled, policy)

    monkeypatch.setattr(engine_module, "walk_by_policy", careless)
    report = tmp_path / "certificate.json"
    assert run("--only", "always wrong", "--report", str(report)) == 1
    text = capsys.readouterr().out
    assert "NOT lossless" in text and "plain decoding gives" in text
    written = json.loads(report.read_text())
    assert written["lossless"] is False
    first = written["cases"][1]["first_difference"]
    assert first["expected"] != first["got"] and first["position"] >= 0


@pytest.mark.model
def test_penalties_that_ignore_accepted_drafts_are_found(
    builtin_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = engine_module.build_batch

    def forgetful(plan: Plan, block_size: int) -> Any:
        batch = honest(plan, block_size)
        sampling = batch.sampling
        nothing = {
            "prefix_start": np.zeros_like(sampling.prefix_start),
            "prefix_ids": sampling.prefix_ids[:0],
        }
        sampling = dataclasses.replace(sampling, **nothing)
        return dataclasses.replace(batch, sampling=sampling)

    monkeypatch.setattr(engine_module, "build_batch", forgetful)
    assert run("--only", "drafts always right") == 1
    assert "penalties" in capsys.readouterr().out


def test_sources_with_models_are_examined_where_there_is_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(save_chain_model(tmp_path / "chain", noise=0.5))
    report = tmp_path / "certificate.json"
    assert run(target, "--only", "steps", "--report", str(report)) == 0
    cases = {case["case"]: case for case in json.loads(report.read_text())["cases"]}
    assert {case["verdict"] for case in cases.values()} == {"passed"}
    assert cases["mtp, always 3 steps"]["events"]["accepted"] > 20
    assert cases["draft_model, always 3 steps"]["events"]["accepted"] > 20

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr("outrider.spec_decode.draft_model.DraftModelProposer.propose", fail)
    assert run(target, "--only", "draft_model") == 1
    assert "no token differs, but the drafter failed" in capsys.readouterr().out


@pytest.mark.model
def test_a_comparison_that_sees_nothing_fails_its_control(
    builtin_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--only", "control") == 0
    monkeypatch.setattr(certificate_module, "first_difference", lambda *_: (0, None))
    assert run("--only", "control") == 1
    assert "means nothing" in capsys.readouterr().out


# --- without a model ---


def answer(*token_ids: int, **fields: Any) -> Answer:
    return Answer(list(token_ids), "".join(map(str, token_ids)), FinishReason.LENGTH, **fields)


def question() -> Question:
    return Question("greedy", "text", [1, 2], SamplingParams(max_tokens=9))


@pytest.mark.parametrize(
    ("given", "position", "expected", "got"),
    [
        (answer(1, 9, 3), 1, "2", "9"),
        (answer(1, 2), 2, "3", "the end"),
        (answer(1, 2, 3, 4), 3, "the end", "4"),
        (answer(1, 2, 3, stop_reason="x"), 3, "stop_reason None", "'x'"),
        (answer(1, 2, 3, logprobs=[TokenLogprobs(-1.0, 1, [], [])]), 3, "logprobs []", None),
    ],
)
def test_the_first_difference_is_named(given: Answer, position: int, expected: str, got: str | None) -> None:
    right = [answer(5), answer(1, 2, 3)]
    num, first = first_difference([question()] * 2, right, [answer(5), given], str)
    assert num == 1 and first is not None
    assert (first.request, first.position, first.expected) == (1, position, expected)
    assert got is None or first.got == got
    assert first_difference([question()] * 2, right, right, str) == (0, None)


def test_adversaries_draft_what_they_promise() -> None:
    rng, ahead = random.Random(0), [3, 1, 4, 1, 5, 9, 2, 6]
    rights = branches = 0
    for _ in range(200):
        right = all_right(ahead, rng, 10)
        assert list(right.token_ids) == ahead[: len(right)] and len(right)
        wrong = all_wrong(ahead, rng, 10)
        assert all(a != b for a, b in zip(wrong.token_ids, ahead, strict=False))
        mixed = at_random(ahead, rng, 10)
        rights += sum(a == b for a, b in zip(mixed.token_ids, ahead, strict=False))
        tree = as_trees(ahead, rng, 10)
        tree.check(10)
        branches += not tree.is_chain
    assert rights > 300 and branches > 100


def test_the_cases_cover_every_method_and_state() -> None:
    names = [case.name for case in make_cases([question()], 2, target="m")]
    assert len(names) == len(set(names))
    text = "\n".join(names)
    for word in (
        "plain", "naive", "ngram", "suffix", "mtp", "draft_model", "auto", "tree", "chunks", "blocks",
        "thread", "prefix cache", "preemption", "right", "wrong", "fails", "control",
    ):  # fmt: skip
        assert word in text
    thorough = make_cases([question()], 2, target="m", thorough=True)
    assert {case.name for case in thorough} > set(names)
    assert sum(case.must_differ for case in thorough) == 1
