"""A server from its command to its exit code.

`outrider serve`, `python -m outrider.entrypoints.api_server` and this file as a script take the same flags.
Order matters for the time to the first token: the port is claimed first (a port in use is told before
a model is loaded), the engine process starts next, and the web framework and the tokenizer are loaded
while the engine loads the model. SIGTERM drains; a second signal stops at once; a dead engine fails its
requests, turns health to 503 and ends this process with a non-zero code.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__" and not __package__:  # as a script: its own folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import asyncio
import contextlib
import errno
import hashlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from outrider import __version__, logs
from outrider.config import ConfigError, Configuration, EngineConfig, ServerConfig, read_chat_template

if TYPE_CHECKING:
    import uvicorn

    from outrider.entrypoints.app import ServerState
    from outrider.entrypoints.journal import Journal
    from outrider.entrypoints.prepare import Tokenizer

logger = logging.getLogger(__name__)

# How long a server without an engine still answers (503), so that clients and probes see why.
LINGER_S = 2.0

# On every answer: browsers guess no types, tell no addresses and let no other site embed it.
HEADERS = [
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("x-frame-options", "DENY"),
]


def main(arguments: Sequence[str]) -> int:
    """`outrider serve`."""
    from outrider.entrypoints.arguments import Parser, add_config_flags, configuration_from

    parser = Parser(prog="outrider serve", usage="outrider serve [MODEL] [flags]")
    add_config_flags(parser, EngineConfig, ServerConfig)
    return serve(configuration_from(parser.parse_args(arguments)))


def serve(
    configuration: Configuration,
    make_engine: Callable[..., Any] | None = None,
    load_tokenizer: Callable[[EngineConfig], Tokenizer] | None = None,
) -> int:
    """Serve until told to stop; the exit code says whether that went well.

    `make_engine(config, on_death)` and `load_tokenizer(config)` are the seams that tests replace.
    """
    logs.configure(configuration.server.log_level.upper(), configuration.server.log_format)
    for warning in configuration.warnings:
        logger.warning(warning)
    logger.info("Outrider %s, configuration:\n%s", __version__, configuration.describe())
    sock = bind(configuration.server.host, configuration.server.port)
    life = _Life(configuration, sock, make_engine or _real_engine, load_tokenizer or _real_tokenizer)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(life.run())
    return uvloop.run(life.run())


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or a sentence that says why there is none."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except socket.gaierror:
        raise ConfigError(f"the host {host!r} is not known; change --host") from None
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: f"port {port} on {host} is in use; stop what uses it or choose another --port",
            errno.EACCES: f"port {port} on {host} may not be used by this user; choose a --port above 1023",
            errno.EADDRNOTAVAIL: f"{host} is no address of this machine; change --host",
        }
        message = reasons.get(error.errno or 0, f"cannot listen on {host}:{port}: {error.strerror}")
        raise ConfigError(message) from None
    return sock


class _Life:
    """One run of the server."""

    def __init__(
        self, configuration: Configuration, sock: socket.socket, make_engine: Any, load: Any
    ) -> None:
        self.configuration = configuration
        self.sock = sock
        self._make_engine = make_engine
        self._load_tokenizer = load
        self._began = time.monotonic()
        self._signals = 0
        self._asked_to_stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._dead = asyncio.Event()
        self._state: ServerState | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        engine = self._make_engine(self.configuration.engine, self._on_death)
        starting = asyncio.ensure_future(engine.start())
        await asyncio.sleep(0)  # the engine process starts before the imports below
        try:
            async with self._http() as state:
                self._state = state
                await self._until(asyncio.ensure_future(self._load(state, engine, starting)))
                await self._until(asyncio.ensure_future(self._asked_to_stop.wait()))
                return await self._wind_down(state)
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await engine.shutdown()

    async def _until(self, work: asyncio.Future[Any]) -> None:
        """Wait for `work`, for a signal or for the engine's death; raises what `work` raises."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._asked_to_stop, self._dead)]
        await asyncio.wait([work, *waits], return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if work.done():
            work.result()
        else:
            work.cancel()

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[ServerState]:
        """HTTP from here to the end of the block; without an engine it answers 503."""
        # In a thread, so that this loop goes on talking to the engine process.
        state, server = await asyncio.to_thread(_make_server, self.configuration)
        serving = asyncio.ensure_future(server.serve(sockets=[self.sock]))
        try:
            yield state
        finally:
            server.should_exit = True
            await serving
            if state.gate.journal.tracer is not None:
                await asyncio.to_thread(state.gate.journal.tracer.shutdown)

    async def _load(self, state: ServerState, engine: Any, starting: asyncio.Future[Any]) -> None:
        """Bring tokenizer and engine together, then open for requests."""
        from outrider.entrypoints.prepare import Limits, Preparer

        tokenizer = await asyncio.to_thread(self._load_tokenizer, self.configuration.engine)
        info = await starting
        engine_config, server = self.configuration.engine, self.configuration.server
        limits = Limits(
            engine_config.model_name, info.max_model_len, info.vocab_size, server.max_n, server.max_logprobs
        )
        state.preparer = Preparer(
            tokenizer, limits, engine_config.seed,
            tool_call_parser=server.tool_call_parser, reasoning_parser=server.reasoning_parser,
        )  # fmt: skip
        state.engine = engine
        host, port = self.sock.getsockname()[:2]
        logger.info(
            "ready after %.2f s: http://%s:%d (API under /v1, OpenAPI at /docs), model %s, context %d",
            time.monotonic() - self._began, f"[{host}]" if ":" in host else host, port,
            limits.model_name, limits.max_model_len,
        )  # fmt: skip

    async def _wind_down(self, state: ServerState) -> int:
        """End the requests that run: by themselves when asked to stop, with errors when the engine died."""
        from outrider.entrypoints.errors import ApiError

        gate = state.gate
        if self._dead.is_set():
            # Requests have heard of it from the engine client; clients and probes get time to see why.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._asked_to_stop.wait(), LINGER_S)
            return 1
        gate.is_draining = True
        limit = self.configuration.server.shutdown_timeout
        logger.info("stopping: no new requests; %d running may take %g s more", len(gate.generations), limit)
        waits = [
            asyncio.ensure_future(w)
            for w in (gate.wait_idle(limit), self._stop_now.wait(), self._dead.wait())
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        for generation in list(gate.generations.values()):
            generation.interrupt(ApiError(503, "the server has been stopped", code="stopped"))
        await gate.wait_idle(1)
        return 1 if self._dead.is_set() else 0

    def _on_signal(self) -> None:
        self._signals += 1
        self._asked_to_stop.set()
        if self._signals > 1:
            self._stop_now.set()

    def _on_death(self, reason: str) -> None:
        logger.error("the engine has stopped: %s", reason)
        if self._state is not None:
            self._state.failure = reason
        self._dead.set()


def _make_server(configuration: Configuration) -> tuple[ServerState, uvicorn.Server]:
    """The application and the HTTP server over it, which leaves signals to us."""
    import uvicorn

    from outrider.entrypoints.app import ServerState, create_app
    from outrider.entrypoints.generation import Gate
    from outrider.entrypoints.http_protocol import HttpProtocol

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            yield

    gate = Gate(configuration.server, configuration.engine.max_num_seqs, _journal(configuration.server))
    state = ServerState(configuration, gate, fingerprint=_fingerprint(configuration))
    config = uvicorn.Config(
        create_app(state), http=HttpProtocol, ws="none", lifespan="off",
        log_config=None, log_level="warning", access_log=False,
        server_header=False, timeout_keep_alive=60, timeout_graceful_shutdown=5, headers=HEADERS,
    )  # fmt: skip
    return state, Server(config)


def _journal(config: ServerConfig) -> Journal:
    from outrider.entrypoints import journal

    if not config.log_requests:
        journal.logger.setLevel(logging.WARNING)
    tracer = None
    if config.otlp_traces_endpoint is not None:
        from outrider.entrypoints.tracing import make_tracer

        tracer = make_tracer(config.otlp_traces_endpoint)
    return journal.Journal(tracer)


def _fingerprint(configuration: Configuration) -> str:
    """Names the build and the settings that could change what a seed gives: model and number types."""
    engine = configuration.engine
    settings = (
        __version__,
        engine.model,
        engine.revision,
        engine.dtype,
        engine.kv_cache_dtype,
        engine.quantization,
    )
    return "outrider-" + hashlib.sha256(repr(settings).encode()).hexdigest()[:12]


def _real_engine(config: EngineConfig, on_death: Callable[[str], None]) -> Any:
    from outrider.engine.client import EngineClient

    return EngineClient(config, on_death=on_death)


def _real_tokenizer(config: EngineConfig) -> Tokenizer:
    from outrider.models.loader import load_tokenizer

    tokenizer = load_tokenizer(
        config.tokenizer or config.model, revision=config.revision, load_format=config.load_format
    )
    if config.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    return tokenizer


if __name__ == "__main__":
    from outrider.entrypoints.cli import run

    sys.exit(run(main, sys.argv[1:]))
