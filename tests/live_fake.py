"""A live server over the fake engine, and short ways to ask it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from conftest import free_port, wait_until_ready

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]
HTTP = httpx.Client(timeout=30)


@contextlib.contextmanager
def running(*flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A live server over the fake engine."""
    port = free_port()
    script = Path(__file__).parent / "fake_engine.py"
    # Nobody reads the pipe while the server runs, so it must not fill.
    quiet = [] if any(flag.startswith("log_") for flag in flags) else ["log_requests=false"]
    command = [sys.executable, str(script), f"port={port}", *quiet, *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            yield url, process
        finally:
            process.kill()


def post(url: str, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HTTP.post(url + path, content=content, headers={"content-type": "application/json"})


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def num_running(url: str) -> int:
    text = HTTP.get(url + "/metrics").text
    return int(float(re.search(r"^outrider:num_requests_running (\S+)$", text, re.M)[1]))  # type: ignore[index]


def wait_for_none_running(url: str) -> None:
    end = time.monotonic() + 5
    while num_running(url):
        assert time.monotonic() < end, "requests are still in the engine"
        time.sleep(0.01)
