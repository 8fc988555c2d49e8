"""Grammars in the engine: compiled once beside it, kept within bounds, waited for; where they end a text."""

from __future__ import annotations

import threading
from typing import Any

from fakes import VOCABULARY, HashModel, ReferenceSampler
from grammar_oracle import AtOnce, compiled, grammars_of

from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.engine.grammars import Grammars
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.output import OutputStream
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Scheduler
from outrider.engine.state import Request
from outrider.request import AddRequest, FinishReason, GrammarSpec, RequestOutput, SamplingParams
from outrider.sampling.grammar import Grammar
from outrider.sampling.sampler import Sampler
from outrider.spec_decode.proposer import NoProposer


def request_of(spec: GrammarSpec | None, request_id: str = "r", **params: Any) -> Request:
    asked = SamplingParams(grammar=spec, **params)
    return Request(
        request_id, [0], asked, OutputStream(asked, 30, VOCABULARY), Sampler().make_state(asked, [0], [], 0)
    )


def specs(count: int) -> list[GrammarSpec]:
    return [GrammarSpec.choice(["a" * (i + 1)]) for i in range(count)]


def test_a_grammar_is_compiled_once_and_the_last_ones_are_kept() -> None:
    real = grammars_of(VOCABULARY)._compiler
    grammars = Grammars(real, most_kept=2, executor=AtOnce())
    one, two, three = specs(3)
    for spec in (one, two, one, three, one, two):
        request = request_of(spec)
        if not grammars.prepare(request):
            assert [ready.error for ready in grammars.take_ready()] == [None]
        assert request.stream.grammar is not None
    assert grammars.stats() == {"kept": 2, "compiled": 4, "hits": 2, "waiting": 0}


def test_kept_grammars_are_bounded_in_size() -> None:
    grammars = Grammars(grammars_of(VOCABULARY)._compiler, most_kept_bytes=40, executor=AtOnce())
    for spec in specs(8):
        grammars.prepare(request_of(spec))
        grammars.take_ready()
    assert 0 < sum(len(spec.text) for spec in grammars._kept) <= 40


class Gate:
    """A compiler that waits to be let go on."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.num_calls = 0

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.num_calls += 1
        assert self.open.wait(10)
        return compiled(spec, VOCABULARY)


def test_requests_for_one_grammar_wait_for_one_compilation_and_may_leave() -> None:
    gate: Any = Gate()
    grammars = Grammars(gate)
    spec = specs(1)[0]
    requests = [request_of(spec, f"r{i}") for i in range(4)]
    assert not any(grammars.prepare(request) for request in requests)
    assert grammars.take_ready() == [] and grammars.num_waiting == 4
    assert grammars.drop("r2") and not grammars.drop("r2")
    gate.open.set()
    ready = grammars.take_ready(timeout_s=10)
    assert [entry.request.request_id for entry in ready] == ["r0", "r1", "r3"]
    assert gate.num_calls == 1
    assert len({id(entry.request.stream.grammar) for entry in ready}) == 3


def test_a_grammar_that_takes_too_long_is_given_up() -> None:
    gate: Any = Gate()
    now = [0.0]
    grammars = Grammars(gate, patience_s=5.0, clock=lambda: now[0])
    assert not grammars.prepare(request_of(specs(1)[0]))
    assert grammars.take_ready() == []
    now[0] = 6.0
    (ready,) = grammars.take_ready()
    assert ready.error is not None and "within 5 s" in ready.error
    gate.open.set()


def test_a_grammar_that_cannot_be_compiled_is_an_error_of_its_requests_alone() -> None:
    grammars = grammars_of(VOCABULARY)
    assert not grammars.prepare(request_of(GrammarSpec.regex("zzz"), "bad"))  # not in this vocabulary
    assert not grammars.prepare(request_of(GrammarSpec.regex("a"), "good"))
    errors = {ready.request.request_id: ready.error for ready in grammars.take_ready()}
    assert errors["good"] is None
    assert errors["bad"] is not None and "allows no text" in errors["bad"]


def small_engine(grammars: Grammars) -> Engine:
    return Engine(
        scheduler=Scheduler(KVCacheManager(16, 4), max_num_seqs=4, max_num_batched_tokens=16),
        runner=Runner(HashModel(16, 4)),
        sampler=ReferenceSampler(),
        drafting=Drafting(NoProposer(), method="off", max_draft_tokens=0, vocab_size=4),
        vocabulary=VOCABULARY,
        max_model_len=40,
        grammars=grammars,
    )


def test_the_others_go_on_while_a_grammar_is_compiled_and_the_waiting_can_leave() -> None:
    gate: Any = Gate()
    engine = small_engine(Grammars(gate))

    def add(name: str, spec: GrammarSpec | None) -> None:
        params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0, grammar=spec)
        engine.add_request(AddRequest(name, [0, 1], params, 0.0))

    def run_until(name: str) -> list[RequestOutput]:
        seen: list[RequestOutput] = []
        for _ in range(3000):
            seen += [output for output in engine.step() if output.request_id == name]
            if seen and seen[-1].finish_reason is not None:
                return seen
        raise AssertionError(f"{name} does not end")

    add("bound", GrammarSpec.choice(["aa"]))
    add("leaving", GrammarSpec.choice(["aa"]))
    add("free", None)
    assert engine.stats()["num_requests_waiting"] == 3
    assert sum(len(output.token_ids) for output in run_until("free")) == 6
    (left,) = engine.cancel(["leaving"])
    assert left.finish_reason is FinishReason.ABORT
    assert engine.has_work and engine.step() == []  # it waits a moment, and nothing else is to be done
    gate.open.set()
    outputs = run_until("bound")
    assert "".join(output.text for output in outputs) == "aa"
    assert outputs[-1].finish_reason is FinishReason.STOP and not engine.has_work


def test_a_refused_grammar_is_the_last_word_to_its_request() -> None:
    engine = small_engine(grammars_of(VOCABULARY))
    engine.add_request(AddRequest("bad", [0], SamplingParams(grammar=GrammarSpec.regex("zzz")), 0.0))
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.ERROR and output.num_prompt_tokens == 0
    assert output.error is not None and "allows no text" in output.error
    assert not engine.has_work and engine.metrics.num_finished == {"error": 1}


def test_the_end_of_the_grammar_comes_before_the_length_limit() -> None:
    request = request_of(GrammarSpec.choice(["aa"]), max_tokens=2)
    grammars = grammars_of(VOCABULARY)
    grammars.prepare(request)
    grammars.take_ready()
    request.stream.max_tokens = 2
    assert request.append([0, 0, 0]) == [0, 0]
    assert request.finish_reason is FinishReason.STOP
