"""Every way to decode that the certificate compares with plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.spec_decode.proposer import Drafts
from outrider.verification.adversaries import all_right, all_wrong, as_trees, at_random, broken
from outrider.verification.questions import Question

Make = Callable[[Sequence[int], random.Random, int], Drafts]
OFF = {"method": "off"}


@dataclass(frozen=True)
class Case:
    """One way. What is not said is as in the user's configuration."""

    name: str
    speculative: dict[str, Any] = field(default_factory=lambda: dict(OFF))
    options: dict[str, Any] = field(default_factory=dict)  # of the engine's configuration
    adversary: Make | None = None  # drafts instead of the method's own source
    must: tuple[str, ...] = ()  # what has to have happened for the case to mean anything
    num_passes: int = 1  # later ones find the prefix cache warm
    admits_all: bool = False  # even where running requests have no room to grow, so that some are preempted
    may_lack: bool = False  # the model may have nothing for this method
    must_differ: bool = False  # a control: wrong output on purpose, which the comparison has to see


def make_cases(
    questions: Sequence[Question],
    num_threads: int,
    *,
    target: str,
    head: str | None = None,
    thorough: bool = False,
) -> list[Case]:
    """All cases, in the order of the report. `head`: where to find an MTP head, if not beside `target`."""
    return [
        *_batching(questions, num_threads, thorough),
        *_free_methods(thorough),
        *_model_methods(target, {"model": head} if head else {}, thorough),
        *_adversaries(thorough),
        Case(
            "control: accept_all keeps wrong drafts", _fixed("ngram", 6, accept_policy="accept_all"),
            {"allow_debug_policies": True}, adversary=all_wrong, must_differ=True,
        ),
    ]  # fmt: skip


def _fixed(method: str, num_tokens: int, **more: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": num_tokens, "adaptive": False, **more}


def _batching(questions: Sequence[Question], num_threads: int, thorough: bool) -> list[Case]:
    """Batches, chunks, blocks, threads, caches and preemption; with drafts where that is harder."""
    ngram = _fixed("ngram", 6, prompt_lookup_min=1)
    longest = max(question.num_tokens for question in questions)
    tight = -(-(longest + 8) // 16)
    pool = {"num_kv_blocks": tight + 2, "block_size": 16, "max_model_len": tight * 16}
    cases = [
        Case("plain, all requests in one batch"),
        Case("naive: the speculative path without drafts", {"method": "naive"}),
        Case("ngram, one request at a time", ngram, {"max_num_seqs": 1}, must=("accepted",)),
        Case(
            "chunks of 16, blocks of 16, 4 at once", ngram,
            {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 16}, must=("accepted",),
        ),
        Case("chunks of 100, blocks of 64", ngram, {"max_num_batched_tokens": 100, "block_size": 64}),
        Case("blocks of 128", ngram, {"block_size": 128}),
        Case("prefix cache cold, then warm", ngram, {"block_size": 16}, must=("prefix hits",), num_passes=2),
        Case("no prefix cache", ngram, {"enable_prefix_caching": False}),
        Case("no chunked prefill", ngram, {"enable_chunked_prefill": False}),
        Case("preemption, plain", dict(OFF), pool, must=("preemptions",), admits_all=True),
        Case("preemption, ngram", ngram, pool, must=("preemptions",), admits_all=True),
    ]  # fmt: skip
    counts = sorted({1, 2, num_threads, *((3, 4) if thorough else ())} - {num_threads})
    return [*cases, *(Case(f"{n} thread{'s' * (n > 1)}", ngram, {"num_threads": n}) for n in counts)]


def _free_methods(thorough: bool) -> list[Case]:
    """Every source that runs no model, with fixed numbers of drafts and under the controller."""
    cases = []
    for method in ("ngram", "suffix"):
        for number in (1, 2, 5, 8, 16, 32) if thorough else (1, 5):
            cases.append(Case(f"{method}, always {number} drafts", _fixed(method, number)))
        cases.append(Case(f"{method}, adaptive", {"method": method}))
    return cases


def _model_methods(target: str, head: dict[str, Any], thorough: bool) -> list[Case]:
    """Sources that run a model, and everything together. The target itself serves as a draft model."""
    cases = []
    for number in (1, 2, 3, 5, 8) if thorough else (1, 3):
        steps = _fixed("mtp", number, num_model_steps=number, **head)
        cases.append(Case(f"mtp, always {number} steps", steps, must=("drafted",), may_lack=True))
        itself = _fixed("draft_model", number, model=target)
        name = f"draft_model, always {number} steps"
        cases.append(Case(name, itself, must=("accepted",), may_lack=True))
    tail = _fixed("mtp", 8, num_model_steps=2, mtp_strategy="with_ngram", **head)
    auto = {"method": "auto", **head}
    return [
        *cases,
        Case("mtp, adaptive", {"method": "mtp", **head}, may_lack=True),
        Case("mtp with an n-gram tail", tail, may_lack=True),
        Case("auto, adaptive", auto),
        Case("auto, everything verified", _fixed("auto", 8, **head)),
        Case("auto, no trees", _fixed("auto", 8, tree="off", **head)),
        Case("auto, one request at a time", auto, {"max_num_seqs": 1}),
        Case(
            "auto, prefix cache cold, then warm", auto, {"block_size": 16},
            must=("prefix hits",), num_passes=2,
        ),
    ]  # fmt: skip


def _adversaries(thorough: bool) -> list[Case]:
    free = _fixed("ngram", 12)
    drafters: dict[str, tuple[Make, tuple[str, ...]]] = {
        "always right": (all_right, ("accepted",)),
        "always wrong": (all_wrong, ("rejected",)),
        "right three times in four": (at_random, ("accepted", "rejected")),
        "as trees": (as_trees, ("accepted", "rejected")),
        "by a drafter that fails": (broken, ("draft errors",)),
    }
    cases = []
    for name, (make, must) in drafters.items():
        cases.append(Case(f"drafts {name}", free, adversary=make, must=must))
    for name in ("right three times in four", "as trees"):
        make, must = drafters[name]
        cases.append(Case(f"drafts {name}, adaptive", {"method": "ngram"}, adversary=make))
        options = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 16}
        cases.append(Case(f"drafts {name}, small chunks", free, options, adversary=make, must=must))
        if thorough:
            cases.append(Case(f"drafts {name}, alone", free, {"max_num_seqs": 1}, make, must))
    reject = _fixed("ngram", 6, accept_policy="reject_all")
    cases.append(
        Case("reject_all verifies and keeps nothing", reject, {"allow_debug_policies": True}, all_right)
    )
    return cases
