"""Runs the cases, compares them with plain decoding token by token, and writes down what came out."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.engine.factory import build_engine
from outrider.models.loader import Checkpoint
from outrider.request import AddRequest, FinishReason, RequestOutput, TokenLogprobs
from outrider.verification.adversaries import Adversary, Answers
from outrider.verification.cases import OFF, Case
from outrider.verification.questions import Question

PASSED, FAILED, LACKING, IDLE = "passed", "FAILED", "not available", "idle"


@dataclass
class Answer:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.text += output.text
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.logprobs += output.logprobs or []
        self.error = output.error


@dataclass(frozen=True)
class Difference:
    """The first place where a request did not get what plain decoding gives."""

    request: int
    parameters: str
    prompt: str
    position: int  # in the output
    expected: str
    got: str

    def describe(self) -> str:
        return (
            f"request {self.request} ({self.parameters}; {self.prompt!r}), output position {self.position}: "
            f"plain decoding gives {self.expected}, here came {self.got}"
        )


@dataclass
class Outcome:
    """What became of a case."""

    case: str
    verdict: str
    reason: str = ""
    num_requests: int = 0
    num_tokens: int = 0
    events: dict[str, int] = field(default_factory=dict)
    num_different: int = 0
    error: str = ""  # of a drafter, the last
    first_difference: Difference | None = None
    seconds: float = 0.0


def ask(engine: Engine, questions: Sequence[Question], at_once: bool) -> list[Answer]:
    """The answers to all questions, together or one after the other."""
    answers = [Answer() for _ in questions]
    groups = [range(len(questions))] if at_once else [range(i, i + 1) for i in range(len(questions))]
    for group in groups:
        for i in group:
            request = AddRequest(str(i), questions[i].prompt_ids, questions[i].params, time.monotonic())
            engine.add_request(request)
        while engine.has_work:
            for output in engine.step():
                answers[int(output.request_id)].add(output)
    return answers


def first_difference(
    questions: Sequence[Question],
    expected: Sequence[Answer],
    got: Sequence[Answer],
    name_token: Callable[[int], str],
) -> tuple[int, Difference | None]:
    """(requests that differ, where the first of them does)."""
    num, first = 0, None
    for i, (question, right, given) in enumerate(zip(questions, expected, got, strict=True)):
        found = _difference(right, given, name_token)
        if found is None:
            continue
        num += 1
        if first is None:
            first = Difference(i, question.name, question.text[:60], *found)
    return num, first


def _difference(right: Answer, given: Answer, name: Callable[[int], str]) -> tuple[int, str, str] | None:
    for place, (a, b) in enumerate(zip(right.token_ids, given.token_ids, strict=False)):
        if a != b:
            return place, name(a), name(b)
    end = min(len(right.token_ids), len(given.token_ids))
    if len(right.token_ids) != len(given.token_ids):
        longer = [len(answer.token_ids) > end for answer in (right, given)]
        return (
            end,
            name(right.token_ids[end]) if longer[0] else "the end",
            name(given.token_ids[end]) if longer[1] else "the end",
        )
    for place, (one, two) in enumerate(zip(right.logprobs, given.logprobs, strict=False)):
        if one != two:
            return place, f"log-probabilities {one!r}", f"{two!r}"
    # How an error is worded is not compared: that there is one ends the request in the same place.
    for what in ("finish_reason", "stop_reason", "text", "logprobs"):
        mine, other = getattr(right, what), getattr(given, what)
        if mine != other:
            return end, f"{what} {mine!r}", f"{other!r}"
    return None


class Certificate:
    """A model under examination."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, questions: Sequence[Question]) -> None:
        longest = max(question.num_tokens for question in questions)
        # Enough for all at once; the cases that want it tight say so.
        length = -(-(longest + 40) // 128) * 128
        self._config = dataclasses.replace(
            config, max_model_len=length, num_kv_blocks=len(questions) * length // config.block_size + 8
        )
        self._checkpoint = checkpoint
        self._questions = questions
        self._expected: list[Answer] = []
        self._answers: Answers = {}
        tokens = checkpoint.tokenizer.token_bytes()
        self._name = lambda i: f"{i} {tokens[i].decode('utf-8', 'replace')!r}" if i >= 0 else str(i)

    def record(self) -> Outcome:
        """Plain decoding, each request alone with nothing cached: what everything is compared with."""
        begin = time.perf_counter()
        engine = self._engine(dict(OFF), {"enable_prefix_caching": False})
        self._expected = ask(engine, self._questions, at_once=False)
        for question, answer in zip(self._questions, self._expected, strict=True):
            self._answers[tuple(question.prompt_ids), question.params.seed or 0] = answer.token_ids
        outcome = Outcome("plain decoding, each request alone", PASSED)
        self._count(outcome, engine, self._expected)
        errors = [answer.error for answer in self._expected if answer.error]
        if errors:  # as long as others can be compared, so can these: they must end in the same way
            outcome.verdict = FAILED if len(errors) == len(self._expected) else PASSED
            outcome.reason = f"{len(errors)} of the requests end with an error: {errors[0]}"
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def examine(self, case: Case) -> Outcome:
        """Run one case and compare."""
        begin = time.perf_counter()
        outcome = Outcome(case.name, PASSED)
        try:
            self._run(case, outcome)
        except Exception as error:
            outcome.verdict, outcome.reason = FAILED, f"{type(error).__name__}: {error}"
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def _run(self, case: Case, outcome: Outcome) -> None:
        try:
            engine = self._engine(case.speculative, case.options)
        except ValueError as error:
            if not case.may_lack:
                raise
            outcome.verdict, outcome.reason = LACKING, str(error)
            return
        if case.adversary is not None:
            vocab_size = len(engine.vocabulary)
            engine.drafting.proposer = Adversary(self._answers, vocab_size, case.adversary)
        if case.admits_all:
            engine.scheduler.leaves_room = False
        for _ in range(case.num_passes):
            given = ask(engine, self._questions, at_once=True)
            num, first = first_difference(self._questions, self._expected, given, self._name)
            outcome.num_different += num
            outcome.first_difference = outcome.first_difference or first
        engine.scheduler.check()
        self._count(outcome, engine, given)
        self._judge(case, outcome)

    def _judge(self, case: Case, outcome: Outcome) -> None:
        happened = {**outcome.events, "drafted": outcome.events["accepted"] + outcome.events["rejected"]}
        missing = [what for what in case.must if not happened[what]]
        if case.must_differ:
            if not outcome.num_different:
                outcome.verdict = FAILED
                outcome.reason = "wrong output was not noticed, so this certificate means nothing"
            return
        if outcome.num_different:
            outcome.verdict = FAILED
        elif outcome.events["draft errors"] and case.adversary is None:
            outcome.verdict = FAILED
            outcome.reason = f"no token differs, but the drafter failed: {outcome.error}"
        elif missing:
            outcome.verdict, outcome.reason = IDLE, f"no {', '.join(missing)} happened: nothing was tested"

    def _engine(self, speculative: dict[str, Any], options: dict[str, Any]) -> Engine:
        chosen = SpeculativeConfig(**speculative)
        options = {**options, "speculative_config": chosen}
        if "block_size" in options and "num_kv_blocks" not in options:
            size = (self._config.num_kv_blocks or 1) * self._config.block_size
            options["num_kv_blocks"] = -(-size // options["block_size"])
        if options.get("max_num_batched_tokens", 2048) < self._config.max_num_seqs:
            options.setdefault("max_num_seqs", options["max_num_batched_tokens"])
        logging.getLogger("outrider").setLevel("CRITICAL")  # drafters fail on purpose here
        return build_engine(dataclasses.replace(self._config, **options), self._checkpoint)

    def _count(self, outcome: Outcome, engine: Engine, given: Sequence[Answer]) -> None:
        stats = engine.stats()
        speculation = stats["speculation"]
        by_source = speculation["proposer"].get("errors", {})
        outcome.error = speculation["health"]["last_error"] or ", ".join(by_source)
        accepted = sum(stats["num_accepted_tokens"].values())
        outcome.num_requests = len(given)
        outcome.num_tokens = sum(len(answer.token_ids) for answer in given)
        outcome.events = {
            "accepted": accepted,
            "rejected": sum(stats["num_draft_tokens"].values()) - accepted,
            "preemptions": stats["num_preemptions"],
            "prefix hits": stats["prefix_cache_hits"],
            "draft errors": stats["num_draft_errors"] + sum(by_source.values()),
        }
