"""The HTTP protocol below the application, where bytes are not HTTP at all."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.entrypoints.errors import ApiError


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the common error body where it would answer in plain text."""

    def send_400_response(self, msg: str) -> None:
        body = ApiError(400, f"this is not HTTP/1.1: {msg}", code="invalid_http").encode()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
