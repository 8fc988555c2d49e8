"""What users see of speculation: the live view, the metrics, and a drafter that fails in every way."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import VOCABULARY, HashModel, ReferenceSampler, ScriptedProposer, plain_decode
from prometheus_client.parser import text_string_to_metric_families

from outrider.engine.draft_health import DraftHealth
from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Scheduler
from outrider.entrypoints.metrics import render
from outrider.entrypoints.speculation_view import speculation_view
from outrider.request import AddRequest, SamplingParams
from outrider.spec_decode.calibration import Calibration
from outrider.spec_decode.controller import Controller
from outrider.spec_decode.cost import StepCost
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts

PARAMS = SamplingParams(max_tokens=30, temperature=0.7, seed=5, ignore_eos=True)
PROMPTS = {"r0": [0, 1, 2], "r1": [2, 2, 1, 0]}


class Clock:
    """Time passes when somebody says so, and a little at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def answers() -> dict[str, list[int]]:
    return {name: plain_decode(prompt, PARAMS, 5, 100).token_ids for name, prompt in PROMPTS.items()}


def build(proposer: Any, clock: Clock, adaptive: bool = True) -> Engine:
    cost = StepCost(Calibration((1, 64), (0,), ((0.001, 0.0015),)))
    return Engine(
        scheduler=Scheduler(KVCacheManager(64, 4), max_num_seqs=4, max_num_batched_tokens=64),
        runner=Runner(HashModel(64, 4)),
        sampler=ReferenceSampler(),
        drafting=Drafting(
            proposer,
            method="script",
            max_draft_tokens=6,
            vocab_size=len(VOCABULARY),
            controller=Controller(cost, clock=clock) if adaptive else None,
            plain_step=lambda requests, context: cost.curve(context, requests)[requests],
            clock=clock,
        ),
        vocabulary=VOCABULARY,
        max_model_len=100,
    )


def run(engine: Engine, prefix: str = "") -> dict[str, list[int]]:
    given: dict[str, list[int]] = {prefix + name: [] for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        engine.add_request(AddRequest(prefix + name, prompt, PARAMS, 0.0))
    while engine.has_work:
        for output in engine.step():
            given[output.request_id] += output.token_ids
    return {name.removeprefix(prefix): tokens for name, tokens in given.items()}


def test_the_view_tells_sources_survival_calibration_decisions_and_profit() -> None:
    engine = build(ScriptedProposer(random.Random(0), 0.8, answers()), Clock())
    assert run(engine) == answers()
    view = speculation_view(engine.stats())
    json.dumps(view)
    source = view["sources"]["script"]
    assert source["draft_tokens"] >= source["accepted_tokens"] > 10
    assert len(source["acceptance_rate_per_position"]) == len(source["draft_tokens_per_position"])
    assert source["acceptance_rate_per_position"][0] > 0.5
    assert view["survival"]["script"][0]["depth"] == "0"
    assert view["calibration"]["rows"] == [1, 64]
    assert view["decisions"][-1].keys() >= {"requests", "proposed", "admitted", "expected_gain"}
    assert view["health"]["errors"] == {}
    assert view["mean_acceptance_length"] > 1
    assert {"ratio", "gain", "verdict", "tokens_per_second"} <= view["profit"].keys()


def test_speculation_that_loses_says_so() -> None:
    plain, drafting = 0.010, 0.004
    stats = {"speculation": {"profit": {"ratio": plain / (plain + drafting), "gain": -drafting / 0.014}}}
    profit = speculation_view(stats)["profit"]
    assert profit["gain"] < 0 and profit["ratio"] < 1
    assert profit["verdict"] == "28.6 % fewer tokens per second than plain decoding"
    assert speculation_view({})["profit"] is None


def test_profit_counts_the_time_that_drafting_takes() -> None:
    engine = build(Bad("silent", Clock()), Clock())
    drafting, controller = engine.drafting, engine.drafting.controller
    assert controller is not None
    steps: list[Any] = []
    drafting.observe_step = lambda plan, results, seconds: steps.append((plan, results))  # type: ignore[method-assign]
    run(engine)
    del drafting.observe_step  # type: ignore[attr-defined]
    plan, results = next(step for step in steps if all(row.num_tokens == 1 for row in step[0].rows))
    for _ in range(300):  # plain steps that take as long as calibrated, and half as long again for drafting
        drafting._drafting_seconds = 0.0005
        plain = controller._cost.curve(0, len(results))[len(results)]  # type: ignore[attr-defined]
        drafting.observe_step(plan, results, plain + 0.0005)
    assert drafting.stats()["profit_ratio"] == pytest.approx(2 / 3, abs=0.03)


def test_metrics_tell_drafts_by_source_and_position_and_failures_by_kind() -> None:
    engine = build(ScriptedProposer(random.Random(3), 0.8, answers(), misbehave=True), Clock())
    for i in range(6):
        run(engine, f"{i}-")
    stats = engine.stats()
    families = {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(render(stats, {}).decode())
    }
    drafted = families["outrider:spec_decode_num_draft_tokens"]["script",]
    accepted = families["outrider:spec_decode_num_accepted_tokens"]["script",]
    by_place = families["outrider:spec_decode_num_accepted_tokens_per_pos"]
    assert drafted >= accepted == sum(by_place.values()) > 0
    assert sum(families["outrider:spec_decode_num_draft_errors"].values()) == engine.drafting.num_errors > 0
    assert "outrider:spec_decode_profit_ratio" in families


# --- drafters that fail ---


class Bad:
    """Fails in one way, every time."""

    needs_hidden = False

    def __init__(self, how: str, clock: Clock) -> None:
        self.how, self.clock, self.num_asked = how, clock, 0

    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Drafts]:
        self.num_asked += 1
        if self.how == "raises":
            raise RuntimeError("out of order")
        if self.how == "slow":
            self.clock.now += 0.5
        if self.how == "nothing at all":
            return None  # type: ignore[return-value]
        if self.how == "not drafts":
            return ["drafts"] * len(requests)  # type: ignore[list-item]
        lengths = [{"too many": 500, "silent": 0}.get(self.how, limit) for limit in limits]
        token = 99 if self.how == "garbage ids" else 3
        return [Drafts.chain([token] * length, [0.9] * length, "bad") for length in lengths]

    def observe(self, results: Any, hidden: Any) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def stats(self) -> dict[str, Any]:
        if self.how == "raises":
            raise RuntimeError("out of order")
        return {}


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(
    "how", ["raises", "garbage ids", "too many", "nothing at all", "not drafts", "slow", "wrong"]
)
def test_whatever_is_wrong_with_a_drafter_answers_are_right_and_it_is_reported(
    how: str, adaptive: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    bad = Bad(how, clock)
    engine = build(bad, clock, adaptive)
    for i in range(4):
        assert run(engine, f"{i}-") == answers()
    view = speculation_view(engine.stats())
    health = view["health"]
    if how == "wrong":
        assert not health["errors"] and not health["last_error"]
        return
    assert sum(health["errors"].values()) > 0 or how == "slow"
    if adaptive or how != "slow":  # what nothing is measured of is not given up for being slow
        assert health["pauses"] > 0 and health["pause_reason"]
        assert bad.num_asked < engine.runner.executable.num_steps // 2  # type: ignore[attr-defined]
    assert len([r for r in caplog.records if "are dropped" in r.message]) <= 2  # each kind is logged once
    assert len([r for r in caplog.records if "paused" in r.message]) <= 1


def test_a_drafter_that_recovers_is_asked_again_and_pauses_grow_while_it_does_not() -> None:
    health, lengths = DraftHealth(), []
    for _ in range(4):
        asked = 0
        while not health.is_paused:
            assert health.may_propose()
            health.end_round(has_failed=True)
            asked += 1
        pause = 0
        while not health.may_propose():
            pause += 1
        lengths.append(pause)
    assert lengths == [64, 128, 256, 512]
    for _ in range(600):
        health.may_propose()
        health.end_round(has_failed=False)
    for _ in range(8):
        health.end_round(has_failed=True)
    assert health.stats()["paused_for_steps"] == 64


def test_time_that_drafts_win_back_is_no_reason_to_pause() -> None:
    health = DraftHealth()
    for _ in range(1000):
        health.observe(drafting_seconds=0.003, gained_seconds=0.004, step_seconds=0.010)
    assert not health.num_pauses
    for _ in range(1000):
        health.observe(drafting_seconds=0.0001, gained_seconds=0.0, step_seconds=0.010)  # 1 %
    assert not health.num_pauses
    for _ in range(100):
        health.observe(drafting_seconds=0.003, gained_seconds=0.0, step_seconds=0.010)
    assert health.num_pauses > 0


def test_no_drafts_are_proposed_by_a_drafter_that_is_paused() -> None:
    health = DraftHealth()
    health.observe(drafting_seconds=1.0, gained_seconds=0.0, step_seconds=1.01)
    assert not health.is_paused  # once may be the machine's fault
    for _ in range(4):
        health.observe(drafting_seconds=1.0, gained_seconds=0.0, step_seconds=1.01)
    assert health.is_paused and "more than its drafts gained" in health.stats()["pause_reason"]
    assert NO_DRAFTS.token_ids == ()
