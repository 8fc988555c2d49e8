"""A server that a benchmark starts, waits for and stops again, whatever happens in between."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit


class ServerFailed(RuntimeError):
    """The server ended or was not ready in time; the message carries the end of its log."""


class ServerProcess:
    """`with ServerProcess(...) as server:` gives a server whose /health answers 200.

    The process gets a session of its own, so that Ctrl-C reaches the benchmark alone, which then stops
    the server: first with SIGTERM, after `stop_timeout_s` with SIGKILL to all it has started.
    """

    def __init__(
        self,
        command: Sequence[str],
        base_url: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 600,
        stop_timeout_s: float = 20,
    ) -> None:
        self.command = list(command)
        self.base_url = base_url
        self.log_path = log_path
        self.ready_s = 0.0  # from start to the first 200
        self._env = {**os.environ, **(env or {})}
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        began = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        try:
            while not health_ok(self.base_url):
                code = self._process.poll()
                if code is not None:
                    raise ServerFailed(
                        self._explain(f"the server ended with code {code} before it was ready")
                    )
                if time.monotonic() - began > self._start_timeout_s:
                    raise ServerFailed(
                        self._explain(f"the server was not ready in {self._start_timeout_s:g} s")
                    )
                time.sleep(0.02)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - began

    def stop(self) -> None:
        """Idempotent; returns when the process is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._stop_timeout_s)
        # Whatever it left behind is in its session and goes too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _explain(self, what: str) -> str:
        tail = self.log_path.read_text(errors="replace").splitlines()[-20:]
        return "\n".join([f"{what}: {' '.join(self.command)}", f"end of {self.log_path}:", *tail])


def health_ok(base_url: str, timeout_s: float = 2) -> bool:
    """Does GET /health answer 200 there?"""
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(
        parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s
    )
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def is_listening(base_url: str) -> bool:
    """Does anything accept connections there?"""
    parts = urlsplit(base_url)
    try:
        with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=2):
            return True
    except OSError:
        return False


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def outrider_command(
    host: str,
    port: int,
    model: str | None,
    config: str | None,
    speculative_config: str | None,
    extra: Sequence[str],
) -> list[str]:
    """`outrider serve` with this interpreter."""
    command = [sys.executable, "-m", "outrider.entrypoints.cli", "serve", "--host", host, "--port", str(port)]
    if model:
        command[4:4] = [model]
    if config:
        command += ["--config", config]
    if speculative_config:
        command += ["--speculative-config", speculative_config]
    return command + list(extra)


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, so that `with` blocks stop their servers."""

    def leave(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
