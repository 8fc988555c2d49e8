"""Limits, keys, and how a server ends: drained, stopped, or without its engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest
from fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, FakeEngineClient, FakeTokenizer
from live_fake import CHAT, HELLO, HTTP, error_of, post, running, wait_for_none_running

from outrider.config import load
from outrider.entrypoints.app import ServerState, create_app
from outrider.entrypoints.generation import Gate
from outrider.entrypoints.prepare import Limits, Preparer


def test_limits_and_keys_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "secret,other")
    flags = ("max_concurrency=2", "max_num_seqs=1", "max_num_batched_tokens=64", "max_queue_size=2",
             "request_timeout=1.5")  # fmt: skip
    endless = {"prompt": "slow", "stream": True}
    with running(*flags) as (url, _), contextlib.ExitStack() as stack:
        error_of(post(url, CHAT, {"messages": HELLO}), 401)
        error_of(HTTP.get(url + "/v1/models", headers={"authorization": "Bearer wrong"}), 401)
        keyed, other = (
            stack.enter_context(httpx.Client(headers={"authorization": f"Bearer {key}"}, base_url=url))
            for key in ("secret", "other")
        )
        assert keyed.get("/v1/models").status_code == 200
        full = keyed.post("/v1/completions", json={"prompt": "x", "n": 4})
        assert error_of(full, 429)["code"] == "queue_full" and full.headers["retry-after"]

        replies = [
            stack.enter_context(keyed.stream("POST", "/v1/completions", json=endless)) for _ in range(2)
        ]
        lines = [reply.iter_lines() for reply in replies]
        first = [json.loads(next(each)[6:])["id"] for each in lines]
        third = other.post("/v1/completions", json={"prompt": "x"})
        assert error_of(third, 429)["code"] == "max_concurrency" and third.headers["retry-after"]
        assert other.post("/v1/abort_requests", json={"abort_all": True}).json() == {"aborted": []}
        assert keyed.post("/v1/abort_requests", json={"request_ids": first[:1]}).json() == {
            "aborted": first[:1]
        }
        ends = [[line for line in each if line][-2:] for each in lines]
        assert json.loads(ends[0][0][6:])["choices"][0]["finish_reason"] == "abort"
        assert json.loads(ends[1][0][6:])["error"]["type"] == "timeout_error"
        assert [end[1] for end in ends] == ["data: [DONE]"] * 2

        late = keyed.post("/v1/completions", json={"prompt": "slow"})
        assert error_of(late, 408)["code"] == "request_timeout"
        wait_for_none_running(url)
        failures = HTTP.get(url + "/metrics").text
        assert 'outrider:request_failure_total{reason="max_concurrency"} 1.0' in failures
        assert 'outrider:request_failure_total{reason="request_timeout"} 2.0' in failures


def test_waiting_too_long_for_the_first_token_is_a_503() -> None:
    async def ask() -> None:
        configuration = load({"max_waiting_time": 0.05})
        engine = FakeEngineClient(configuration.engine, lambda reason: None)
        state = ServerState(configuration, Gate(configuration.server, 4), engine)
        state.preparer = Preparer(FakeTokenizer(), Limits("fake", MAX_MODEL_LEN, VOCAB_SIZE, 4, 4), 0)
        transport = httpx.ASGITransport(create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            reply = await client.post("/v1/completions", json={"prompt": "slow"})
            assert error_of(reply, 503)["code"] == "max_waiting_time" and reply.headers["retry-after"]
            assert not engine.live
            ok = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert ok.status_code == 200
            state.preparer = None
            assert error_of(await client.get("/health"), 503)["code"] == "loading"

    asyncio.run(ask())


def test_sigterm_drains_and_a_second_signal_stops_at_once() -> None:
    with running() as (url, process):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        short = client.completions.create(model="smollm2-135m", prompt="slow", max_tokens=8, stream=True)
        next(chunks := iter(short))
        with HTTP.stream("POST", url + "/v1/completions", json={"prompt": "slow", "stream": True}) as endless:
            next(lines := endless.iter_lines())
            with httpx.Client(base_url=url) as other:
                assert other.get("/health").status_code == 200
                process.send_signal(signal.SIGTERM)
                while other.get("/health").status_code == 200:
                    time.sleep(0.01)
                assert error_of(other.post(CHAT, json={"messages": HELLO}), 503)["code"] == "draining"
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
            process.send_signal(signal.SIGINT)
            events = [line for line in lines if line]
        assert json.loads(events[-2][6:])["error"]["code"] == "stopped"
        assert process.wait(10) == 0


def test_sigterm_ends_an_idle_server() -> None:
    with running() as (_, process):
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_dead_engine_fails_its_requests_and_ends_the_process() -> None:
    with running() as (url, process):
        with HTTP.stream("POST", url + "/v1/completions", json={"prompt": "slow", "stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            error_of(post(url, "/v1/completions", {"prompt": "crash"}), 503)
            events = [line for line in lines if line]
        assert json.loads(events[-2][6:])["error"]["code"] == "engine_dead"
        assert error_of(HTTP.get(url + "/health"), 503)["code"] == "engine_dead"
        assert HTTP.get(url + "/ping").status_code == 200
        assert process.wait(10) == 1


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run(
            [sys.executable, "-m", "outrider.entrypoints.cli", "serve", "no/such/model", "--port", str(port)],
            capture_output=True, text=True, env=os.environ, timeout=30,
        )  # fmt: skip
    assert result.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
