"""The page in a real browser, over the fake engine: what it shows, and what it must never do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import browser
import httpx
import pytest
from live_fake import CHAT, HTTP, post, running, wait_for_none_running

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "a browser is there"),
]

HOSTILE = (
    '<img src="http://127.0.0.1:9/x" onerror="window.hacked=1"> <script>window.hacked=1</script>\n\n'
    "[a](javascript:window.hacked=1) ![b](http://127.0.0.1:9/y) [c](https://example.org/?q=%22onclick)\n\n"
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe> &lt;b&gt;\n\n"
    '```html"><script>window.hacked=1</script>\n</code></pre><script>window.hacked=1</script>\n```\n'
    "| <b onclick=x> | b |\n|---|---|\n| </td><script>window.hacked=1</script> | 2 |"
)
MARKDOWN = (
    "# Title\nOne *two* **three `four`**, snake_case_name and 2 * 3 * 4.\n\n"
    "1. first\n2. second\n   - inner **bold**\n   - `code`\n\n> quoted\n\n"
    "```python\nif a < b:\n    print('*not em*')\n```\n\n"
    "| a | b |\n|---|---|\n| 1 | ä🙂 |\n\n---\nend https://example.org/a_b_c."
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.launched() as launched:
        yield launched


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running() as (url, _):
        yield url


@pytest.fixture
def open_page(chromium: Any, url: str) -> Iterator[Any]:
    """Opens the page; afterwards nothing has been complained of, and nothing loaded from elsewhere."""
    contexts: list[Any] = []
    complaints: list[str] = []
    asked: list[str] = []

    def opened(width: int = 1280, height: int = 800, url: str = url, **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(90_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        browser.wait_until(page, "document.querySelector('#model').textContent")
        return page

    opened.complaints = complaints  # type: ignore[attr-defined]
    yield opened
    for context in contexts:
        context.close()
    assert not [text for text in complaints if "401" not in text and "400" not in text]
    assert all(address.startswith(("http://127.0.0.1", "data:")) for address in asked)
    assert not [address for address in asked if ":9/" in address]


def test_a_chat_streams_its_answer_with_sources_and_figures(open_page: Any, url: str) -> None:
    page = open_page()
    assert page.text_content("#model") == "smollm2-135m"
    answer = browser.ask(page, "say: to be or not to be")
    assert answer.locator(".prose").inner_text() == "to be or not to be"
    drafted = answer.locator(".token.ngram")
    assert drafted.count() > 5 and drafted.first.get_attribute("title") == "n-gram"
    figures = answer.locator("footer").inner_text()
    assert "tok/s" in figures and "n-gram" in figures and "accepted" in figures and "seed" in figures
    shares = answer.locator(".shares").get_attribute("aria-label")
    assert shares and shares.startswith("19 tokens: ") and "n-gram" in shares  # the last ends the sequence
    assert page.text_content("#status").startswith("Answer finished")
    second = browser.ask(page, "what did I say? say: nothing")
    assert second.locator(".prose").inner_text() == "nothing"
    assert page.locator(".question").count() == 2
    page.click("#new-chat")
    assert page.locator(".question").count() == 0 and page.is_visible("#welcome")
    page.locator("#examples button").first.click()
    page.locator(".answer .numbers").wait_for()


def test_markdown_is_shown(open_page: Any) -> None:
    answer = browser.ask(open_page(), f"say: {MARKDOWN}").locator(".prose")
    assert answer.locator("h3").inner_text() == "Title"
    assert answer.locator("p > em").all_inner_texts() == ["two"]
    assert answer.locator("strong").first.inner_text() == "three four"
    assert "snake_case_name and 2 * 3 * 4." in answer.inner_text()
    assert answer.locator("ol > li").count() == 2 and answer.locator("ol > li > ul > li").count() == 2
    assert answer.locator("blockquote").inner_text() == "quoted"
    assert answer.locator("pre code").inner_text() == "if a < b:\n    print('*not em*')"
    assert answer.locator(".code figcaption span").inner_text() == "python"
    assert answer.locator("td").all_inner_texts() == ["1", "ä🙂"]
    assert answer.locator("hr").count() == 1
    assert answer.locator("a").get_attribute("href") == "https://example.org/a_b_c"


def test_what_a_model_writes_is_text_and_nothing_else(open_page: Any, url: str) -> None:
    page = open_page()
    answer = browser.ask(page, f"say: {HOSTILE}")
    assert page.evaluate("window.hacked") is None
    prose = answer.locator(".prose")
    assert prose.locator("img, script, iframe, [onclick], [onerror], [srcdoc], b").count() == 0
    text = prose.inner_text()
    assert "<script>window.hacked=1</script>" in text and "&lt;b&gt;" in text and "<b onclick=x>" in text
    links = prose.locator("a").all()
    assert [link.get_attribute("href") for link in links] == [
        "http://127.0.0.1:9/x", "http://127.0.0.1:9/y", "https://example.org/?q=%22onclick"
    ]  # fmt: skip
    assert all("noopener" in (link.get_attribute("rel") or "") for link in links)
    policy = HTTP.get(url).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_thoughts_are_apart_from_the_answer_and_coloured_too(open_page: Any) -> None:
    with running("reasoning_parser=think") as (url, _):
        answer = browser.ask(open_page(url=url), "say: <think>I must say *yes*.</think>yes")
        assert answer.locator(".thinking .prose").inner_text() == "I must say yes."
        assert answer.locator(".thinking .token").count() > 3
        assert answer.locator(":scope > .prose").inner_text() == "yes"


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_race_shows_whether_the_texts_are_equal(open_page: Any, is_broken: bool) -> None:
    page = open_page()
    page.locator(".switch").click()
    answer = browser.ask(page, "lossy" if is_broken else "tell me")
    verdict = answer.locator(".verdict").inner_text()
    off, on = (lane.inner_text() for lane in answer.locator(".lane .prose").all())
    if is_broken:
        assert verdict.startswith("The texts differ from token 1 on.") and off != on
        return
    assert verdict.startswith("The texts are equal, all 512 tokens.") and "tok/s" in verdict
    assert off == on and len(on) == 512
    answer.get_by_role("button", name="Replay").click()
    browser.wait_until(page, "document.querySelectorAll('.lane .prose')[1].innerText.length < 512")
    browser.wait_until(page, "document.querySelectorAll('.lane .prose')[1].innerText.length === 512")


def test_live_charts_are_drawn(open_page: Any) -> None:
    page = open_page()
    browser.ask(page, "tell me")
    page.locator("#speed path.line").wait_for(state="attached")
    page.locator("#profit path.line").wait_for(state="attached")
    assert page.locator("#profit figcaption").get_attribute("data-value") == "1.50 ×"
    assert page.locator("#sources").get_attribute("aria-label").endswith("n-gram 4 of 10")
    assert page.locator("#positions circle.ngram").count() == 2
    assert page.locator("#decisions rect").count() == 2
    assert page.locator("#guesses circle.ngram").count() == 2
    assert "running" in page.inner_text("#figures")
    page.click("#live-button")
    assert not page.is_visible("#live")
    page.reload()
    assert not page.is_visible("#live") and page.get_attribute("#live-button", "aria-expanded") == "false"


def test_dark_follows_the_system_and_can_be_chosen(open_page: Any) -> None:
    def is_dark(page: Any) -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(",")) < 200

    assert is_dark(open_page(color_scheme="dark"))
    page = open_page(color_scheme="light")
    assert not is_dark(page)
    page.click("#settings-button")
    page.select_option("#theme", "dark")
    assert is_dark(page)
    page.reload()
    assert is_dark(page)


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_shows_everything_without_scrolling_sideways(open_page: Any, width: int) -> None:
    page = open_page(width, 700, has_touch=True, is_mobile=True)

    def fits() -> bool:
        return page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    assert fits() and not page.is_visible("#live")
    page.locator(".switch").tap()
    browser.ask(page, f"say: {MARKDOWN} {'x' * 300}")
    assert fits()
    lanes = [lane.bounding_box() for lane in page.locator(".lane").all()]
    assert lanes[1]["y"] > lanes[0]["y"] and lanes[0]["width"] <= width
    page.tap("#live-button")
    page.locator("#sources .bar").wait_for()
    assert fits() and page.locator("#live").bounding_box()["width"] == width
    page.keyboard.press("Escape")
    assert not page.is_visible("#live")


def test_everything_can_be_done_from_the_keyboard(open_page: Any, url: str) -> None:
    page = open_page()
    focused = "document.activeElement.id"
    assert page.evaluate(focused) == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two slow")
    assert page.input_value("#prompt") == "one\ntwo slow"
    page.keyboard.press("Enter")
    browser.wait_until(page, "document.querySelector('.prose')?.innerText.length > 2")
    page.keyboard.press("Escape")
    page.locator(".numbers").wait_for()
    assert "stopped" in page.inner_text(".numbers")
    wait_for_none_running(url)
    assert page.evaluate(focused) == "prompt"
    page.keyboard.type("go on, say: yes")
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "race"
    page.keyboard.press("Space")
    assert page.is_checked("#race")
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "send"
    page.keyboard.press("Enter")
    page.locator(".answer").nth(1).locator(".numbers").wait_for()
    for control in page.locator("button:visible, textarea:visible, input:visible").all():
        assert control.evaluate("e => e.ariaLabel || e.innerText || e.labels?.[0]?.innerText"), "has a name"


def test_settings_reach_the_request_and_are_kept(open_page: Any) -> None:
    page = open_page()
    page.click("#settings-button")
    page.fill("#system", "Be brief.")
    page.fill("#max_tokens", "5")
    page.fill("#seed", "7")
    page.fill("#temperature", "9")  # out of range: stays what it was
    page.press("#temperature", "Tab")
    page.uncheck("#colours")
    page.get_by_role("button", name="Done").click()
    page.reload()
    browser.wait_until(page, "document.querySelector('#model').textContent")
    with page.expect_request("**" + CHAT) as sent:
        answer = browser.ask(page, "hello")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["max_tokens"], body["seed"], body["temperature"]) == (5, 7, 0.7)
    assert "cut at max tokens" in answer.inner_text() and "seed 7" in answer.inner_text()
    background = answer.locator(".token").first.evaluate("e => getComputedStyle(e).backgroundColor")
    assert background == "rgba(0, 0, 0, 0)"


def test_errors_are_shown_in_words(open_page: Any, url: str) -> None:
    page = open_page()
    answer = browser.ask(page, "x" * 3000)
    error = post(url, CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}).json()["error"]
    assert answer.get_by_role("alert").inner_text() == error["message"]
    assert browser.ask(page, "say: all right").locator(".prose").inner_text() == "all right"


def test_a_server_with_keys_asks_for_one(chromium: Any, open_page: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "secret")
    with running() as (url, _):
        page = open_page(url=url)
        page.locator("#api_key").wait_for()
        page.keyboard.type("wrong")
        page.keyboard.press("Tab")
        browser.wait_until(page, "document.querySelector('#model').textContent === 'needs a key'")
        page.fill("#api_key", "secret")
        page.get_by_role("button", name="Done").click()
        browser.wait_until(page, "document.querySelector('#model').textContent === 'smollm2-135m'")
        assert browser.ask(page, "say: let in").locator(".prose").inner_text() == "let in"
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_only_the_pages_own_files_are_served(url: str) -> None:
    for path in (
        "/ui/",
        "/ui/nothing.js",
        "/ui/../app.py",
        "/ui/%2e%2e/app.py",
        "/ui/..%2fapp.py",
        "//etc/passwd",
    ):
        assert HTTP.get(url + path).status_code == 404, path
    first = HTTP.get(url + "/ui/app.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = HTTP.get(url + "/ui/app.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert httpx.head(url).status_code == 200
