"""The law, end to end: a draft may change when a token appears, never which token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import VOCABULARY, Expected, FailingAllocator, HashModel, ReferenceSampler, ScriptedProposer
from grammar_oracle import grammars_of
from hypothesis import Phase, given, settings
from strategies import MAX_MODEL_LEN, Arrival, Traffic, random_traffic, small_traffic, traffic

from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Scheduler
from outrider.request import FinishReason, RequestOutput, SamplingParams
from outrider.spec_decode.proposer import Drafts

# A failing load says enough as it is, and shrinking one takes minutes.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
MOST_STEPS = 3000  # far more than any traffic here needs


def build_engine(
    load: Traffic, kv_cache: KVCacheManager | None = None, nan_after: tuple[int, ...] = ()
) -> Engine:
    kv_cache = kv_cache or KVCacheManager(load.num_blocks, load.block_size, load.enable_prefix_caching)
    return Engine(
        scheduler=Scheduler(
            kv_cache,
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
            enable_chunked_prefill=load.enable_chunked_prefill,
            max_prompt_tokens_beside_decode=load.max_prompt_tokens_beside_decode,
        ),
        runner=Runner(HashModel(load.num_blocks, load.block_size, nan_after)),
        sampler=ReferenceSampler(),
        drafting=Drafting(
            ScriptedProposer(random.Random(load.seed), load.hit, load.answers, load.misbehave),
            method="script",
            max_draft_tokens=load.max_draft_tokens,
            vocab_size=len(VOCABULARY),
        ),
        vocabulary=VOCABULARY,
        max_model_len=MAX_MODEL_LEN,
        grammars=grammars_of(VOCABULARY),
    )


def run_traffic(load: Traffic, kv_cache: KVCacheManager | None = None) -> Counter[str]:
    """Run it to the end, checking invariants at every step and every stream; returns what happened."""
    engine = build_engine(load, kv_cache)
    streams: dict[str, list[RequestOutput]] = {a.request.request_id: [] for a in load.arrivals}
    last_arrival = max(a.at_step for a in load.arrivals)
    step = 0
    while step <= last_arrival or engine.has_work:
        assert step < MOST_STEPS, "the engine makes no progress"
        for arrival in load.arrivals:
            if arrival.at_step == step:
                engine.add_request(arrival.request)
        outputs = engine.step()
        engine.scheduler.check()
        leaving = [a.request.request_id for a in load.arrivals if a.cancel_at_step == step]
        if leaving:
            outputs += engine.cancel(leaving)
            engine.scheduler.check()
        for output in outputs:
            streams[output.request_id].append(output)
        step += 1
    kv_cache = engine.scheduler.kv_cache
    assert kv_cache.num_free_blocks == kv_cache.num_blocks, "blocks are not back"
    events = count_events(engine, step)
    for arrival in load.arrivals:
        check_stream(arrival, streams[arrival.request.request_id])
        events[f"ended by {streams[arrival.request.request_id][-1].finish_reason.value}"] += 1
    return events


def count_events(engine: Engine, num_steps: int) -> Counter[str]:
    counts = engine.metrics.draft_counts
    accepted = sum(counts.totals(accepted=True).values())
    return Counter(
        {
            "steps": num_steps,
            "preemptions": engine.scheduler.num_preemptions,
            "prefix hits": engine.scheduler.kv_cache.num_hit_tokens,
            "accepted": accepted,
            "rejected": sum(counts.totals(accepted=False).values()) - accepted,
            "draft errors": engine.drafting.num_errors,
            "moves": engine.runner.executable.num_moves,
        }
    )


def check_prompt_logprobs(first: RequestOutput, params: SamplingParams, expected: Expected) -> None:
    """Those of the whole prompt, whatever was cached, chunked or preempted."""
    found = first.prompt_logprobs
    if params.prompt_logprobs is None:
        assert found is None
        return
    assert found is not None and len(found) == len(expected.prompt_logprobs)
    for score, wanted in zip(found, expected.prompt_logprobs, strict=True):
        assert (score.rank, score.top_token_ids) == (wanted.rank, wanted.top_token_ids)
        assert score.logprob == pytest.approx(wanted.logprob)
        assert score.top_logprobs == pytest.approx(wanted.top_logprobs)


def check_stream(arrival: Arrival, stream: list[RequestOutput]) -> None:
    """The events of a stream are those of plain decoding, up to where it was cancelled."""
    expected, params = arrival.expected, arrival.request.params
    token_ids: list[int] = []
    text = ""
    for i, event in enumerate(stream):
        assert (event.finish_reason is not None) == (i == len(stream) - 1)
        assert event.token_ids or event.finish_reason is not None
        assert len(event.sources) == len(event.token_ids)
        start, end = len(token_ids), len(token_ids) + len(event.token_ids)
        token_ids += event.token_ids
        text += event.text
        assert token_ids == expected.token_ids[:end]
        assert event.num_output_tokens == end
        assert event.num_prompt_tokens == len(arrival.request.prompt_token_ids)
        assert event.seed == params.seed
        if event.token_ids:
            assert event.logprobs == (None if params.logprobs is None else expected.logprobs[start:end])
        if i == 0 and event.finish_reason is not FinishReason.ABORT:
            check_prompt_logprobs(event, params, expected)
        if event.finish_reason is FinishReason.ERROR:
            assert text == expected.error_text
        elif event.finish_reason is not FinishReason.ABORT:
            assert text == expected.texts[end]
    last = stream[-1]
    if last.finish_reason is FinishReason.ABORT:
        assert arrival.cancel_at_step is not None
        return
    assert token_ids == expected.token_ids
    assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert (last.error is not None) == (last.finish_reason is FinishReason.ERROR)
    speculation = last.speculation
    assert speculation is not None
    assert 0 <= speculation.accepted_tokens <= speculation.draft_tokens
    assert (
        sum(source == "script" for event in stream for source in event.sources) == speculation.accepted_tokens
    )


def test_every_stream_equals_plain_decoding_alone() -> None:
    events: Counter[str] = Counter()

    @settings(max_examples=160, phases=NO_SHRINKING)
    @given(traffic)
    def law(load: Traffic) -> None:
        events.update(run_traffic(load))

    law()
    print(dict(events))
    for name in (
        "preemptions", "prefix hits", "accepted", "rejected", "draft errors", "moves",
        "ended by stop", "ended by length", "ended by abort",
    ):  # fmt: skip
        assert events[name] >= 20, f"{name} hardly happened: {events[name]}"


@settings(max_examples=5, phases=NO_SHRINKING)
@given(small_traffic)
def test_whichever_allocation_fails_the_streams_are_right_and_all_blocks_come_home(load: Traffic) -> None:
    for fail_at in range(1, 200):
        allocator = FailingAllocator(load.num_blocks, load.block_size, fail_at)
        run_traffic(load, allocator)
        if allocator.num_allocations < fail_at:
            return
    pytest.fail("there are more allocations than the test expects")


@settings(max_examples=30, phases=NO_SHRINKING)
@given(traffic)
def test_a_request_whose_logits_are_not_numbers_ends_with_an_error_and_the_others_go_on(
    load: Traffic,
) -> None:
    unlucky = load.arrivals[0]
    before = unlucky.expected.token_ids[: len(unlucky.expected.token_ids) // 2]
    poison = (*unlucky.request.prompt_token_ids, *before)
    engine = build_engine(load, nan_after=poison)
    streams: dict[str, list[RequestOutput]] = {a.request.request_id: [] for a in load.arrivals}
    for arrival in load.arrivals:
        engine.add_request(arrival.request)
    while engine.has_work:
        for output in engine.step():
            streams[output.request_id].append(output)
        engine.scheduler.check()
    for arrival in load.arrivals:
        stream = streams[arrival.request.request_id]
        if (*arrival.request.prompt_token_ids, *arrival.expected.token_ids)[: len(poison)] != poison:
            check_stream(arrival, stream)
        elif arrival.expected.finish_reason is not FinishReason.ERROR:
            made = [token for output in stream for token in output.token_ids]
            assert made == arrival.expected.token_ids[: len(made)]
            assert stream[-1].finish_reason in (FinishReason.ERROR, arrival.expected.finish_reason)
    last = streams[unlucky.request.request_id][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error and "not numbers" in last.error


def test_a_failing_proposer_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedProposer):
        def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Drafts]:
            raise RuntimeError("out of ideas")

    load = next(load for load in map(random_traffic, range(100)) if load.max_draft_tokens)
    engine = build_engine(load)
    engine.drafting.proposer = Broken(random.Random(0), 1.0, {})
    arrival = next(
        a for a in load.arrivals if len(a.expected.token_ids) > 4 and not a.request.params.speculation
    )
    engine.add_request(arrival.request)
    stream = []
    while engine.has_work:
        stream += engine.step()
    check_stream(arrival, stream)
    assert engine.stats()["num_draft_errors"] >= 3
    assert [record.getMessage() for record in caplog.records].count(
        "the proposer failed (propose: out of ideas); its drafts are dropped"
    ) == 1


def test_a_request_that_is_running_already_is_refused() -> None:
    load = random_traffic(0)
    engine = build_engine(load)
    engine.add_request(load.arrivals[0].request)
    with pytest.raises(ValueError, match="already running"):
        engine.add_request(load.arrivals[0].request)


def test_an_engine_whose_cache_is_smaller_than_its_context_is_refused() -> None:
    load = random_traffic(0)
    with pytest.raises(ValueError, match="exceeds the cache"):
        build_engine(load, KVCacheManager(1, 16))
