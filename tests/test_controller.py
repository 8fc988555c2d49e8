"""The controller against trying everything, and the calibration it stands on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.spec_decode.calibration import ROWS, Calibration, load_or_measure, measure
from outrider.spec_decode.controller import Controller
from outrider.spec_decode.cost import StepCost
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts

EXAMPLES = settings(max_examples=100, deadline=None)


def calibration(*seconds: float, rows: tuple[int, ...] | None = None) -> Calibration:
    return Calibration(rows or tuple(range(1, len(seconds) + 1)), (0,), (seconds,))


def chain(*survival: float) -> Drafts:
    return Drafts.chain(range(len(survival)), survival, "test")


def controller(*seconds: float, **options: object) -> Controller:
    options.setdefault("min_gain", 0.0)
    return Controller(StepCost(calibration(*seconds)), **options)  # type: ignore[arg-type]


FLAT = (1.0,) * 8
STEEP = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)


@st.composite
def forests(draw: st.DrawFn) -> list[Drafts]:
    """A few small trees."""
    result = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(0, 4))
        parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
        survival: list[float] = []
        for parent in parents:
            alive = survival[parent] if parent >= 0 else 1.0
            survival.append(alive * draw(st.sampled_from([1.0, 0.9, 0.6, 0.3, 0.01])))
        result.append(Drafts(tuple(range(size)), tuple(parents), tuple(survival), ("test",) * size))
    return result


def rate_of(tokens: float, num_requests: int, other_rows: int, num_drafts: int, curve: list[float]) -> float:
    """Tokens per second; what the other rows take by themselves is not counted."""
    base = num_requests + other_rows
    return tokens / (curve[num_requests] + curve[base + num_drafts] - curve[base])


def best_rate(forest: list[Drafts], num_requests: int, other_rows: int, curve: list[float]) -> float:
    """Over every subset of nodes that is closed under parents."""
    nodes = [(r, i) for r, drafts in enumerate(forest) for i in range(len(drafts))]
    best = 0.0
    for chosen in itertools.product([False, True], repeat=len(nodes)):
        kept = {node for node, is_kept in zip(nodes, chosen, strict=True) if is_kept}
        if all(forest[r].parents[i] < 0 or (r, forest[r].parents[i]) in kept for r, i in kept):
            tokens = num_requests + sum(forest[r].survival[i] for r, i in kept)
            best = max(best, rate_of(tokens, num_requests, other_rows, len(kept), curve))
    return best


@given(
    forests(),
    st.integers(0, 2),
    st.integers(0, 3),
    st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0]), min_size=20, max_size=20),
)
@EXAMPLES
def test_no_other_choice_gives_more_expected_tokens_per_second(
    forest: list[Drafts], without_drafts: int, other_rows: int, steps: list[float]
) -> None:
    seconds = list(itertools.accumulate(steps, initial=1.0))
    num_requests = len(forest) + without_drafts
    admitted = controller(*seconds).admit(forest, num_requests, other_rows)
    for drafts, proposal in zip(admitted, forest, strict=True):
        drafts.check(4)
        assert set(drafts.token_ids) <= set(proposal.token_ids)  # tokens name the nodes
    curve = calibration(*seconds).curve(0, 40)
    tokens = num_requests + sum(sum(drafts.survival) for drafts in admitted)
    rate = rate_of(tokens, num_requests, other_rows, sum(map(len, admitted)), curve)
    assert rate == pytest.approx(best_rate(forest, num_requests, other_rows, curve), rel=1e-12)


def test_free_rows_admit_everything_and_costly_ones_nothing() -> None:
    proposals = [chain(0.9, 0.8, 0.1), chain(0.3)]
    assert controller(*FLAT).admit(proposals, 2) == proposals
    assert controller(*STEEP).admit(proposals, 2) == [NO_DRAFTS, NO_DRAFTS]
    assert controller(*STEEP).admit([chain(0.99)], 1) == [NO_DRAFTS]


def test_drafts_that_never_survive_are_not_verified() -> None:
    assert controller(1.0, 1.01, 1.02).admit([chain(1e-9, 1e-9)], 1) == [NO_DRAFTS]


def test_the_likeliest_nodes_of_the_whole_batch_come_first() -> None:
    proposals = [chain(0.9, 0.2), chain(0.8, 0.7, 0.1)]
    admitted = controller(1.0, 1.0, 1.0, 1.0, 1.0, 9.0).admit(proposals, 2)
    assert admitted == [chain(0.9), chain(0.8, 0.7)]


def test_a_jagged_curve_is_looked_past() -> None:
    # One draft does not pay for the step's jump, five do.
    seconds = (1.0, 1.9, 1.9, 1.9, 1.9, 1.9)
    assert controller(*seconds).admit([chain(0.85)], 1) == [NO_DRAFTS]
    assert controller(*seconds).admit([chain(0.85, 0.8, 0.8, 0.8, 0.8)], 1) == [
        chain(0.85, 0.8, 0.8, 0.8, 0.8)
    ]


def test_rows_beside_the_drafts_move_the_point_on_the_curve() -> None:
    seconds = (1.0, 1.0, 1.0, 1.0, 3.0, 5.0)
    assert len(controller(*seconds).admit([chain(0.9, 0.9, 0.9)], 1)[0]) == 3
    assert len(controller(*seconds).admit([chain(0.9, 0.9, 0.9)], 1, other_rows=2)[0]) == 1


def test_a_prompt_in_the_same_step_does_not_make_drafts_look_cheap() -> None:
    steps = Calibration((1, 2, 100), (0,), ((1.0, 1.5, 50.5),))
    decider = Controller(StepCost(steps), min_gain=0.0)
    assert decider.admit([chain(0.4)], 1) == [NO_DRAFTS]
    # Beside 90 rows it adds a hundredth to the step, but half a plain step in time all the same.
    assert decider.admit([chain(0.4)], 1, other_rows=90) == [NO_DRAFTS]
    assert decider.admit([chain(0.6)], 1, other_rows=90) == [chain(0.6)]


def test_losses_make_the_controller_ask_for_more_until_they_end() -> None:
    decider = controller(1.0, 1.4)
    assert decider.admit([chain(0.5)], 1) == [chain(0.5)]  # promises 7 %
    for _ in range(20):
        decider.observe_profit(0.9)
    assert decider.admit([chain(0.5)], 1) == [NO_DRAFTS]
    assert decider.admit([chain(0.9)], 1) == [chain(0.9)]
    for _ in range(400):
        decider.observe_profit(1.0)
    assert decider.admit([chain(0.5)], 1) == [chain(0.5)]


def test_not_adaptive_verifies_exactly_what_was_proposed() -> None:
    proposals = [chain(1e-9), NO_DRAFTS, chain(0.5, 0.5)]
    assert controller(*STEEP, adaptive=False).admit(proposals, 3) == proposals


def test_nothing_proposed_is_nothing_admitted() -> None:
    assert controller(*FLAT).admit([NO_DRAFTS, NO_DRAFTS], 2) == [NO_DRAFTS, NO_DRAFTS]
    assert controller(*FLAT).admit([], 0) == []


def test_speculation_starts_only_for_a_gain_and_goes_on_for_any() -> None:
    slight = [chain(0.504)]  # against 1.5: a gain of 0.3 %
    decider = controller(1.0, 1.5, min_gain=0.01)
    assert decider.admit(slight, 1) == [NO_DRAFTS]
    assert decider.admit([chain(0.6)], 1) == [chain(0.6)]
    assert decider.admit(slight, 1) == slight
    assert decider.admit([chain(0.4)], 1) == [NO_DRAFTS]
    assert decider.admit(slight, 1) == [NO_DRAFTS]


def test_steps_that_take_longer_than_calibrated_change_the_decision() -> None:
    decider = controller(1.0, 1.05, 1.1, 1.15)
    proposal = [chain(0.5, 0.4, 0.3)]
    assert len(decider.admit(proposal, 1)[0]) == 3
    for _ in range(400):
        decider.observe_step(1, 0, 1.0)
        decider.observe_step(4, 0, 4.0)
    assert len(decider.admit(proposal, 1)[0]) < 3


def test_a_machine_that_is_slower_as_a_whole_changes_no_decision() -> None:
    proposal = [chain(0.5, 0.4, 0.3, 0.1)]
    decider, slowed = controller(1.0, 1.2, 1.5, 2.0, 3.0), controller(1.0, 1.2, 1.5, 2.0, 3.0)
    for _ in range(200):
        for rows, seconds in enumerate((1.0, 1.2, 1.5, 2.0, 3.0), start=1):
            slowed.observe_step(rows, 0, 2.0 * seconds)
    assert slowed.admit(proposal, 1) == decider.admit(proposal, 1)


def test_single_interruptions_do_not_bend_the_curve() -> None:
    cost = StepCost(calibration(*FLAT))
    for i in range(640):
        cost.observe(4, 0, 1000.0 if i % 40 == 0 else 1.0)
    assert cost.curve(0, 8)[4] < 1.1


def test_corrections_are_ignored_where_they_mean_nothing() -> None:
    cost = StepCost(calibration(*FLAT))
    for seconds in (0.0, -1.0, float("nan")):
        cost.observe(1, 0, seconds)
    cost.observe(0, 0, 5.0)
    cost.observe(5000, 0, 5.0)  # a prompt
    assert cost.stats()["observed_steps"] == 0


@given(st.lists(st.tuples(st.integers(1, 16), st.floats(0.1, 10)), max_size=100))
@EXAMPLES
def test_the_corrected_curve_never_falls(observed: list[tuple[int, float]]) -> None:
    cost = StepCost(calibration(1.0, 1.1, 1.5, 2.0, rows=(1, 2, 4, 8)))
    for rows, seconds in observed:
        cost.observe(rows, 100, seconds)
    curve = cost.curve(100, 20)
    assert all(0 < a <= b for a, b in itertools.pairwise(curve))


def test_decisions_can_be_looked_at() -> None:
    decider = controller(*FLAT)
    for _ in range(100):
        decider.admit([chain(0.5)], 1)
    stats = decider.stats()
    assert len(stats["decisions"]) == Controller.NUM_REMEMBERED
    assert stats["decisions"][-1] == {
        "requests": 1, "model_steps": 0, "proposed": 1, "admitted": 1, "expected_gain": 1.5
    }  # fmt: skip
    json.dumps(stats)


# --- calibration ---


def test_a_curve_is_linear_between_what_was_measured_and_goes_on_after() -> None:
    curve = calibration(1.0, 2.0, 6.0, rows=(1, 2, 4)).curve(0, 6)
    assert curve == [1.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_a_longer_context_costs_more_by_its_length() -> None:
    two = Calibration((1, 2), (100, 300), ((1.0, 2.0), (3.0, 6.0)))
    assert two.curve(100, 2) == [1.0, 1.0, 2.0]
    assert two.curve(200, 2) == [2.0, 2.0, 4.0]
    assert two.curve(400, 2) == [4.0, 4.0, 8.0]
    assert two.curve(0, 2) == [1.0, 1.0, 2.0]


def test_a_measurement_that_falls_is_raised() -> None:
    assert calibration(1.0, 0.8, 1.2).curve(0, 3) == [1.0, 1.0, 1.0, 1.2]


@pytest.mark.parametrize(
    "wrong",
    [
        ((), (0,), ((),)),
        ((2, 1), (0,), ((1.0, 1.0),)),
        ((1,), (), ()),
        ((1,), (0, 1, 2), ((1.0,),) * 3),
        ((1, 2), (0,), ((1.0,),)),
        ((1,), (0,), ((0.0,),)),
        ((1,), (0,), ((float("nan"),),)),
    ],
)
def test_impossible_calibrations_are_refused(wrong: tuple) -> None:
    with pytest.raises(ValueError):
        Calibration(*wrong)


class FakeMachine:
    """Steps that take as long as they say, on a clock of their own."""

    def __init__(self, noise: float = 0.0) -> None:
        self.now = 0.0
        self.runs: list[tuple[int, int]] = []
        self.noise = noise

    def __call__(self, rows: int, context: int) -> float:
        self.runs.append((rows, context))
        seconds = 0.01 + 0.001 * rows + 1e-6 * context
        if len(self.runs) % 5 == 0:
            seconds += self.noise
        self.now += seconds
        return seconds

    def clock(self) -> float:
        return self.now


def test_measuring_keeps_the_least_of_each_size_within_its_budget() -> None:
    machine = FakeMachine(noise=0.05)
    measured = measure(machine, contexts=(128, 1024), budget_s=3.0, clock=machine.clock)
    exact = [0.01 + 0.001 * rows + 1e-6 * 128 for rows in ROWS]
    assert list(measured.seconds[0]) == pytest.approx(exact)
    longer = [0.01 + 0.001 * rows + 1e-6 * 1024 for rows in ROWS]  # measured at some of them
    assert list(measured.seconds[1]) == pytest.approx(longer)
    assert machine.now < 3.3


def test_a_slow_machine_leaves_the_large_sizes_out_and_starts_in_time() -> None:
    machine = FakeMachine()
    measured = measure(machine, contexts=(128,), budget_s=0.0, clock=machine.clock)
    assert machine.runs[1:] == [(rows, 128) for rows in (*ROWS[:3], *ROWS[:3])]
    assert measured.rows == ROWS[:3]
    assert measured.curve(128, 64)[64] == pytest.approx(0.01 + 0.001 * 64 + 1e-6 * 128)


def test_a_calibration_is_kept_on_disk_by_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = FakeMachine()
    first = load_or_measure({"model": "m", "threads": 2}, machine, budget_s=0.0)
    num_runs = len(machine.runs)
    assert load_or_measure({"model": "m", "threads": 2}, machine, budget_s=0.0) == first
    assert len(machine.runs) == num_runs + 3  # a look at whether it still holds
    load_or_measure({"model": "m", "threads": 1}, machine, budget_s=0.0)
    assert len(machine.runs) == 2 * num_runs + 3
    assert len(list(tmp_path.rglob("*.json"))) == 2 and not list(tmp_path.rglob("*.tmp"))


def test_what_a_busy_machine_measured_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Busy(FakeMachine):
        """Every size takes twice as long when it is measured again, half as long the time after."""

        def __call__(self, rows: int, context: int) -> float:
            count = self.runs.count((rows, context))
            seconds = super().__call__(rows, context)
            return seconds * (2 if count % 2 else 1)

    busy = Busy()
    assert not load_or_measure({"model": "m"}, busy, budget_s=0.5, clock=busy.clock).is_steady
    assert not list(tmp_path.rglob("*.json"))
    quiet = FakeMachine()
    assert load_or_measure({"model": "m"}, quiet, budget_s=9.0, clock=quiet.clock).is_steady
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_what_was_stored_is_measured_anew_when_steps_turn_out_much_shorter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Slowed(FakeMachine):
        def __call__(self, rows: int, context: int) -> float:
            return 2 * super().__call__(rows, context)

    slowed, machine = Slowed(), FakeMachine()
    first = load_or_measure({"model": "m"}, slowed, budget_s=9.0, clock=slowed.clock)
    second = load_or_measure({"model": "m"}, machine, budget_s=9.0, clock=machine.clock)
    assert second.seconds[0][0] == pytest.approx(first.seconds[0][0] / 2)
    # A machine that is busy now has nothing to add.
    assert load_or_measure({"model": "m"}, slowed, budget_s=9.0, clock=slowed.clock) == second


def test_a_curve_from_a_busy_machine_does_not_forbid_speculation() -> None:
    steep = (1.0, 1.7, 1.7, 1.7, 2.2, 2.3)
    doubtful = Calibration((1, 2, 3, 4, 5, 6), (0,), (steep,), is_steady=False)
    decider = Controller(StepCost(doubtful), min_gain=0.0)
    assert len(decider.admit([chain(0.5, 0.3)], 1)[0]) == 2
    for _ in range(100):  # it was right: steps do take that long
        decider.observe_step(1, 0, 1.0)
        decider.observe_step(2, 0, 1.7)
        decider.observe_step(3, 0, 1.7)
    assert decider.admit([chain(0.5, 0.1)], 1) == [NO_DRAFTS]


def test_a_calibration_that_was_disturbed_is_set_right_within_a_few_steps() -> None:
    cost = StepCost(calibration(*FLAT))
    for _ in range(16):
        cost.observe(1, 0, 0.07)
    assert cost.curve(0, 1)[1] == pytest.approx(0.07, rel=0.25)


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"key": 1}', '{"key": null, "rows": [1]}', "\0\0", "negative", "foreign"]
)
def test_a_damaged_or_foreign_file_is_measured_anew_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = FakeMachine()
    load_or_measure({"model": "m"}, machine, budget_s=0.0)
    (path,) = tmp_path.rglob("*.json")
    good = path.read_text()
    stored = json.loads(good)
    if damage == "negative":
        stored["seconds"][0][0] = -1.0
        damage = json.dumps(stored)
    elif damage == "foreign":
        stored["key"]["model"] = "other"
        damage = json.dumps(stored)
    path.write_text(damage)
    num_runs = len(machine.runs)
    load_or_measure({"model": "m"}, machine, budget_s=0.0)
    assert len(machine.runs) == 2 * num_runs
    assert json.loads(path.read_text())["key"] == json.loads(good)["key"]


def test_a_cache_that_cannot_be_written_costs_only_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert load_or_measure({"model": "m"}, FakeMachine(), budget_s=0.0).rows == ROWS[:3]
