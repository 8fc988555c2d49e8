"""The edge of the HTTP application: keys, bodies, and the one shape of errors."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from outrider.entrypoints import journal, page
from outrider.entrypoints.errors import ApiError
from outrider.entrypoints.generation import ClientGoneError

logger = logging.getLogger(__name__)

# Served to anyone; everything else needs a key when keys are configured.
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/openapi.json"}) | page.PATHS
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")
BODY_TIMEOUT = 60.0  # seconds without a byte of a body that was announced
BODY_TOTAL_TIMEOUT = 300.0  # seconds that a body may take


def add_edge(app: FastAPI, keys: tuple[str, ...], count_failure: Callable[[str], None]) -> None:
    """Make `app` check keys and answer every failure in the common body."""

    async def on_api_error(request: Request, error: Any) -> Response:
        path, code = request.url.path, error.code or str(error.status)
        if path in GENERATION_PATHS:
            count_failure(code)
        # The message may quote what the client sent, so it is not for the log.
        fields = {"method": request.method, "path": path, "status": error.status, "code": code}
        journal.logger.info("%(method)s %(path)s %(status)d %(code)s", fields, extra={"fields": fields})
        return error_response(error)

    app.add_middleware(KeyCheck, keys=keys)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_crash)


async def read_body(request: Request, limit: int) -> bytes:
    """The body; one that is too large is read to its end (within reason) but not kept.

    A client that is cut off while it sends sees a broken connection instead of the error.
    """
    chunks: list[bytes] = []
    size = 0
    declared = request.headers.get("content-length", "0")
    too_large = declared.isdecimal() and int(declared) > limit
    end = time.monotonic() + BODY_TOTAL_TIMEOUT
    while size <= 16 * limit:
        message = await _next_part(request, min(BODY_TIMEOUT, end - time.monotonic()))
        if message["type"] == "http.disconnect":
            raise ClientGoneError()
        size += len(message.get("body", b""))
        too_large = too_large or size > limit
        if not too_large:
            chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    if too_large:
        raise ApiError(
            413, f"the request body is larger than {limit} bytes; send less or raise --max-body-bytes",
            code="body_too_large",
        )  # fmt: skip
    return b"".join(chunks)


async def _next_part(request: Request, timeout: float) -> Any:
    try:
        return await asyncio.wait_for(request.receive(), timeout)
    except asyncio.TimeoutError:
        message = f"the request body took too long: at most {BODY_TIMEOUT:g} s may pass without any of it"
        raise ApiError(408, message, code="body_timeout") from None


class KeyCheck:
    """Refuses what other web sites send, and requests without one of the keys.

    Plain ASGI: it costs a stream nothing.
    """

    def __init__(self, app: Any, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and _is_from_another_site(scope):
            error = ApiError(403, "web pages of other sites may not use this server", code="cross_site")
            await error_response(error)(scope, receive, send)
            return
        if (
            scope["type"] == "http"
            and self._digests
            and scope["path"] not in OPEN_PATHS
            and not self._fits(scope)
        ):
            error = ApiError(
                401,
                "a valid API key is needed: send the header Authorization: Bearer <key>",
                code="invalid_api_key",
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fits(self, scope: Any) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = header.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        # Every key is compared, so that the time tells nothing.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(found)


def _is_from_another_site(scope: Any) -> bool:
    """Whether a browser says so. It would keep the answer from the page, but the work would be done."""
    site = next((value for name, value in scope["headers"] if name == b"sec-fetch-site"), b"")
    return site in (b"cross-site", b"same-site")


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this answer; the log has it under the status that proxies use for it."""
    logger.info("%s %s 499: the client closed the connection", request.method, request.url.path)
    return Response(status_code=499)


async def _on_http_error(request: Request, error: Any) -> Response:
    """Unknown routes and methods, in the common body."""
    method, path = request.method, request.url.path
    if error.status_code == 404:
        return error_response(
            ApiError(404, f"there is no route {method} {path}; see /docs", code="route_not_found")
        )
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path} does not take {method}; use {allowed}"
        response = error_response(ApiError(405, message, code="method_not_allowed"))
        response.headers["allow"] = allowed
        return response
    return error_response(ApiError(error.status_code, str(error.detail)))


async def _on_crash(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))


def error_response(error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error.encode(), error.status, headers, media_type="application/json")


def json_response(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
