"""The built-in page and the API's description: a fixed set of files, read once.

No path of a request reaches the file system: what is not in the set is not found. The browser is told to
load nothing from elsewhere and to run no script but these files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

UI = Path(__file__).parent / "ui"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGES = {"/": "index.html", "/docs": "docs.html"}
ASSETS = sorted(path.name for path in UI.iterdir() if path.suffix in TYPES and path.suffix != ".html")
PATHS = frozenset(PAGES) | {f"/ui/{name}" for name in ASSETS}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_page_routes(app: FastAPI) -> None:
    """Serve the page, its parts and the description of the API."""
    for path, name in {**PAGES, **{f"/ui/{name}": name for name in ASSETS}}.items():
        app.add_api_route(path, _serve(UI / name), methods=["GET", "HEAD"], include_in_schema=False)


def _serve(path: Path) -> Callable[[Request], Awaitable[Response]]:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache", "etag": tag}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=TYPES[path.suffix])

    return serve
