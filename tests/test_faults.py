"""Faults under load: storms of clients, deadlines, signals and full disks.

What must hold is the same each time: nobody gets a wrong or half answer without being told, blocks come home,
and the server goes on or ends cleanly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import free_port, wait_until_ready
from live_fake import HTTP, error_of, post, running, wait_for_none_running

from outrider.engine.client import _private_directory

pytestmark = pytest.mark.server

HELLO = {"messages": [{"role": "user", "content": "Repeat after me: one two three, one two three."}]}


class Reply:
    """An answer read off a socket: its status, events of a stream, and whether it came to its end."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        self.status = int(head.split(b" ", 2)[1]) if head else 0
        if b"transfer-encoding: chunked" in head.lower():
            self.body = b"".join(self.body.split(b"\r\n")[1::2])
        self.events = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        self.is_whole = bool(self.events) and self.events[-1] == b"[DONE]"

    @property
    def text(self) -> str:
        choices = [json.loads(event)["choices"] for event in self.events[:-1] if b'"choices"' in event]
        return "".join(choice[0].get("text", "") for choice in choices if choice)

    @property
    def finish_reason(self) -> str | None:
        return json.loads(self.events[-2])["choices"][0]["finish_reason"]


def request_bytes(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    return head.encode() + content


async def exchange(port: int, body: dict[str, Any], started: asyncio.Event | None = None) -> Reply:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(body))
    raw = await reader.read(1)
    if started is not None:
        started.set()
    with contextlib.suppress(ConnectionError):
        raw += await reader.read()
    writer.close()
    return Reply(raw)


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


@contextlib.contextmanager
def real_server(*flags: str, **options: Any) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`outrider serve` with the built-in model."""
    port = free_port()
    command = [sys.executable, "-m", "outrider.entrypoints.api_server", "--port", str(port), *flags]
    with subprocess.Popen(command, **{"stderr": subprocess.DEVNULL, **options}) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            yield url, process
        finally:
            process.kill()


# --- clients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_connections_each_get_their_own_whole_answer(count: int) -> None:
    async def all_of(port: int) -> list[Reply]:
        bodies = [{"prompt": f"client {i}", "max_tokens": 8, "seed": i, "stream": True} for i in range(count)]
        return await asyncio.gather(*(exchange(port, body) for body in bodies))

    with running(f"max_concurrency={count}") as (url, _):
        replies = asyncio.run(all_of(port_of(url)))
        assert all(reply.status == 200 and reply.is_whole for reply in replies)
        for i in range(0, count, 37):
            alone = post(url, "/v1/completions", {"prompt": f"client {i}", "max_tokens": 8, "seed": i}).json()
            assert alone["choices"][0]["text"] == replies[i].text
        wait_for_none_running(url)


def test_more_connections_than_allowed_are_refused_one_by_one() -> None:
    async def all_of(port: int) -> list[Reply]:
        body = {"prompt": "slow", "max_tokens": 4, "stream": True}
        return await asyncio.gather(*(exchange(port, body) for _ in range(60)))

    with running("max_concurrency=20") as (url, _):
        replies = asyncio.run(all_of(port_of(url)))
        statuses = sorted(reply.status for reply in replies)
        assert statuses == [200] * 20 + [429] * 40
        assert all(reply.is_whole for reply in replies if reply.status == 200)


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_clients_that_vanish_leave_nothing_behind(count: int) -> None:
    """Connections are reset at any moment: before, in and after the head, the body, the answer."""
    rng = random.Random(0)
    with running("max_concurrency=1000") as (url, _):
        address = ("127.0.0.1", port_of(url))
        content = request_bytes({"prompt": "slow", "stream": True})
        for _ in range(count):
            sock = socket.create_connection(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset at close
            cut = rng.choice([0, 5, len(content) - 3, len(content), len(content)])
            sock.sendall(content[:cut])
            if cut == len(content) and rng.random() < 0.7:
                sock.recv(rng.choice([1, 100, 1000]))
            sock.close()
        wait_for_none_running(url)
        assert post(url, "/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 200


def test_a_client_that_reads_a_byte_at_a_time_gets_everything_and_holds_up_nobody() -> None:
    with running() as (url, _):
        body = {"prompt": "x", "max_tokens": 12, "temperature": 0, "stream": True}
        whole = Reply(asyncio.run(raw_exchange(port_of(url), body)))
        with socket.create_connection(("127.0.0.1", port_of(url))) as sock:
            sock.sendall(request_bytes(body))
            raw = b""
            while byte := sock.recv(1):
                raw += byte
                if len(raw) % 500 == 0:
                    began = time.monotonic()
                    assert HTTP.get(url + "/ping").status_code == 200
                    assert time.monotonic() - began < 5
        slow = Reply(raw)
        assert slow.is_whole and slow.text == whole.text == "The quick br"


async def raw_exchange(port: int, body: dict[str, Any]) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(body))
    raw = await reader.read()
    writer.close()
    return raw


def test_a_storm_of_deadlines_ends_all_and_hurts_none() -> None:
    async def storm(port: int) -> tuple[list[Reply], list[Reply]]:
        endless = {"prompt": "slow", "max_tokens": 1000}
        late = [exchange(port, endless | {"stream": i % 2 == 0}) for i in range(200)]
        short = [exchange(port, {"prompt": "x", "max_tokens": 2, "stream": True}) for _ in range(50)]
        replies = await asyncio.gather(*late, *short)
        return list(replies[:200]), list(replies[200:])

    with running("request_timeout=3") as (url, _):
        late, short = asyncio.run(storm(port_of(url)))
        for i, reply in enumerate(late):
            told = json.loads(reply.events[-2] if i % 2 == 0 else reply.body)
            assert told["error"]["code"] == "request_timeout", i
        assert all(reply.is_whole and reply.finish_reason == "length" for reply in short)
        wait_for_none_running(url)
        assert 'reason="request_timeout"} 200.0' in HTTP.get(url + "/metrics").text


# --- signals ---------------------------------------------------------------------------------------------


def test_sigterm_under_load_finishes_every_running_answer() -> None:
    async def load(port: int, process: subprocess.Popen[bytes]) -> list[Reply]:
        started = [asyncio.Event() for _ in range(40)]
        tasks = [
            asyncio.ensure_future(exchange(port, {"prompt": "slow", "max_tokens": 12, "stream": True}, event))
            for event in started
        ]
        await asyncio.gather(*(event.wait() for event in started))
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    with running() as (url, process):
        replies = asyncio.run(load(port_of(url), process))
        assert all(reply.is_whole and reply.finish_reason == "length" for reply in replies)
        assert process.wait(30) == 0


@pytest.mark.model
@pytest.mark.slow
def test_the_real_server_under_load_drains_at_sigterm() -> None:
    async def load(port: int, process: subprocess.Popen[bytes]) -> list[Reply]:
        body = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "stream": True}
        started = [asyncio.Event() for _ in range(16)]
        tasks = [
            asyncio.ensure_future(exchange(port, body | {"seed": i}, event))
            for i, event in enumerate(started)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    with real_server("--shutdown-timeout", "120") as (url, process):
        replies = asyncio.run(load(port_of(url), process))
        assert all(reply.is_whole and reply.finish_reason == "length" for reply in replies)
        assert process.wait(30) == 0


@pytest.mark.model
@pytest.mark.slow
def test_kill_9_of_the_engine_under_load_is_told_to_everyone() -> None:
    async def load(port: int, engine: int) -> list[Reply]:
        body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        started = [asyncio.Event() for _ in range(16)]
        tasks = [asyncio.ensure_future(exchange(port, body, event)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        os.kill(engine, signal.SIGKILL)
        return await asyncio.gather(*tasks)

    with real_server() as (url, process):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        engine = next(
            int(pid) for pid in children if b"core_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        replies = asyncio.run(load(port_of(url), engine))
        for reply in replies:
            assert reply.is_whole and json.loads(reply.events[-2])["error"]["code"] == "engine_dead"
        assert error_of(HTTP.get(url + "/health"), 503)["code"] == "engine_dead"
        assert process.wait(30) == 1


# --- a full disk -------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in which nothing more can be written."""
    disk = tmp_path / "full"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=64", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_engines_socket_finds_another_place_when_the_temporary_directory_is_full(
    full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    for i in range(64):  # the last inodes
        try:
            (full_disk / f"d{i}").mkdir()
        except OSError:
            break
    monkeypatch.setattr(tempfile, "tempdir", str(full_disk))
    path = Path(_private_directory())
    assert path.is_dir() and path.parent == Path("/tmp")
    path.rmdir()


@pytest.mark.model
@pytest.mark.slow
def test_a_server_whose_caches_and_logs_cannot_be_written_serves(full_disk: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(full_disk), "HOME": str(full_disk)}
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(open("/dev/full", "wb"))
        server = real_server("--log-format", "json", env=env, stderr=full, stdout=full)
        url, process = stack.enter_context(server)
        first = HTTP.post(url + "/v1/chat/completions", json={**HELLO, "max_tokens": 20, "temperature": 0})
        assert first.status_code == 200
        assert error_of(post(url, "/v1/chat/completions", {"x": 1}), 400)
        again = HTTP.post(url + "/v1/chat/completions", json={**HELLO, "max_tokens": 20, "temperature": 0})
        assert again.json()["choices"] == first.json()["choices"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_logs_that_cannot_be_written_cost_no_answer() -> None:
    port = free_port()
    script = Path(__file__).parent / "fake_engine.py"
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen([sys.executable, str(script), f"port={port}"], stderr=full)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            for _ in range(3):
                assert post(url, "/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


# --- for a long time ---------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_half_an_hour_of_streams_and_cancels_leaves_memory_flat() -> None:
    """OUTRIDER_SOAK_S shortens it; the figures are printed."""
    seconds = os.environ.get("OUTRIDER_SOAK_S", "1800")
    script = Path(__file__).parent.parent / "benchmarks" / "benchmark_soak.py"
    subprocess.run([sys.executable, str(script), "--seconds", seconds, "--max-gap", "30"], check=True)
