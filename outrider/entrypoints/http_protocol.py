"""The HTTP protocol below the application: bytes that are no HTTP, and clients that are too slow.

A connection that sends no request, a head that trickles in and a reader that does not read hold memory and
places that others need, so each is given up after a while. Bodies are timed where they are read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.entrypoints.errors import ApiError

HEAD_TIMEOUT_S = 20.0  # from the connection, or a request's first byte, to the end of its head
WRITE_TIMEOUT_S = 60.0  # that a client may leave a full buffer full
MAX_HEAD_BYTES = 64 * 1024


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the common error body where it would answer in plain text, and with limits."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None  # while a head is awaited
        self._write_timer: asyncio.TimerHandle | None = None  # while the client does not read
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_pause()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                ApiError(431, f"the head is larger than {MAX_HEAD_BYTES} bytes", code="head_too_large")
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:  # a further request on this connection
            self._await_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_pause()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_pause()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, f"this is not HTTP/1.1: {msg}", code="invalid_http"))

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_slow_head)

    def _on_slow_head(self) -> None:
        if self._head_bytes:
            self._refuse(ApiError(408, f"no request came within {HEAD_TIMEOUT_S:g} s", code="head_timeout"))
        else:
            self.transport.close()

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_pause(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer and close, outside of any request."""
        self._end_head()
        if self.transport.is_closing():
            return
        body = error.encode()
        head = (
            f"HTTP/1.1 {error.status} {error.code}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
