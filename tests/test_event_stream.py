"""A stream whose client leaves ends quietly, whenever that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outrider.entrypoints.app import EventStream
from outrider.entrypoints.generation import ClientGoneError


class LeavingClient:
    """A generation whose client goes after some events."""

    def __init__(self, num_events: int) -> None:
        self._num_events = num_events

    async def stream(self, answer: Any, receive: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
        for _ in range(self._num_events):
            await send(b"data: {}\n\n")
        raise ClientGoneError


@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_a_client_that_leaves_is_no_error(num_events: int) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    stream = EventStream(LeavingClient(num_events), None, "request")  # type: ignore[arg-type]
    asyncio.run(stream({}, receive, send))
    assert [m["type"] for m in sent[1:]] == ["http.response.body"] * num_events
    assert all(m.get("more_body", True) for m in sent)
