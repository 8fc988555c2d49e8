"""Public complaints about other engines: each row of docs/complaints.md has a test, or a reason for none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import TEXT
from live_fake import CHAT, HELLO, HTTP, post, running

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "complaints.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| complaint")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_complaint_has_a_test_that_exists_or_a_reason(row: str) -> None:
    _, complaint, what, here, _ = row.split("|")
    assert complaint.strip() and what.strip()
    named = re.findall(r"`tests/(\w+\.py)::(\w+)`", here)
    assert named or here.strip().startswith("Not applicable: ")
    for name, function in named:
        assert re.search(rf"^(async )?def {function}\(", (ROOT / "tests" / name).read_text(), re.M)


def test_there_are_at_least_forty() -> None:
    numbers = re.findall(r"#\d+", " ".join(row.split("|")[1] for row in ROWS))
    assert len(ROWS) >= 40 and len(set(numbers)) >= 40


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running() as (address, _):
        yield address


def test_ids_logprobs_and_usage_end_where_the_text_ends(url: str) -> None:
    """The stop string ends inside of what one step brought."""
    for stop in ("fox", "brown ", "k b", "e"):
        body: dict[str, Any] = {
            "messages": HELLO, "temperature": 0, "stop": [stop], "logprobs": True, "return_token_ids": True,
            "include_stop_str_in_output": True,
        }  # fmt: skip
        answer = post(url, CHAT, body).json()
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        assert text.endswith(stop) and text.count(stop) == 1
        assert bytes(choice["token_ids"]).decode() == text == TEXT[: len(text)].decode()
        assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == len(text)
        events = HTTP.post(url + CHAT, json=body | {"stream": True}).text.split("\n\n")
        chunks = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
        assert [i for chunk in chunks for i in chunk["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize("max_tokens", [3, 12, 40, 100])
def test_reasoning_tokens_are_part_of_the_completion_tokens(url: str, max_tokens: int) -> None:
    said = "say: <think>Hm, hm, hm.</think>Yes, it is."
    answer = post(
        url, CHAT, {"messages": [{"role": "user", "content": said}], "max_tokens": max_tokens}
    ).json()
    usage, message = answer["usage"], answer["choices"][0]["message"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 <= reasoning <= usage["completion_tokens"] <= max_tokens
    assert reasoning == min(max_tokens, len("<think>Hm, hm, hm.</think>")) or max_tokens < len("<think>")
    assert "think" not in (message["content"] or "") or max_tokens < len("<think>")
