"""The asyncio side of an engine that runs in its own process.

Messages are msgspec over one ZMQ socket in a private directory. Whatever happens to the process, every
open request hears of it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from outrider import logs
from outrider.config import EngineConfig
from outrider.engine.messages import (
    EngineFailure,
    EngineInfo,
    FromEngine,
    Start,
    ToEngine,
    decode_from_engine,
    encode,
)
from outrider.request import (
    AbortRequests,
    AddRequest,
    FinishReason,
    GetStats,
    RequestOutput,
    Shutdown,
    StatsReply,
    StepOutputs,
)

logger = logging.getLogger(__name__)

DEFAULT_FACTORY = "outrider.engine.factory:build_engine"
_KILL_AFTER_S = 5.0
_MOST_PATH = 100  # bytes in the path of a Unix socket, on every system


class EngineError(RuntimeError):
    """The engine could not start, or is gone; the message says why."""


class EngineClient:
    """Starts an engine process and speaks to it. For one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        on_death: Callable[[str], None] | None = None,
        factory: str = DEFAULT_FACTORY,
    ) -> None:
        """`on_death` is called once, with the reason, when a started engine ends without being asked to."""
        self.info: EngineInfo | None = None
        self._config = config
        self._on_death = on_death
        self._factory = factory
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: str | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._exited = asyncio.Event()
        self._failure: str | None = None  # why it is gone
        self._is_closing = False
        self._streams: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._call_ids = itertools.count()

    @property
    def is_alive(self) -> bool:
        """Whether it is ready for requests."""
        return self.info is not None and self._failure is None and not self._is_closing

    async def start(self) -> EngineInfo:
        """Start the process and wait until the engine is built; EngineError says why it could not be."""
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        self._directory = _private_directory()
        address = f"ipc://{self._directory}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        command = [sys.executable, "-m", "outrider.engine.core_process", address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        threading.Thread(target=self._wait_for_exit, args=(loop, self._process), daemon=True).start()
        self._reader = asyncio.create_task(self._read(self._socket))
        level = logging.getLogger().getEffectiveLevel()
        self._send(Start(msgspec.to_builtins(self._config), self._factory, level, logs.current_style()))
        self.info = await self._started
        return self.info

    async def add_request(self, request: AddRequest) -> AsyncIterator[RequestOutput]:
        """The increments of a request, the last with its finish reason.

        A request that is left early is aborted. Refusals and the death of the engine are increments with
        finish reason `error`; an engine that is not there is an EngineError.
        """
        if not self.is_alive:
            raise EngineError(self._failure or "the engine is not running")
        if request.request_id in self._streams:
            raise ValueError(f"a request with id {request.request_id!r} is already running")
        stream: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._streams[request.request_id] = stream
        self._send(request)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self._streams.pop(request.request_id, None) is not None:
                self.abort([request.request_id])

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early; each gets a last increment with finish reason `abort`. Unknown ids are fine."""
        if request_ids and self.is_alive:
            self._send(AbortRequests(list(request_ids)))

    async def stats(self) -> dict[str, Any]:
        """`Engine.stats` of now."""
        if not self.is_alive:
            raise EngineError(self._failure or "the engine is not running")
        call_id = next(self._call_ids)
        reply = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(GetStats(call_id))
        try:
            return await reply
        finally:
            self._calls.pop(call_id, None)

    async def shutdown(self, drain: bool = False, timeout_s: float | None = None) -> None:
        """End the process: after its running requests with `drain`, else at once. Calling it again is fine.

        Requests still running after `timeout_s` (None: no limit with `drain`) end with the process.
        """
        process = self._process
        if process is None:
            return
        if self.is_alive:
            self._send(Shutdown(drain))
            self._is_closing = True
            limit = timeout_s if timeout_s is not None or drain else _KILL_AFTER_S
            try:
                await asyncio.wait_for(self._exited.wait(), limit)
            except asyncio.TimeoutError:
                logger.warning("the engine did not end within %g s and is killed", limit)
        self._is_closing = True
        if process.poll() is None:
            process.kill()
        await self._exited.wait()
        while self._streams and self._failure is None:
            await asyncio.sleep(0.01)  # the last increments are still on their way
        self._close()

    def _send(self, message: ToEngine) -> None:
        assert self._socket is not None
        # Sent in this order, and nothing needs to know when.
        self._socket.send(encode(message))

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._take(decode_from_engine(await socket.recv()))

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepOutputs(outputs=outputs):
                for output in outputs:
                    if output.finish_reason is None:
                        stream = self._streams.get(output.request_id)
                    else:
                        stream = self._streams.pop(output.request_id, None)
                    if stream is not None:
                        stream.put_nowait(output)
            case StatsReply(call_id=call_id, stats=stats):
                call = self._calls.pop(call_id, None)
                if call is not None and not call.done():
                    call.set_result(stats)
            case EngineInfo():
                if self._started is not None and not self._started.done():
                    self._started.set_result(message)
            case EngineFailure(reason=reason):
                self._fail(reason)

    def _wait_for_exit(self, loop: asyncio.AbstractEventLoop, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
            loop.call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        self._exited.set()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if not self._is_closing or self._streams:
            # What it still had to say (a failure's reason, last increments) comes first.
            asyncio.get_running_loop().call_later(0.05, self._fail, f"the engine process {how}")

    def _fail(self, reason: str) -> None:
        """The engine is gone: say so to everyone who waits, once."""
        if self._failure is not None:
            return
        self._failure = reason
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineError(reason))
        elif not self._is_closing and self._on_death is not None:
            self._on_death(reason)
        for request_id, stream in self._streams.items():
            last = RequestOutput(request_id=request_id, token_ids=[], text="")
            last.finish_reason = FinishReason.ERROR
            last.error = reason
            stream.put_nowait(last)
        self._streams.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineError(reason))
        self._calls.clear()

    def _close(self) -> None:
        self._fail("the engine has been shut down")
        if self._reader is not None:
            self._reader.cancel()
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._context = self._socket = self._process = None


def _private_directory() -> str:
    """A new directory that only this user can enter, with a path short enough for a socket."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        try:
            directory = tempfile.mkdtemp(prefix="outrider-", dir=parent)
        except OSError as error:  # full, or not writable
            logger.warning("no directory can be made in %s: %s", parent, error.strerror)
            continue
        if len(os.fsencode(directory)) < _MOST_PATH - len("/engine"):
            return directory
        os.rmdir(directory)
    raise EngineError(
        "no directory for the engine's socket: the temporary directory's path is too long, or it cannot be "
        "written to; set TMPDIR to another one"
    )
