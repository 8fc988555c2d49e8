"""The controller in worlds of known acceptance and costs: near the best fixed choice, never under plain."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from speculation_world import (
    CHAT,
    EASY,
    HOSTILE,
    Kind,
    Request,
    Result,
    World,
    best_fixed,
    like_cpu,
    like_gpu,
    requests_of,
    run_controlled,
    run_fixed,
    steep,
)

from outrider.request import SamplingParams
from outrider.spec_decode.acceptance import AcceptanceTable, RequestOdds
from outrider.spec_decode.cost import DraftCost
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts

MIXED = [CHAT, HOSTILE, EASY, HOSTILE]
CASES = [
    (step, kinds)
    for step in (like_cpu, like_gpu, steep)
    for kinds in ([CHAT], [EASY], [HOSTILE], MIXED, [EASY] * 8, [HOSTILE] * 8)
]


@pytest.mark.parametrize(("step", "kinds"), CASES)
def test_the_controller_is_near_the_best_fixed_number_and_never_under_plain(
    step: object, kinds: Sequence[Kind]
) -> None:
    num_rounds = 1600 if len(kinds) == 1 else 800

    def world() -> World:
        return World(step=step, noise=0.05)  # type: ignore[arg-type]

    rate = run_controlled(world(), kinds, num_rounds)
    best, _ = best_fixed(world, kinds, num_rounds)
    assert rate >= 0.97 * best
    assert rate >= 0.99 * run_fixed(world(), kinds, num_rounds, 0)


@pytest.mark.parametrize("kinds", [[CHAT] * 32, [HOSTILE] * 32])
def test_many_requests_where_drafting_cannot_pay_are_served_as_fast_as_without(kinds: list[Kind]) -> None:
    rate = run_controlled(World(noise=0.05), kinds, 200)
    assert rate >= 0.99 * run_fixed(World(noise=0.05), kinds, 200, 0)


def test_drafting_comes_back_when_the_text_changes_and_goes_when_it_changes_again() -> None:
    world = World()
    controller = world.controller()
    marks: list[tuple[int, float]] = []

    def change(number: int, requests: list[Request]) -> None:
        kind = {0: HOSTILE, 600: EASY, 1600: HOSTILE}.get(number)
        if kind is not None:
            requests[0].kind = kind
        if number in (300, 600, 800, 1600, 1800, 2399):
            marks.append((world.num_tokens, world.now))

    run_controlled(world, [HOSTILE], 2400, change, controller)
    hostile, _, easy, _, hostile_again = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in itertools.pairwise(marks)]
    assert hostile > 0.98 and hostile_again > 0.98
    assert easy > 1.7


def test_neighbours_of_a_hostile_request_are_drafted_for_and_it_is_not() -> None:
    chosen: dict[str, int] = {}

    class Counting(World):
        def run_model(self, requests: Sequence[Request], steps: Sequence[int]) -> list[Drafts]:
            for request, num in zip(requests, steps, strict=True):
                chosen[request.request_id] = chosen.get(request.request_id, 0) + (num > 0)
            return super().run_model(requests, steps)

    world = Counting(step=like_gpu, row=0.1)

    def change(number: int, requests: list[Request]) -> None:
        if number == 600:  # what a request costs has been told from what drafting costs
            chosen.clear()

    run_controlled(world, [EASY, HOSTILE], 1000, change)
    assert chosen["r0"] > 380
    assert chosen["r1"] < 40


def test_probes_take_less_than_a_hundredth_of_the_time() -> None:
    world = World()
    controller = world.controller()
    run_controlled(world, [HOSTILE], 500, controller=controller)  # learns
    world.drafting_seconds, begin = 0.0, world.now
    run_controlled(world, [HOSTILE], 3000, controller=controller)
    share = world.drafting_seconds / (world.now - begin)
    assert 0.0005 < share < 0.01


def test_a_drafter_that_becomes_slow_is_given_up() -> None:
    world = World()
    controller = world.controller()
    run_controlled(world, [CHAT], 300, controller=controller)
    world.call, world.num_tokens, before = 5.0, 0, world.now
    run_controlled(world, [CHAT], 3000, controller=controller)
    assert world.num_tokens / (world.now - before) > 0.97


def test_free_drafts_that_do_the_work_keep_the_model_from_running() -> None:
    world = World()
    controller = world.controller()
    copying = Drafts.chain(range(3), [0.97, 0.94, 0.91], "ngram")
    doubtful = Drafts.chain(range(3), [0.1, 0.05, 0.02], "ngram")
    for free, is_drafted in ((NO_DRAFTS, True), (copying, False), (doubtful, True)):
        controller.begin_round(1, 0, 0)
        (steps,) = controller.choose_model_steps(requests_of([CHAT]), [free])
        assert (steps > 0) == is_drafted


def test_looking_for_drafts_is_done_less_often_where_it_takes_more_than_it_gains() -> None:
    controller = World(step=like_gpu).controller()
    looks: list[int] = []

    def step(number: int, token: int) -> None:
        """A free source that always says 7 is asked unless the request rests; then comes `token`."""
        is_asked = not controller.rests("r0")
        if is_asked:
            looks.append(number)
            controller.begin_round(1, 0, 0)
            controller.admit([Drafts.chain([7], [0.5], "ngram")], 1, 0, 0, ["r0"])
        controller.observe_step(1, 0, 1.05 if is_asked else 1.0, 0.05 if is_asked else 0.0)
        controller.observe([Result("r0", [token])])

    for number in range(400):
        step(number, 1)
    assert 50 <= len(looks) < 150
    assert len([number for number in looks if number >= 320]) == 10  # an eighth
    looks.clear()
    for number in range(200):
        step(number, 7)
    assert len([number for number in looks if number >= 160]) == 40  # every time


def test_a_long_prompt_is_not_read_by_the_drafter_for_a_short_answer() -> None:
    def first_steps(prompt: int, max_tokens: int) -> int:
        controller = World().controller()
        request = Request("r0", CHAT, num_tokens=prompt, num_prompt_tokens=prompt)
        request.params = SamplingParams(max_tokens=max_tokens)
        controller.begin_round(1, 0, 0)
        return controller.choose_model_steps([request], [NO_DRAFTS])[0]

    assert first_steps(20, 20) > 0
    assert first_steps(500, 1000) > 0
    assert first_steps(500, 6) == 0


def test_requests_that_come_and_go_leave_nothing_behind() -> None:
    world = World()
    controller = world.controller()

    def shorten(number: int, requests: list[Request]) -> None:
        for request in requests:
            request.length = 20

    run_controlled(world, [CHAT] * 4, 200, shorten, controller)
    for name in list(controller._requests):
        controller.forget(name)
    planner = controller._model_steps
    assert not controller._requests and not planner._worths and not planner._last_probe


# --- calibration of survivals ---


def outcome(drafts: Drafts, num_right: int) -> list[int]:
    """What a request goes on with when so many of a chain's tokens were right."""
    return [*drafts.token_ids[:num_right], 999]


def test_a_source_that_is_too_sure_of_itself_is_believed_less() -> None:
    table, rng = AcceptanceTable(), random.Random(0)
    for _ in range(600):
        drafts = Drafts.chain([1, 2], [0.9, 0.81], "boast")
        right = 0 if rng.random() < 0.5 else 1 if rng.random() < 0.7 else 2
        table.observe(drafts, outcome(drafts, right), {})
        table.end_round()
    first, second = table.calibrate(Drafts.chain([1, 2], [0.9, 0.81], "boast"))
    assert first == pytest.approx(0.5, abs=0.08)
    assert second / first == pytest.approx(0.3, abs=0.08)
    # Another source and another guess are not judged by it.
    assert table.calibrate(Drafts.chain([1], [0.9], "modest")) == [0.9]


def test_calibration_keeps_what_is_right_as_it_is() -> None:
    table, rng = AcceptanceTable(), random.Random(1)
    for _ in range(2000):
        guess = rng.choice([0.1, 0.35, 0.7, 0.95])
        drafts = Drafts.chain([1], [guess], "honest")
        table.observe(drafts, outcome(drafts, rng.random() < guess), {})
        table.end_round()
    for guess in (0.1, 0.35, 0.7, 0.95):
        (alive,) = table.calibrate(Drafts.chain([1], [guess], "honest"))
        assert alive == pytest.approx(guess, abs=0.07)


def test_proposals_teach_without_being_verified_as_far_as_the_tokens_reach() -> None:
    table, shifts = AcceptanceTable(), {}
    drafts = Drafts.chain([5, 6, 7], [0.5, 0.25, 0.125], "s")
    table.observe(drafts, [5], shifts)  # only the next token is known
    table.observe(drafts, [5, 8], shifts)
    rows = {row["depth"]: (row["outcomes"], row["accepted"]) for row in table.stats()["s"]}
    assert rows == {"0": (2.0, 1.0), "1": (1.0, 0.0)}


def test_every_child_of_an_accepted_node_is_an_outcome() -> None:
    table = AcceptanceTable()
    tree = Drafts((5, 6, 7, 8, 9), (-1, -1, 0, 1, 0), (0.5, 0.4, 0.3, 0.2, 0.1), ("s",) * 5)
    table.observe(tree, [5, 9, 1], {})
    rows = {row["depth"]: (row["outcomes"], row["accepted"]) for row in table.stats()["s"]}
    assert rows == {"0": (2.0, 0.5), "1": (2.0, 0.5)}


def test_a_child_never_survives_better_than_its_parent() -> None:
    table, rng = AcceptanceTable(), random.Random(2)
    shifts: dict[str, RequestOdds] = {}
    for _ in range(300):
        size = rng.randint(1, 8)
        parents = tuple(rng.randrange(-1, i) for i in range(size))
        survival: list[float] = []
        for parent in parents:
            survival.append((survival[parent] if parent >= 0 else 1.0) * rng.choice([1.0, 0.8, 0.1]))
        tree = Drafts(tuple(range(size)), parents, tuple(survival), ("s",) * size)
        alive = table.calibrate(tree, shifts)
        for node in range(len(alive)):
            above = alive[parents[node]] if parents[node] >= 0 else 1.0
            assert 0.0 < alive[node] <= above
        table.observe(tree, [rng.randrange(3) for _ in range(4)], shifts)
        table.end_round()


def test_a_request_is_judged_quickly_and_for_itself() -> None:
    table = AcceptanceTable()
    bad: dict[str, RequestOdds] = {}
    drafts = Drafts.chain([1], [0.6], "s")
    for _ in range(6):
        table.observe(drafts, [2], bad)
    assert table.calibrate(drafts, bad)[0] < 0.45
    assert table.calibrate(drafts, {})[0] == pytest.approx(0.6)


# --- costs of drafting ---


def test_the_cost_of_drafting_is_learned_from_what_it_takes() -> None:
    cost, rng = DraftCost(1.0, 0.1), random.Random(3)
    for _ in range(400):
        calls, requests, fed = rng.randint(1, 5), rng.randint(1, 8), rng.choice([1, 2, 3, 100])
        seconds = 0.2 + 0.3 * calls + 0.05 * calls * requests + 0.01 * fed
        cost.observe(calls, calls * requests, fed, seconds * rng.uniform(0.9, 1.1))
    assert cost.seconds(3, 12, 2) == pytest.approx(1.72, rel=0.1)
    assert cost.seconds(1, 1, 100) == pytest.approx(1.55, rel=0.15)
    assert cost.seconds(0, 0) == 0.0


def test_a_single_interruption_hardly_moves_the_cost_of_drafting() -> None:
    cost = DraftCost(1.0, 0.1)
    for _ in range(100):
        cost.observe(2, 2, 0, 0.3)
    before = cost.seconds(2, 2)
    cost.observe(2, 2, 0, 100.0)
    assert cost.seconds(2, 2) < 1.35 * before
