"""Renew the pictures of the page in docs/images: `python tools/screenshots.py [URL]`.

Without a URL it starts a server with the built-in model. It needs Chromium and Playwright, as the tests
of the page do; fonts are this machine's (Inter, where it is installed).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 200_000

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import browser  # noqa: E402
import conftest  # noqa: E402

CODE = "Write a Python function that reads a CSV file into dictionaries. Then show two examples."
LIST = (
    "Rewrite this list as a markdown table with the columns City and Country: Paris (France), Rome (Italy), "
    "Madrid (Spain), Lisbon (Portugal), Vienna (Austria), Athens (Greece), Oslo (Norway)."
)


def main(arguments: list[str]) -> int:
    with contextlib.ExitStack() as stack:
        url = arguments[0] if arguments else stack.enter_context(served())
        chromium = stack.enter_context(browser.launched())
        IMAGES.mkdir(exist_ok=True)
        chat(chromium, url)
        race(chromium, url)
        dark(chromium, url)
        phone(chromium, url)
    for path in sorted(IMAGES.glob("page-*.png")):
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}: {size // 1000} KB")
        assert size < MOST_BYTES, f"{path.name} is too large"
    return 0


@contextlib.contextmanager
def served() -> Iterator[str]:
    """A server with the built-in model."""
    import subprocess

    port = conftest.free_port()
    command = [
        sys.executable,
        "-m",
        "outrider.entrypoints.api_server",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            conftest.wait_until_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def opened(chromium: Any, url: str, width: int, height: int, **options: Any) -> Any:
    """The page, greedy so that a picture can be taken again."""
    context = chromium.new_context(viewport={"width": width, "height": height}, **options)
    context.add_init_script(
        "localStorage.setItem('outrider.settings', '{\"temperature\": 0, \"max_tokens\": 400}')"
    )
    page = context.new_page()
    page.goto(url)
    page.locator("#model:not(:empty)").wait_for()
    return page


def save(page: Any, name: str, part: str | None = None) -> None:
    page.wait_for_timeout(1500)  # the charts' next reading
    page.locator("body").evaluate("() => document.activeElement.blur()")
    path = IMAGES / f"page-{name}.png"
    (page.locator(part) if part else page).screenshot(path=path)


def chat(chromium: Any, url: str) -> None:
    page = opened(chromium, url, 1280, 860)
    browser.ask(page, CODE)
    save(page, "chat")
    for text in (LIST, "Count from one to thirty in words.", "Now count backwards."):
        browser.ask(page, text)
    page.set_viewport_size({"width": 1280, "height": 1170})
    save(page, "charts", "#live")


def race(chromium: Any, url: str) -> None:
    page = opened(chromium, url, 1280, 860)
    page.locator(".switch").click()
    browser.ask(page, LIST)
    page.locator("#log").evaluate("log => log.scrollTo(0, 0)")
    save(page, "race")


def dark(chromium: Any, url: str) -> None:
    page = opened(chromium, url, 1280, 860, color_scheme="dark")
    browser.ask(page, "Write a JSON object with five cities, their countries and populations.")
    save(page, "dark")


def phone(chromium: Any, url: str) -> None:
    page = opened(chromium, url, 390, 780, is_mobile=True, has_touch=True, device_scale_factor=1.5)
    browser.ask(page, "Why is the sky blue? Answer in three short points.")
    save(page, "phone")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
