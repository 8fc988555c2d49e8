"""Following an output along the client's prediction of it."""

from __future__ import annotations

import outrider._native as native
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_proposers import FakeRequest

from outrider.request import SamplingParams
from outrider.spec_decode.predicted import PredictedProposer

PREDICTED = list(range(100, 160))


def steps_and_hits(predicted: list[int], output: list[int], limit: int = 8) -> tuple[int, int, int]:
    """(forward passes, drafted, accepted) of an output that a model writes, whatever was predicted."""
    prediction = native.Prediction(predicted)
    steps = drafted = accepted = position = 0
    while position < len(output):
        draft, _ = prediction.propose(min(limit, len(output) - position - 1))
        agreed = 0
        while agreed < len(draft) and draft[agreed] == output[position + agreed]:
            agreed += 1
        prediction.append(output[position : position + agreed + 1])
        steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + agreed
        position += agreed + 1
    return steps, drafted, accepted


def test_a_right_prediction_is_drafted_to_its_end() -> None:
    steps, drafted, accepted = steps_and_hits(PREDICTED, PREDICTED)
    assert drafted == accepted and steps == -(-len(PREDICTED) // 9)


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("substituted", [*PREDICTED[:20], 7, *PREDICTED[21:]]),
        ("inserted", [*PREDICTED[:20], 7, 8, 9, *PREDICTED[20:]]),
        ("deleted", [*PREDICTED[:20], *PREDICTED[25:]]),
        ("introduced", [1, 2, 3, 4, 5, *PREDICTED]),
        ("moved", [*PREDICTED[30:], *PREDICTED[:30]]),
        ("several", [*PREDICTED[:9], 7, *PREDICTED[12:30], 8, 9, *PREDICTED[30:40], 5, *PREDICTED[41:]]),
    ],
)
def test_it_finds_its_place_again_after_a_difference(name: str, output: list[int]) -> None:
    steps, _, accepted = steps_and_hits(PREDICTED, output)
    assert steps <= 16 and accepted >= len(output) - 16


def test_a_repeated_line_is_followed_from_where_the_output_is() -> None:
    line = [1, 2, 3, 4]
    predicted = [*line, 10, *line, 20, *line, 30, *line, 40]
    prediction = native.Prediction(predicted)
    prediction.append([*line, 10, *line, 99, *line])  # 99 in the place of 20
    assert prediction.propose(3) == ([30, 1, 2], 4)


def test_the_beginning_and_guesses_across_a_difference_say_so() -> None:
    prediction = native.Prediction(PREDICTED)
    assert prediction.propose(1) == ([100], 64)
    prediction.append([100, 101, 5])
    assert prediction.propose(2) == ([103, 104], 0)  # 5 in the place of 102
    assert prediction.propose(2, [103]) == ([104, 105], 1)
    assert len(prediction) == 3


@given(
    st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=200),
    st.lists(st.integers(1, 40), max_size=12), st.integers(-1, 9),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_drafts_are_pieces_of_the_prediction(
    predicted: list[int], output: list[int], pieces: list[int], limit: int
) -> None:
    whole, parts = native.Prediction(predicted), native.Prediction(predicted)
    whole.append(output)
    begin = 0
    for size in [*pieces, len(output)]:
        parts.append(output[begin : begin + size])
        begin = min(begin + size, len(output))
        draft, agreed = parts.propose(limit)
        assert len(draft) <= max(limit, 0)
        joined = ",".join(map(str, ["", *predicted, ""]))
        assert "".join(f",{token}" for token in draft) + "," in joined or not draft
        if 0 < agreed < 64 and draft and agreed <= begin:
            assert ",".join(map(str, [*output[begin - agreed : begin], *draft])) in joined
    assert parts.propose(5) == whole.propose(5)


def test_requests_without_a_prediction_get_nothing_and_keep_nothing() -> None:
    proposer = PredictedProposer()
    with_it = FakeRequest("a", [1], SamplingParams(prediction_token_ids=PREDICTED))
    without = FakeRequest("b", [1])
    first, second = proposer.propose([with_it, without], [4, 4])
    assert first.token_ids == (100, 101, 102, 103) and not second.token_ids
    assert proposer.stats()["requests"] == 1
    with_it.token_ids += [100, 101]
    assert proposer.propose([with_it], [2])[0].token_ids == (102, 103)
    assert proposer.continue_after(with_it, (102, 103), 2).token_ids == (104, 105)
