"""The engine's own process: one loop around `Engine.step`.

While there is work it looks at its inbox between steps without waiting; without work it sleeps on the
inbox. All increments of a step leave in one message. It ends when it is told to, when it fails, or when
the process that started it is gone. Signals are that process's business.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from typing import Any

import msgspec
import zmq

from outrider import logs
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.messages import EngineFailure, EngineInfo, Start, ToEngine, decode_to_engine, encode
from outrider.engine.outbox import Outbox
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


class CoreProcess:
    """An engine and the socket it is spoken to through."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._outbox = Outbox(lambda outputs: socket.send(encode(StepOutputs(outputs))))
        self._is_draining = False
        self._is_stopping = False

    def run(self) -> None:
        """Serve until a shutdown has been carried out."""
        engine, handle = self._engine, self._handle
        while not self._is_stopping:
            if engine.has_work:
                while (message := self._receive(zmq.NOBLOCK)) is not None:
                    handle(message)
                outputs = engine.step()
                next_is_short = engine.has_work and not engine.scheduler.num_prompt_tokens_next()
                self._outbox.add(outputs, can_wait=next_is_short)
            elif self._is_draining:
                return
            else:
                handle(self._receive(0))

    def _receive(self, flags: int) -> Any:
        try:
            return decode_to_engine(self._socket.recv(flags))
        except zmq.Again:
            return None

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequests(request_ids=request_ids):
                self._send_outputs(self._engine.cancel(request_ids))
            case GetStats(call_id=call_id):
                self._socket.send(encode(StatsReply(call_id, self._engine.stats())))
            case Shutdown(drain=drain):
                self._is_draining = True
                if not drain:
                    self._send_outputs(self._engine.cancel([]))
                    self._is_stopping = True
            case _:
                raise TypeError(f"unexpected message {type(message).__name__}")

    def _add(self, request: AddRequest) -> None:
        try:
            if self._is_draining:
                raise ValueError("the engine is shutting down and takes no new requests")
            self._engine.add_request(request)
        except ValueError as error:
            refusal = RequestOutput(request_id=request.request_id, token_ids=[], text="")
            refusal.finish_reason = FinishReason.ERROR
            refusal.error = str(error)
            self._send_outputs([refusal])

    def _send_outputs(self, outputs: list[RequestOutput]) -> None:
        self._outbox.add(outputs, can_wait=False)


def main(address: str) -> int:
    """Build the engine that the first message asks for and serve it; the exit code says how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent(address)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    doing = "start"
    try:
        begin = time.monotonic()
        engine = _build(decode_to_engine(socket.recv()))
        # What lives as long as the process is not looked through again at every collection, and what a step
        # makes has no cycles: collections would find nothing, many times a second.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        kv_cache = engine.scheduler.kv_cache
        socket.send(
            encode(
                EngineInfo(
                    engine.max_model_len,
                    len(engine.vocabulary),
                    kv_cache.num_blocks,
                    kv_cache.block_size,
                    time.monotonic() - begin,
                )
            )
        )
        doing = "go on"
        CoreProcess(engine, socket).run()
        engine.close()
        return 0
    except Exception as error:
        if doing == "go on" or not isinstance(error, (ValueError, OSError, ImportError, MemoryError)):
            logger.exception("the engine cannot %s", doing)
        reason = str(error) or type(error).__name__
        socket.send(encode(EngineFailure(f"the engine cannot {doing}: {reason}")))
        return 1
    finally:
        context.destroy(linger=2000)


def _build(start: ToEngine) -> Engine:
    assert isinstance(start, Start), f"the first message must be Start, got {type(start).__name__}"
    logs.configure(start.log_level, start.log_style)
    module, _, function = start.factory.partition(":")
    factory = getattr(importlib.import_module(module), function)
    engine = factory(msgspec.convert(start.config, EngineConfig))
    assert isinstance(engine, Engine)
    return engine


def _end_with_parent(address: str) -> None:
    """Standard input is a pipe that only the parent writes to: its end means that the parent is gone, and
    cannot remove the socket's directory any more."""

    def wait() -> None:
        while os.read(0, 64):
            pass
        shutil.rmtree(os.path.dirname(address.removeprefix("ipc://")), ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
