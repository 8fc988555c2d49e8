"""Who runs: budget, order, fairness, progress, preemption, for any traffic."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fakes import VOCABULARY
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_kv_cache import NoState

from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.output import OutputStream
from outrider.engine.scheduler import Plan, Scheduler
from outrider.engine.state import Request
from outrider.request import FinishReason, SamplingParams
from outrider.sampling.verifier import Walk
from outrider.spec_decode.proposer import Drafts


def make_request(
    request_id: str, num_prompt: int, num_output: int, priority: int = 0, tokens: list[int] | None = None
) -> Request:
    params = SamplingParams(ignore_eos=True)
    stream = OutputStream(params, num_output, VOCABULARY)
    return Request(request_id, tokens or [0] * num_prompt, params, stream, NoState(), priority=priority)


def make_scheduler(num_blocks: int = 16, block_size: int = 4, **limits: int) -> Scheduler:
    limits.setdefault("max_num_seqs", 4)
    limits.setdefault("max_num_batched_tokens", 16)
    return Scheduler(KVCacheManager(num_blocks, block_size), **limits)  # type: ignore[arg-type]


def finish_step(scheduler: Scheduler, plan: Plan, rng: random.Random | None = None) -> None:
    """Every row with logits gets a token; of its drafts, a random part is accepted."""
    walks: list[Walk | None] = []
    for row in plan.rows:
        if row.has_logits:
            num = rng.randint(0, len(row.drafts)) if rng and row.drafts else 0
            walks.append(Walk(list(range(num)), [*row.drafts.token_ids[:num], 1]))
        else:
            walks.append(None)
    scheduler.update(plan, walks)


def ids(plan: Plan) -> list[str]:
    return [row.request.request_id for row in plan.rows]


class Simulation:
    """Random arrivals, drafts and cancellations; every promise of the scheduler is checked at every step."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 4, 8])
        self.longest = rng.randint(8, 40)
        num_blocks = -(-self.longest // self.block_size) + rng.choice([0, 0, 1, 4])
        max_num_seqs = rng.randint(1, 5)
        self.max_tokens = max_num_seqs + rng.randint(0, 20)
        self.max_logits = max_num_seqs + rng.randint(0, 6)
        self.scheduler = Scheduler(
            KVCacheManager(num_blocks, self.block_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_tokens,
            max_num_logits=self.max_logits,
            max_prompt_tokens_beside_decode=rng.randint(1, 8),
        )
        self.live: list[Request] = []
        self.events: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        for step in range(60):
            while self.rng.random() < 0.4:
                self.arrive(f"{step}.{len(self.live)}")
            self.step()
        for _ in range(3000):
            if not self.live:
                break
            self.step()
        assert not self.live, "somebody waits forever"
        kv_cache = self.scheduler.kv_cache
        assert kv_cache.num_free_blocks == kv_cache.num_blocks
        return self.events

    def arrive(self, request_id: str) -> None:
        rng = self.rng
        num_prompt = rng.randint(1, self.longest - 1)
        tokens = [0] * rng.randint(0, num_prompt)
        tokens += [rng.randrange(2) for _ in range(num_prompt - len(tokens))]
        num_output = rng.randint(1, self.longest - num_prompt)
        request = make_request(request_id, num_prompt, num_output, rng.choice([0, 0, -1, 1]), tokens)
        self.live.append(request)
        self.scheduler.add(request)
        self.events["arrivals"] += 1

    def step(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        if self.live and rng.random() < 0.03:
            request = rng.choice(self.live)
            scheduler.cancel(request)
            assert request.finish_reason is FinishReason.ABORT
            self.live.remove(request)
            self.events["cancellations"] += 1
        for request in scheduler.running:
            length = min(rng.randint(0, 4), request.stream.num_left - 1)
            if request.is_caught_up and length > 0:
                request.drafts = Drafts.chain([1] * length, [0.5] * length, "test")
        before = {r.request_id: r.num_computed_tokens for r in self.live}
        plan = scheduler.schedule()
        self.check_plan(plan)
        self.events["preemptions"] += len(plan.preempted)
        self.events["trimmed drafts"] += sum(
            len(row.request.drafts) > len(row.drafts) for row in plan.rows if row.has_logits
        )
        finish_step(scheduler, plan, rng)
        scheduler.check()
        emitted = [row.request for row in plan.rows if row.has_logits and not row.request.is_finished]
        assert all(request.is_caught_up for request in emitted)
        assert not plan or any(
            r.is_finished or r.num_computed_tokens > before[r.request_id] for r in self.live
        )
        self.live = [r for r in self.live if not r.is_finished]

    def check_plan(self, plan: Plan) -> None:
        assert bool(plan) == bool(self.live), "a plan is empty only when nothing is left to do"
        assert sum(row.num_tokens for row in plan.rows) <= self.max_tokens
        assert sum(len(row.drafts) + 1 for row in plan.rows if row.has_logits) <= self.max_logits
        planned = [row.request for row in plan.rows]
        assert len(set(planned)) == len(planned)
        assert set(planned) <= set(self.scheduler.running)
        for row in plan.rows:
            assert row.num_tokens > 0
            assert row.start == row.request.num_computed_tokens
            assert len(row.request.block_table) * self.block_size >= row.start + row.num_tokens
            end = row.start + row.num_tokens - len(row.drafts)
            assert row.has_logits == (end == row.request.num_tokens)
            assert row.has_logits or not row.drafts
        # Whoever is generating is never left out for a prompt.
        assert {r for r in self.scheduler.running if r.is_caught_up} <= set(planned)
        # The first in the order always goes on.
        everyone = sorted(self.live, key=lambda r: r.rank)
        assert not everyone or everyone[0] in planned or everyone[0] in self.scheduler.waiting
        assert not everyone or self.scheduler.running[0] in planned


def test_every_plan_keeps_the_promises_and_everyone_is_served() -> None:
    events: Counter[str] = Counter()

    @settings(max_examples=60, phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(st.integers(0, 2**32 - 1))
    def promises(seed: int) -> None:
        events.update(Simulation(seed).run())

    promises()
    for name in ("arrivals", "cancellations", "preemptions", "trimmed drafts"):
        assert events[name] >= 50, f"{name} hardly happened: {dict(events)}"


def simple_model(
    prompts: list[tuple[int, int]], max_num_seqs: int, budget: int
) -> list[list[tuple[int, int]]]:
    """What first come, first served means, without a cache: per step the (request, tokens) that run."""
    left = [prompt for prompt, _ in prompts]
    to_emit = [output for _, output in prompts]
    running: list[int] = []
    waiting = list(range(len(prompts)))
    steps = []
    while running or waiting:
        tokens, plan = budget, []
        generating = [i for i in running if left[i] == 0]
        tokens -= len(generating)
        for i in running:
            num = 1 if left[i] == 0 else min(left[i], tokens)
            tokens -= num if left[i] else 0
            if num:
                plan.append((i, num))
        while waiting and len(running) < max_num_seqs and tokens > 0:
            i = waiting.pop(0)
            running.append(i)
            num = min(left[i], tokens)
            tokens -= num
            plan.append((i, num))
        for i, num in plan:
            left[i] = max(0, left[i] - num)
            if left[i] == 0:
                to_emit[i] -= 1
            if to_emit[i] == 0:
                running.remove(i)
        steps.append(plan)
    return steps


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 12),
)
def test_with_room_for_all_it_is_first_come_first_served(
    prompts: list[tuple[int, int]], max_num_seqs: int, extra: int
) -> None:
    budget = max_num_seqs + extra
    scheduler = Scheduler(
        KVCacheManager(200, 4, enable_prefix_caching=False),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prompt_tokens_beside_decode=budget,
    )
    for i, (num_prompt, num_output) in enumerate(prompts):
        scheduler.add(make_request(str(i), num_prompt, num_output))
    for expected in simple_model(prompts, max_num_seqs, budget):
        plan = scheduler.schedule()
        assert [(int(row.request.request_id), row.num_tokens) for row in plan.rows] == expected
        finish_step(scheduler, plan)
    assert not scheduler.has_work


def test_a_better_priority_overtakes_the_queue_and_takes_a_place() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for request_id, priority in (("first", 1), ("second", 1), ("urgent", 0)):
        scheduler.add(make_request(request_id, 4, 8, priority))
        if request_id == "first":
            finish_step(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert ids(plan) == ["urgent"]
    assert [r.request_id for r in plan.preempted] == ["first"]
    assert [r.request_id for r in scheduler.waiting] == ["first", "second"]


def test_a_stream_of_urgent_requests_does_not_starve_the_others() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    patient = make_request("patient", 4, 20, priority=1)
    scheduler.add(patient)
    for step in range(3 * Scheduler.PATIENCE):
        scheduler.add(make_request(f"urgent {step}", 4, 1))
        finish_step(scheduler, scheduler.schedule())
        if patient.is_finished:
            assert scheduler.num_preemptions == 0, "it had waited long enough"
            return
    pytest.fail("it is still waiting")


def test_the_last_to_come_is_preempted_when_blocks_run_out() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_seqs=2)
    old, young = make_request("old", 7, 9), make_request("young", 7, 9)
    scheduler.add(old)
    scheduler.add(young)
    preempted: list[str] = []
    while not old.is_finished:
        plan = scheduler.schedule()
        preempted += [r.request_id for r in plan.preempted]
        finish_step(scheduler, plan)
    assert set(preempted) == {"young"}
    while not young.is_finished:
        finish_step(scheduler, scheduler.schedule())


def test_drafts_preempt_nobody() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, max_num_seqs=2)
    for request_id in ("a", "b"):
        scheduler.add(make_request(request_id, 6, 9))
    finish_step(scheduler, scheduler.schedule())
    for request in scheduler.running:
        request.drafts = Drafts.chain([1] * 4, [0.5] * 4, "test")  # each would need the last free block
    plan = scheduler.schedule()
    assert not plan.preempted
    # The first must leave it, since the second may need it; behind the second there is nobody.
    assert [(row.num_tokens, len(row.drafts)) for row in plan.rows] == [(1, 0), (5, 4)]


def test_prompts_beside_generating_requests_come_in_small_pieces() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=64, max_prompt_tokens_beside_decode=8)
    scheduler.add(make_request("talking", 4, 50))
    finish_step(scheduler, scheduler.schedule())
    scheduler.add(make_request("long", 40, 1))
    plan = scheduler.schedule()
    assert [(row.request.request_id, row.num_tokens) for row in plan.rows] == [("talking", 1), ("long", 8)]


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=16, enable_chunked_prefill=False)
    scheduler.add(make_request("a", 12, 2))
    scheduler.add(make_request("b", 12, 2, tokens=[1] * 12))
    plan = scheduler.schedule()
    assert [(row.request.request_id, row.num_tokens) for row in plan.rows] == [("a", 12)]
    finish_step(scheduler, plan)
    assert [row.num_tokens for row in scheduler.schedule().rows] == [1, 12]


def test_a_cancelled_request_returns_all_its_blocks() -> None:
    scheduler = make_scheduler()
    running, waiting = make_request("a", 8, 8), make_request("b", 8, 8)
    scheduler.add(running)
    finish_step(scheduler, scheduler.schedule())
    scheduler.add(waiting)
    scheduler.cancel(running)
    scheduler.cancel(waiting)
    assert not scheduler.has_work and not scheduler.schedule()
    assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_blocks


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens must be at least max_num_seqs"):
        make_scheduler(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(ValueError, match="max_num_logits must be at least max_num_seqs"):
        make_scheduler(max_num_seqs=8, max_num_logits=4)
