"""Requests on their way through the engine: admission, deadlines, cancellation, answers.

Whatever ends a request early (its client leaves, a deadline passes, the engine dies), its sequences
are aborted in the engine at once, and nothing else is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

from outrider.config import ServerConfig
from outrider.engine.state import NOTHING_ALLOWED
from outrider.entrypoints.errors import ApiError
from outrider.entrypoints.journal import Journal, Record
from outrider.entrypoints.prepare import Prepared
from outrider.entrypoints.responses import DONE, Answer
from outrider.request import AddRequest, FinishReason, RequestOutput

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]


class Engine(Protocol):
    """What the server needs of `outrider.engine.client.EngineClient`."""

    @property
    def is_alive(self) -> bool: ...
    def add_request(self, request: AddRequest) -> AsyncIterator[RequestOutput]: ...
    def abort(self, request_ids: list[str]) -> None: ...
    async def stats(self) -> dict[str, Any]: ...


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


def _name_of(error: BaseException) -> str:
    """What a request that ended with `error` is said to have ended with."""
    if isinstance(error, ClientGoneError):
        return "client_gone"
    return (error.code or "error") if isinstance(error, ApiError) else "internal_error"


class Gate:
    """Admits requests up to the limits and knows which are running.

    Sequences beyond what the engine runs at once are waiting; they are what the queue limit counts.
    """

    def __init__(self, config: ServerConfig, max_num_seqs: int, journal: Journal | None = None) -> None:
        self.generations: dict[str, Generation] = {}
        self.failures: dict[str, int] = {}  # reason -> requests that got an error
        self.is_draining = False
        self.journal = journal or Journal()
        self._num_sequences = 0
        self._config = config
        self._max_num_seqs = max_num_seqs
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def admit(self, generation: Generation) -> Iterator[None]:
        """Hold a place for a request, or refuse it with 429 or 503."""
        num_sequences = len(generation.prepared.params)
        if self.is_draining:
            raise ApiError(
                503, "the server is shutting down and takes no new requests", code="draining", retry_after=5
            )
        if len(self.generations) >= self._config.max_concurrency:
            raise ApiError(
                429, f"too many requests: {self._config.max_concurrency} are being served; try again later",
                code="max_concurrency", retry_after=1,
            )  # fmt: skip
        if self._num_sequences + num_sequences > self._max_num_seqs + self._config.max_queue_size:
            raise ApiError(
                429, f"the queue is full: {self._config.max_queue_size} sequences may wait; try again later",
                code="queue_full", retry_after=1,
            )  # fmt: skip
        self._num_sequences += num_sequences
        self.generations[generation.request_id] = generation
        self._idle.clear()
        try:
            yield
        except BaseException as error:
            generation.record.failure = _name_of(error)
            raise
        finally:
            self.journal.ended(generation.record)
            del self.generations[generation.request_id]
            self._num_sequences -= num_sequences
            if not self.generations:
                self._idle.set()

    def count_failure(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1

    async def wait_idle(self, timeout: float) -> bool:
        """Whether all requests ended within `timeout` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return not self.generations


class Generation:
    """All sequences of one HTTP request."""

    def __init__(
        self, engine: Engine, gate: Gate, config: ServerConfig, prepared: Prepared, request_id: str,
        *, owner: str, priority: int, cache_salt: str,
    ) -> None:  # fmt: skip
        self.prepared = prepared
        self.request_id = request_id
        self.record = Record(request_id, prepared.model, owner)
        self.owner = owner
        self._engine = engine
        self._gate = gate
        self._config = config
        arrival = time.monotonic()
        # Cached prefixes and drafts are shared within a key and salt, never beyond.
        namespace = f"{owner}:{cache_salt}" if owner else cache_salt
        self._requests = [
            AddRequest(
                f"{request_id}-{i}", prepared.prompts[i // prepared.n], params, arrival, priority, namespace
            )
            for i, params in enumerate(prepared.params)
        ]
        self._unfinished = {request.request_id for request in self._requests}
        self._waiting = len(self._requests)  # sequences without a first token
        self._interruption: Exception | None = None
        self._task: asyncio.Task[Any] | None = None

    def interrupt(self, reason: Exception) -> None:
        """End the request early: its handler raises `reason` at its next wait."""
        if self._interruption is None and self._task is not None:
            self._interruption = reason
            self._task.cancel()

    def abort(self) -> None:
        """Cancel the request; its client gets what has been made, with finish reason `abort`."""
        self._engine.abort(list(self._unfinished))

    async def collect(self, answer: Answer, receive: Receive) -> bytes:
        """The whole answer, as bytes."""
        with self._gate.admit(self):
            async with self._running(receive) as outputs:
                async for index, output in outputs:
                    answer.choices[index].add(output)
        return answer.body()

    async def stream(
        self, answer: Answer, receive: Receive, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Send the answer as server-sent events.

        Raises `ApiError` only before the first event; a later failure is an event of its own.
        """
        started = False
        with self._gate.admit(self):
            try:
                async with self._running(receive) as outputs:
                    async for index, output in outputs:
                        event = answer.chunk(index, output)
                        if event:
                            started = True
                            await send(event)
                    await send(answer.usage_chunk() + DONE if answer.wanted.usage else DONE)
            except ApiError as error:
                if not started:
                    raise
                self.record.failure = error.code or "error"
                self._gate.count_failure(self.record.failure)
                await send(b"data: " + error.encode() + b"\n\n" + DONE)

    @contextlib.asynccontextmanager
    async def _running(self, receive: Receive) -> AsyncIterator[AsyncIterator[tuple[int, RequestOutput]]]:
        """Increments of all sequences until each has ended; on any other way out the rest is aborted."""
        self._task = asyncio.current_task()
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._watch(receive))]
        timers = list(self._start_timers())
        outputs = self._one() if len(self._requests) == 1 else self._merged(tasks)
        try:
            async with contextlib.aclosing(outputs):
                yield outputs
        except asyncio.CancelledError:
            if self._interruption is None:
                raise
            if hasattr(self._task, "uncancel"):
                self._task.uncancel()  # type: ignore[union-attr]
            raise self._interruption from None
        except Exception as error:
            if self._engine.is_alive or isinstance(error, ApiError):
                raise
            raise ApiError(503, str(error), code="engine_dead") from None
        finally:
            self._task = None
            for timer in timers:
                timer.cancel()
            for task in tasks:
                task.cancel()
            if self._unfinished:
                self._engine.abort(list(self._unfinished))

    async def _one(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async for output in self._engine.add_request(self._requests[0]):
            self._note(output)
            yield 0, output

    async def _merged(
        self, tasks: list[asyncio.Future[Any]]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        merged: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue()

        async def pump(index: int, request: AddRequest) -> None:
            try:
                async for output in self._engine.add_request(request):
                    merged.put_nowait((index, output))
            except Exception as error:  # handed over: the request's own task raises it
                merged.put_nowait((index, error))

        tasks += [asyncio.ensure_future(pump(i, request)) for i, request in enumerate(self._requests)]
        while self._unfinished:
            index, output = await merged.get()
            if isinstance(output, Exception):
                raise output
            self._note(output)
            yield index, output

    def _note(self, output: RequestOutput) -> None:
        self.record.note(output)
        if output.num_output_tokens <= len(output.token_ids):
            self._waiting -= 1
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
            if output.finish_reason is FinishReason.ERROR:
                raise self._failure(output)

    def _failure(self, output: RequestOutput) -> ApiError:
        message = output.error or "the engine could not go on with this request"
        if not self._engine.is_alive:
            return ApiError(503, message, code="engine_dead")
        if message == NOTHING_ALLOWED:
            return ApiError(400, message, code="nothing_allowed")
        if output.num_prompt_tokens == 0:  # refused before it began
            return ApiError(400, message, code="refused")
        return ApiError(500, message, code="engine_error")

    async def _watch(self, receive: Receive) -> None:
        """Interrupt the request when its client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGoneError())

    def _start_timers(self) -> Iterator[asyncio.TimerHandle]:
        loop = asyncio.get_running_loop()
        limit = self._config.request_timeout
        if limit is not None:
            yield loop.call_later(limit, self.interrupt, ApiError(
                408, f"the request took longer than {limit:g} s", code="request_timeout"
            ))  # fmt: skip
        patience = self._config.max_waiting_time
        if patience >= 0:
            yield loop.call_later(patience, self._end_waiting, ApiError(
                503, f"no capacity within {patience:g} s; try again later",
                code="max_waiting_time", retry_after=1,
            ))  # fmt: skip

    def _end_waiting(self, reason: ApiError) -> None:
        if self._waiting == len(self._requests):
            self.interrupt(reason)
