"""A real Chromium for tests of the page and for the screenshots of the documents."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def missing() -> str:
    """Why there is no browser to test with; empty when there is one."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install playwright"
    if chromium() is None:
        return "there is no Chromium: apt-get install chromium, or set OUTRIDER_CHROMIUM to its path"
    return ""


def chromium() -> str | None:
    named = os.environ.get("OUTRIDER_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """The browser. While it runs, its thread has an event loop: asyncio.run does not work there."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers have neither the namespaces that the sandbox needs nor a large /dev/shm.
        browser = playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


def wait_until(page: Any, expression: str, timeout_s: float = 60) -> None:
    """Until the expression is true. Playwright waits with `eval`, which the page forbids."""
    end = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not true within {timeout_s} s: {expression}"
        page.wait_for_timeout(50)


def ask(page: Any, text: str, timeout_s: float = 120) -> Any:
    """Type `text`, send it with Enter, wait for the end; the new answer's element."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    answer = page.locator(".answer").last
    answer.locator(".numbers, .error").last.wait_for(timeout=timeout_s * 1000)
    page.locator("#stop").wait_for(state="hidden", timeout=timeout_s * 1000)
    return answer
