"""Increments that travel together say the same as those that travel alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.outbox import Outbox
from outrider.request import FinishReason, RequestOutput, TokenLogprobs


class Reader:
    """Keeps what was sent and a clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.messages: list[list[RequestOutput]] = []
        self.outbox = Outbox(self.messages.append, interval_s=8.0, clock=lambda: self.now)


def increment(name: str, token_ids: list[int], total: int, *, end: bool = False) -> RequestOutput:
    return RequestOutput(
        request_id=name,
        token_ids=token_ids,
        text="".join(map(str, token_ids)),
        sources=["model"] * len(token_ids),
        logprobs=[TokenLogprobs(-1.0 * t, 1, [], []) for t in token_ids],
        num_output_tokens=total,
        finish_reason=FinishReason.STOP if end else None,
    )


def test_a_first_token_never_waits() -> None:
    reader = Reader()
    reader.outbox.add([increment("a", [1], 1)], can_wait=True)
    assert len(reader.messages) == 1


def test_an_end_never_waits_and_takes_what_was_held_along() -> None:
    reader = Reader()
    reader.outbox.add([increment("a", [1], 1), increment("b", [5], 1)], can_wait=True)
    reader.outbox.add([increment("a", [2], 2), increment("b", [6], 2)], can_wait=True)
    assert len(reader.messages) == 1
    reader.outbox.add([increment("a", [3], 3, end=True)], can_wait=True)
    assert [(o.request_id, o.token_ids) for o in reader.messages[1]] == [("a", [2, 3]), ("b", [6])]


def test_nothing_is_held_longer_than_the_interval_or_before_a_long_step() -> None:
    reader = Reader()
    reader.outbox.add([increment("a", [1], 1)], can_wait=True)
    reader.now = 5.0
    reader.outbox.add([increment("a", [2], 2)], can_wait=True)
    assert len(reader.messages) == 1
    reader.now = 10.0
    reader.outbox.add([increment("a", [3], 3)], can_wait=True)
    assert reader.messages[1][0].token_ids == [2, 3]
    reader.now = 11.0
    reader.outbox.add([increment("a", [4], 4)], can_wait=False)
    assert reader.messages[2][0].token_ids == [4]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.booleans(), st.floats(0, 9)), max_size=30
    )
)
def test_whatever_the_timing_each_stream_is_whole(steps: list[tuple[str, int, bool, float]]) -> None:
    reader = Reader()
    expected: dict[str, list[int]] = {}
    for name, num_tokens, can_wait, pause in steps:
        reader.now += pause
        tokens = expected.setdefault(name, [])
        new = list(range(len(tokens), len(tokens) + num_tokens))
        tokens += new
        reader.outbox.add([increment(name, new, len(tokens))], can_wait=can_wait)
    reader.outbox.flush()
    for name, tokens in expected.items():
        parts = [o for message in reader.messages for o in message if o.request_id == name]
        assert [t for o in parts for t in o.token_ids] == tokens
        assert "".join(o.text for o in parts) == "".join(map(str, tokens))
        assert [lp.logprob for o in parts for lp in o.logprobs or []] == [-1.0 * t for t in tokens]
        assert sum(len(o.sources) for o in parts) == len(tokens)
        assert parts[-1].num_output_tokens == len(tokens)
