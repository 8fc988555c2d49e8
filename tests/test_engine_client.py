"""The engine in its own process: streams, cancellation, and every way to die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import plain_decode

from outrider.config import EngineConfig
from outrider.engine.client import EngineClient, EngineError
from outrider.request import AddRequest, FinishReason, RequestOutput, SamplingParams

TESTS = Path(__file__).parent
FACTORY = "fakes:build_hash_engine"


@pytest.fixture(autouse=True)
def fakes_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


@asynccontextmanager
async def started(on_death: Callable[[str], None] | None = None) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineConfig(), on_death=on_death, factory=FACTORY)
    try:
        await client.start()
        yield client
    finally:
        await client.shutdown()


def request(request_id: str = "r", prompt: list[int] | None = None, **params: Any) -> AddRequest:
    params = {"seed": 1, "ignore_eos": True, "max_tokens": 20, **params}
    return AddRequest(request_id, prompt or [0, 1], SamplingParams(**params), time.monotonic())


async def collect(client: EngineClient, asked: AddRequest) -> list[RequestOutput]:
    return [output async for output in client.add_request(asked)]


def pid_of(client: EngineClient) -> int:
    assert client._process is not None
    return client._process.pid


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_streams_come_whole_and_in_order_for_many_at_once() -> None:
    async def check() -> None:
        async with started() as client:
            assert client.is_alive
            assert client.info is not None and client.info.max_model_len == 1000
            asked = [request(f"r{i}", [i % 3, 1, 0], seed=i) for i in range(40)]
            streams = await asyncio.gather(*(collect(client, each) for each in asked))
            for each, stream in zip(asked, streams, strict=True):
                expected = plain_decode(each.prompt_token_ids, each.params, each.params.seed or 0, 1000)
                assert [t for output in stream for t in output.token_ids] == expected.token_ids
                assert "".join(output.text for output in stream) == expected.texts[-1]
                assert [o.finish_reason for o in stream if o.finish_reason] == [FinishReason.LENGTH]
            stats = await client.stats()
            assert stats["num_finished"] == {"length": 40}
            assert stats["num_generation_tokens"] == 800
            assert stats["kv_cache_usage"] == 0

    run(check)


def test_a_request_without_a_seed_reports_the_one_it_got() -> None:
    async def check() -> None:
        async with started() as client:
            first = await collect(client, request("a", seed=None))
            seed = first[-1].seed
            again = await collect(client, request("b", seed=seed))
            # How tokens are grouped into outputs depends on timing; the tokens themselves do not.
            assert [t for o in again for t in o.token_ids] == [t for o in first for t in o.token_ids]

    run(check)


def test_an_aborted_request_ends_with_abort_and_its_blocks_are_free() -> None:
    async def check() -> None:
        async with started() as client:
            stream = client.add_request(request(max_tokens=900))
            await anext(stream)
            client.abort(["r", "unknown"])
            rest = [output async for output in stream]
            assert rest[-1].finish_reason is FinishReason.ABORT
            assert (await client.stats())["kv_cache_usage"] == 0

    run(check)


def test_a_stream_that_is_left_aborts_its_request() -> None:
    async def check() -> None:
        async with started() as client:
            stream = client.add_request(request(max_tokens=900))
            await anext(stream)
            await stream.aclose()
            while (stats := await client.stats())["num_requests_running"]:
                await asyncio.sleep(0.01)
            assert stats["num_finished"] == {"abort": 1}
            assert await collect(client, request())  # the id is free again

    run(check)


def test_what_the_engine_refuses_is_an_error_of_that_request_alone() -> None:
    async def check() -> None:
        async with started() as client:
            good = asyncio.create_task(collect(client, request("good")))
            for i, bad in enumerate(
                (request(prompt=[9]), request(prompt=[0] * 1000), request(temperature=-1.0))
            ):
                (output,) = await collect(client, bad)
                assert output.finish_reason is FinishReason.ERROR
                assert output.error and ("0..3", "1000 tokens", "temperature")[i] in output.error
            assert (await good)[-1].finish_reason is FinishReason.LENGTH

    run(check)


def test_an_engine_that_cannot_start_says_why() -> None:
    async def check() -> None:
        client = EngineClient(EngineConfig(model="missing"), factory=FACTORY)
        with pytest.raises(EngineError, match="the engine cannot start: no model called 'missing'"):
            await client.start()
        assert not client.is_alive
        await client.shutdown()
        with pytest.raises(EngineError):
            await collect(client, request())

    run(check)


def test_a_killed_engine_fails_all_its_requests_at_once() -> None:
    async def check() -> None:
        reasons: list[str] = []
        async with started(reasons.append) as client:
            streams = [client.add_request(request(f"r{i}", max_tokens=900)) for i in range(5)]
            for stream in streams:
                await anext(stream)
            calls = asyncio.gather(client.stats(), return_exceptions=True)
            os.kill(pid_of(client), signal.SIGSTOP)
            await asyncio.sleep(0.05)
            os.kill(pid_of(client), signal.SIGKILL)
            for stream in streams:
                last = [output async for output in stream][-1]
                assert last.finish_reason is FinishReason.ERROR
                assert last.error == "the engine process was killed by signal 9"
            await calls
            assert reasons == ["the engine process was killed by signal 9"]
            assert not client.is_alive
            with pytest.raises(EngineError, match="killed by signal 9"):
                await collect(client, request())
            with pytest.raises(EngineError, match="killed by signal 9"):
                await client.stats()

    run(check)


def test_a_model_that_breaks_ends_the_engine_with_its_reason() -> None:
    async def check() -> None:
        reasons: list[str] = []
        async with started(reasons.append) as client:
            last = (await collect(client, request(prompt=[0] * 32 + [2])))[-1]
            assert last.finish_reason is FinishReason.ERROR
            assert reasons == ["the engine cannot go on: the model broke"]
            assert last.error == reasons[0]
            assert not client.is_alive

    run(check)


def test_draining_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    async def check() -> None:
        async with started() as client:
            stream = client.add_request(request(max_tokens=100))
            await anext(stream)
            stopping = asyncio.create_task(client.shutdown(drain=True))
            await asyncio.sleep(0)
            assert not client.is_alive
            with pytest.raises(EngineError):
                await collect(client, request("late"))
            assert [output async for output in stream][-1].finish_reason is FinishReason.LENGTH
            await stopping

    run(check)


def test_a_shutdown_ends_running_requests_and_nobody_calls_it_death() -> None:
    async def check() -> None:
        reasons: list[str] = []
        async with started(reasons.append) as client:
            stream = client.add_request(request(max_tokens=900))
            await anext(stream)
            rest = asyncio.create_task(asyncio.wait_for(_last(stream), 10))
            await client.shutdown()
            assert (await rest).finish_reason is FinishReason.ABORT
            await client.shutdown()
            assert not reasons

    run(check)


async def _last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


def test_signals_for_the_whole_group_leave_the_engine_to_its_parent() -> None:
    async def check() -> None:
        async with started() as client:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid_of(client), number)
            assert (await collect(client, request()))[-1].finish_reason is FinishReason.LENGTH

    run(check)


PARENT = """
import asyncio, os, sys
from outrider.config import EngineConfig
from outrider.engine.client import EngineClient

async def main():
    client = EngineClient(EngineConfig(), factory="fakes:build_hash_engine")
    await client.start()
    print(client._process.pid, client._directory, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_engine_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        parent.kill()
    wait_for_end(int(pid))
    assert not os.path.exists(directory)


def wait_for_end(pid: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return  # dead; whoever adopted it has not looked yet
        time.sleep(0.05)
    pytest.fail("the engine outlives its parent")
