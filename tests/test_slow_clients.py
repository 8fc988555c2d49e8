"""Clients that are slow, silent or somebody else's web page: each is given up, nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, FakeEngineClient, FakeTokenizer

from outrider.config import load
from outrider.entrypoints import http_edge, http_protocol
from outrider.entrypoints.api_server import _make_server, bind
from outrider.entrypoints.prepare import Limits, Preparer

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[int, FakeEngineClient]]:
    """The whole HTTP side in this process, over the fake engine."""
    configuration = load({"log_requests": "false"})
    state, server = _make_server(configuration)
    engine = FakeEngineClient(configuration.engine, lambda reason: None)
    state.engine = engine
    state.preparer = Preparer(FakeTokenizer(), Limits("fake", MAX_MODEL_LEN, VOCAB_SIZE, 64, 4), 0)
    sock = bind("127.0.0.1", 0)
    task = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        yield sock.getsockname()[1], engine
    finally:
        server.should_exit = True
        await task


def run(test: Callable[[int, FakeEngineClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as (port, engine):
            await test(port, engine)

    asyncio.run(asyncio.wait_for(main(), 60))


async def ask(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send parts with pauses between; whatever comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reply = asyncio.ensure_future(reader.read())
    for part in parts:
        with contextlib.suppress(ConnectionError):
            writer.write(part)
            await writer.drain()
        if pause_s:
            await asyncio.wait([reply], timeout=pause_s)
    content = await reply
    writer.close()
    return content


def head(status: str, reply: bytes) -> dict[str, Any]:
    """The error of a reply that has this status."""
    top, _, body = reply.rpartition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 " + status.encode()), reply
    return json.loads(body)["error"]


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.1)

    async def test(port: int, engine: FakeEngineClient) -> None:
        assert await ask(port) == b""

    run(test)


def test_a_head_that_trickles_in_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)

    async def test(port: int, engine: FakeEngineClient) -> None:
        letters = [bytes([byte]) for byte in GET]
        assert head("408", await ask(port, *letters, pause_s=0.05))["code"] == "head_timeout"
        # The second request of a connection is timed, too; the first has its answer.
        replies = await ask(port, GET, *letters, pause_s=0.05)
        assert replies.startswith(b"HTTP/1.1 200") and b"head_timeout" in replies
        close = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        assert (await ask(port, close[:20], close[20:], pause_s=0.02)).startswith(b"HTTP/1.1 200")

    run(test)


@pytest.mark.parametrize("name", [b"x", b"y" * 100_000])
def test_a_head_without_end_is_refused(name: bytes) -> None:
    async def test(port: int, engine: FakeEngineClient) -> None:
        pieces = [name + b": " + b"z" * 1000 + b"\r\n" if name == b"x" else name] * 100
        assert head("431", await ask(port, GET[:-2], *pieces, pause_s=0.001))["code"] == "head_too_large"

    run(test)


def test_a_body_that_trickles_in_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "BODY_TOTAL_TIMEOUT", 0.3)

    async def test(port: int, engine: FakeEngineClient) -> None:
        post = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\nconnection: close\r\n\r\n"
        )
        error = head("408", await ask(port, post, *[b" "] * 20, pause_s=0.05))
        assert error["code"] == "body_timeout" and not engine.live

    run(test)


def test_a_client_that_does_not_read_loses_its_request_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "WRITE_TIMEOUT_S", 0.5)

    async def test(port: int, engine: FakeEngineClient) -> None:
        idle = socket.socket()
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.setblocking(False)
        await asyncio.get_running_loop().sock_connect(idle, ("127.0.0.1", port))
        body = json.dumps({"prompt": "x", "n": 64, "stream": True, "return_speculation": "detailed",
                           "return_token_ids": True}).encode()  # fmt: skip
        post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        await asyncio.get_running_loop().sock_sendall(idle, post + body)
        while not engine.live:
            await asyncio.sleep(0.01)
        close = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        while engine.live:
            assert (await ask(port, close)).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.05)
        assert len(engine.aborted) > 0  # they were ended, not finished
        idle.close()

    run(test)


def test_other_sites_pages_are_refused_and_answers_tell_browsers_little() -> None:
    async def test(port: int, engine: FakeEngineClient) -> None:
        import httpx

        body = {"prompt": "x", "max_tokens": 1}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for site, status in (
                ("cross-site", 403),
                ("same-site", 403),
                ("same-origin", 200),
                ("none", 200),
            ):
                reply = await client.post("/v1/completions", json=body, headers={"sec-fetch-site": site})
                assert reply.status_code == status, site
            assert (await client.get("/health", headers={"sec-fetch-site": "cross-site"})).status_code == 200
            for path in ("/", "/ui/app.js", "/v1/models", "/nothing"):
                headers = (await client.get(path)).headers
                assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
                assert headers["cross-origin-resource-policy"] == "same-origin"
                assert "server" not in headers and "access-control-allow-origin" not in headers

    run(test)
