"""A stand-in for an OpenAI-compatible server: counted events, no model, nothing but the standard library.

`python fake_openai_server.py PORT [HEALTH_FAILURES]` serves until it is told to end. In a test,
`FakeServer()` runs one in a thread and keeps the requests it got. The last message's text steers it:
`http500`, `cut` (the stream ends early), `error` (an error event), anything else is answered with
`NUM_TOKENS` numbered words, each a chunk of its own.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NUM_TOKENS = 5
PROMPT_TOKENS = 7
CACHED_TOKENS = 3
SPECULATION = {
    "steps": 3,
    "draft_tokens": 4,
    "accepted_tokens": 2,
    "per_position": [{"draft_tokens": 3, "accepted_tokens": 2}, {"draft_tokens": 1, "accepted_tokens": 0}],
}


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        if self.path == "/health":
            server.health_failures -= 1
            self._answer(503 if server.health_failures >= 0 else 200, "text/plain", b"")
        elif self.path == "/v1/models":
            self._answer(200, "application/json", b'{"data": [{"id": "fake-model"}]}')
        elif self.path == "/metrics":
            self._answer(200, "text/plain", server.metrics().encode())
        else:
            self._answer(404, "text/plain", b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
        is_chat = self.path == "/v1/chat/completions"
        text = body["messages"][-1]["content"] if is_chat else str(body["prompt"])
        if text == "http500":
            self._answer(500, "application/json", b'{"error": {"message": "out of cheese"}}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for chunk in self._chunks(text, is_chat):
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if text != "cut":
            self.wfile.write(b"data: [DONE]\n\n")

    def _chunks(self, text: str, is_chat: bool) -> list[dict[str, Any]]:
        def chunk(piece: str | None, finish_reason: str | None = None, index: int = 0) -> dict[str, Any]:
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
            if is_chat:
                choice["delta"] = (
                    {"role": "assistant", "content": ""} if piece is None else {"content": piece}
                )
            else:
                choice["text"] = piece or ""
            if self.server.server_clock:
                choice["arrival_time"] = float(index)
            return {"choices": [choice]}

        if text == "error":
            return [chunk("a"), {"error": {"message": "engine lost"}}]
        chunks = [chunk(None)] + [chunk(f"w{i} ", index=i + 1) for i in range(NUM_TOKENS)]
        chunks.append(chunk("", "stop", index=NUM_TOKENS + 1))
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": NUM_TOKENS}
        usage["prompt_tokens_details"] = {"cached_tokens": CACHED_TOKENS}
        last: dict[str, Any] = {"choices": [], "usage": usage}
        if self.server.tells_speculation and self.headers.get("X-Outrider-Speculation"):
            last["speculation"] = SPECULATION
        return [*chunks, last]

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class FakeServer(ThreadingHTTPServer):
    """`with FakeServer() as server:` serves at `server.url`."""

    daemon_threads = True

    def __init__(
        self,
        port: int = 0,
        health_failures: int = 0,
        server_clock: bool = False,
        tells_speculation: bool = True,
    ) -> None:
        self.health_failures = health_failures
        self.server_clock = server_clock
        self.tells_speculation = tells_speculation
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def metrics(self) -> str:
        count = len(self.requests)
        return (
            f"outrider:prompt_tokens_total {count * PROMPT_TOKENS}\n"
            f'outrider:spec_decode_num_drafts_total{{source="ngram"}} {count * 2}\n'
            f'outrider:spec_decode_num_draft_tokens_total{{source="ngram"}} {count * 4}\n'
            f'outrider:spec_decode_num_accepted_tokens_total{{source="ngram"}} {count}\n'
            f"outrider:time_to_first_token_seconds_sum {count * 0.25}\n"
            f"outrider:time_to_first_token_seconds_count {count}\n"
        )

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self.server_close()


if __name__ == "__main__":
    FakeServer(int(sys.argv[1]), *map(int, sys.argv[2:])).serve_forever()
