"""The HTTP application: routes, keys, errors; HTTP and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import Headers

from outrider import __version__
from outrider.config import Configuration
from outrider.entrypoints.errors import ApiError, bad_request
from outrider.entrypoints.generation import ClientGoneError, Engine, Gate, Generation
from outrider.entrypoints.http_edge import add_edge, json_response, read_body
from outrider.entrypoints.journal import Record
from outrider.entrypoints.metrics import CONTENT_TYPE, render
from outrider.entrypoints.openapi import describe
from outrider.entrypoints.page import add_page_routes
from outrider.entrypoints.prepare import Prepared, Preparer
from outrider.entrypoints.protocol import (
    AbortRequest,
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from outrider.entrypoints.responses import Answer, Wanted, wanted_of
from outrider.entrypoints.speculation_view import speculation_view

logger = logging.getLogger(__name__)

MAX_CLIENT_ID = 128  # characters of an X-Request-Id that the log repeats


@dataclass
class ServerState:
    """What the routes share. `engine` and `preparer` are there from `ready` on."""

    configuration: Configuration
    gate: Gate
    engine: Engine | None = None
    preparer: Preparer | None = None
    fingerprint: str = ""
    failure: str | None = None  # why the engine is gone
    started: float = field(default_factory=time.time)

    def check_ready(self) -> None:
        """503 unless requests can be served now."""
        if self.failure is not None:
            raise ApiError(503, f"the engine has stopped: {self.failure}", code="engine_dead")
        if self.gate.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=5)
        if self.engine is None or self.preparer is None:
            raise ApiError(503, "the model is still loading", code="loading", retry_after=1)

    def parts(self) -> tuple[Engine, Preparer]:
        """Engine and preparer, or 503."""
        self.check_ready()
        assert self.engine is not None and self.preparer is not None
        return self.engine, self.preparer


def create_app(state: ServerState) -> FastAPI:
    """The application over `state`; it serves from the start and answers 503 until the engine is there."""
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None)
    has_keys = bool(state.configuration.server.api_key)
    app.openapi = describe(app, has_keys=has_keys)  # type: ignore[method-assign]
    add_edge(app, state.configuration.server.api_key, state.gate.count_failure)
    _add_generation_routes(app, state)
    _add_token_routes(app, state)
    _add_state_routes(app, state)
    add_page_routes(app)
    return app


def _add_generation_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await _parsed(state, request, ChatCompletionRequest)
        prepared = await state.parts()[1].chat(body)
        return await _generate(state, request, body, prepared, _wanted(request, body))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue one or several texts."""
        body = await _parsed(state, request, CompletionRequest)
        prepared = await state.parts()[1].completion(body)
        return await _generate(state, request, body, prepared, _wanted(request, body))

    @app.post("/v1/abort_requests")
    async def abort_requests(request: Request) -> Response:
        """Cancel requests of the same key by the ids of their answers, or all; what was made is answered."""
        body = await _parsed(state, request, AbortRequest)
        if bool(body.abort_all) == (body.request_ids is not None):
            raise bad_request("give either request_ids or abort_all: true", "request_ids")
        owner = _owner(state, request)
        running = {name: g for name, g in state.gate.generations.items() if g.owner == owner}
        ids = [name for name in (running if body.abort_all else body.request_ids or []) if name in running]
        for request_id in ids:
            running[request_id].abort()
        return json_response({"aborted": ids})


def _add_token_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        body = await _parsed(state, request, TokenizeRequest)
        preparer = state.parts()[1]
        ids = await preparer.tokens(body)
        content: dict[str, Any] = {
            "tokens": ids, "count": len(ids), "max_model_len": preparer.limits.max_model_len
        }  # fmt: skip
        if body.return_token_strs:
            content["token_strs"] = [preparer.token_bytes[i].decode("utf-8", "replace") for i in ids]
        return json_response(content)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await _parsed(state, request, DetokenizeRequest)
        preparer = state.parts()[1]
        preparer.check_model(body.model)
        preparer.check_ids(body.tokens, "tokens")
        return json_response({"prompt": preparer.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_state_routes(app: FastAPI, state: ServerState) -> None:
    config = state.configuration

    def model_card() -> dict[str, Any]:
        limits = state.parts()[1].limits
        return {
            "id": limits.model_name, "object": "model", "created": int(state.started), "owned_by": "outrider",
            "root": config.engine.model, "max_model_len": limits.max_model_len,
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> Response:
        """The models served: one."""
        return json_response({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The model of that name."""
        state.parts()[1].check_model(name)
        return json_response(model_card())

    @app.get("/v1/speculation")
    async def speculation() -> Response:
        """What speculation does now: sources, acceptance, the controller's decisions."""
        stats = await state.parts()[0].stats()
        return json_response(speculation_view(stats))

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        alive = state.engine is not None and state.failure is None
        stats = await state.engine.stats() if alive and state.engine is not None else {}
        return Response(render(stats, state.gate.failures), media_type=CONTENT_TYPE)

    @app.get("/health")
    async def health() -> Response:
        """200 when requests can be served, else 503."""
        state.check_ready()
        return json_response({"status": "ready"})

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        """200 while this process lives."""
        return json_response({"status": "alive"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})


def _wanted(request: Request, body: GenerationRequest) -> Wanted:
    """What the fields and the X-Outrider-* headers of a request ask for."""
    header = request.headers.get("x-outrider-speculation", "").lower()
    if header not in ("", "0", "1", "detailed"):
        raise bad_request(f"header X-Outrider-Speculation must be 0, 1 or detailed, got {header!r}")
    wanted = wanted_of(body)
    return dataclasses.replace(
        wanted,
        speculation=wanted.speculation or header in ("1", "detailed"),
        sources=wanted.sources or header == "detailed",
        received=request.state.received if request.headers.get("x-outrider-timing") == "1" else None,
    )


async def _generate(
    state: ServerState, request: Request, body: GenerationRequest, prepared: Prepared, wanted: Wanted
) -> Response:
    engine, preparer = state.parts()
    request_id = ("chatcmpl-" if wanted.chat else "cmpl-") + uuid.uuid4().hex
    generation = Generation(
        engine, state.gate, state.configuration.server, prepared, request_id,
        owner=_owner(state, request), priority=body.priority or 0, cache_salt=body.cache_salt or "",
    )  # fmt: skip
    _note_origin(generation.record, request.headers)
    answer = Answer(
        request_id, prepared.model, state.fingerprint, prepared.seed, prepared.prompts, prepared.n, wanted,
        preparer.token_bytes, prepared.texts, prepared.parsing,
    )  # fmt: skip
    if body.stream:
        return EventStream(generation, answer, request_id)
    content = await generation.collect(answer, request.receive)
    return Response(content, media_type="application/json", headers={"x-request-id": request_id})


def _note_origin(record: Record, headers: Headers) -> None:
    """What the client calls this request, and the trace that it is part of."""
    name = headers.get("x-request-id", "")
    record.client_request_id = name if name.isprintable() and len(name) <= MAX_CLIENT_ID else ""
    record.trace = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}


def _owner(state: ServerState, request: Request) -> str:
    """Names the key that a request came with; empty when there are no keys."""
    if not state.configuration.server.api_key:
        return ""
    return hashlib.sha256(request.headers.get("authorization", "").encode()).hexdigest()[:16]


class EventStream(Response):
    """An answer sent as server-sent events. The status line waits for the first event."""

    def __init__(self, generation: Generation, answer: Answer, request_id: str) -> None:
        self._generation = generation
        self._answer = answer
        self._stream_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", request_id.encode()),
        ]
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        started = False

        async def emit(event: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers})
            await send({"type": "http.response.body", "body": event, "more_body": True})

        try:
            await self._generation.stream(self._answer, receive, emit)
        except ClientGoneError:
            return  # nobody is left to be told
        await send({"type": "http.response.body", "body": b""})


async def _parsed(state: ServerState, request: Request, model: type[Body]) -> Body:
    request.state.received = time.perf_counter()
    state.check_ready()
    return parse(model, await read_body(request, state.configuration.server.max_body_bytes))
