"""`outrider run-batch`: every line answered or told why not, once, whatever stopped the command before."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import TEXT, FakeEngine, FakeTokenizer

from outrider.entrypoints.cli import main

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    import outrider.engine.factory as factory

    fake = FakeEngine()
    monkeypatch.setattr(factory, "load", lambda config: SimpleNamespace(tokenizer=FakeTokenizer()))
    monkeypatch.setattr(factory, "build_engine", lambda config, checkpoint: fake)
    return fake


def line(name: str, url: str = TEXTS, **body: Any) -> dict[str, Any]:
    body = {"max_tokens": 9, "temperature": 0} | body
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, records: list[Any]) -> None:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def run(tmp_path: Path, records: list[Any], *flags: str) -> tuple[int, list[dict[str, Any]]]:
    write(tmp_path / "in.jsonl", records)
    code = main(["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), *flags])
    out = tmp_path / "out.jsonl"
    lines = out.read_text().splitlines() if out.exists() else []
    return code, [json.loads(each) for each in lines]


def test_each_line_gets_the_answer_a_server_gives(engine: FakeEngine, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    code, found = run(tmp_path, [
        line("a", prompt="x"),
        line("b", CHAT, messages=[{"role": "user", "content": "say: " + call}], tools=tools, max_tokens=99),
        line("c", prompt=["x", "y"], n=2, seed=1, temperature=1, logprobs=2, return_speculation=True),
    ])  # fmt: skip
    assert code == 0 and [each["error"] for each in found] == [None] * 3
    by_id = {each["custom_id"]: each["response"] for each in found}
    assert all(each["status_code"] == 200 and each["request_id"] for each in by_id.values())
    assert by_id["a"]["body"]["choices"][0]["text"] == TEXT[:9].decode()
    assert by_id["a"]["body"]["usage"]["completion_tokens"] == 9
    choice = by_id["b"]["body"]["choices"][0]
    assert (
        choice["finish_reason"] == "tool_calls"
        and choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    )
    assert len(by_id["c"]["body"]["choices"]) == 4 and by_id["c"]["body"]["speculation"]["steps"] > 0


def test_a_bad_request_is_told_on_its_line_and_stops_nobody(engine: FakeEngine, tmp_path: Path) -> None:
    code, found = run(tmp_path, [
        line("a", prompt="x"), line("b", prompt="x", temperture=1), line("c", "/v1/embeddings", input="x"),
        line("d", prompt="x" * 5000), line("e", prompt="x", stream=True), line("f", prompt="y"),
    ])  # fmt: skip
    status = {each["custom_id"]: each["response"]["status_code"] for each in found}
    assert code == 1 and status == {"a": 200, "b": 400, "c": 404, "d": 400, "e": 400, "f": 200}
    error = next(each for each in found if each["custom_id"] == "b")["response"]["body"]["error"]
    assert error["param"] == "temperture" and "temperature" in error["message"]


def test_it_goes_on_where_it_stopped(engine: FakeEngine, tmp_path: Path) -> None:
    records = [line(str(i), prompt=f"p{i}", temperature=1, seed=i) for i in range(20)]
    code, whole = run(tmp_path, records)
    assert code == 0 and len(whole) == 20
    out = tmp_path / "out.jsonl"
    kept = out.read_bytes()[: len(out.read_bytes()) // 2]  # as a kill leaves it: in the middle of a line
    assert not kept.endswith(b"\n")
    out.write_bytes(kept)
    code, again = run(tmp_path, records)
    assert code == 0 and again[: kept.count(b"\n")] == whole[: kept.count(b"\n")]

    def texts(lines: list[dict[str, Any]]) -> dict[str, str]:
        return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in lines}

    assert texts(again) == texts(whole) and len(again) == 20
    before = out.read_bytes()
    assert run(tmp_path, records)[0] == 0 and out.read_bytes() == before


def test_only_a_window_of_requests_is_open_at_once(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    step = FakeEngine.step

    def counted(self: FakeEngine) -> Any:
        nonlocal most
        most = max(most, len(self._running))
        return step(self)

    monkeypatch.setattr(FakeEngine, "step", counted)
    _, found = run(tmp_path, [line(str(i), prompt=f"p{i}") for i in range(50)], "--max-num-seqs", "4")
    assert len(found) == 50 and most == 8


@pytest.mark.parametrize(
    ("records", "reason"),
    [(["{"], "in.jsonl:1: not valid JSON"), (["[]"], "must be a JSON object"),
     ([{"custom_id": "a"}], "method is missing"), ([line("a"), line("a")], "in.jsonl:2: custom_id 'a' is that of line 1"),
     ([line("a") | {"method": "GET"}], "must be POST, got 'GET'"), ([line("a") | {"body": 5}], "body an object")],
)  # fmt: skip
def test_a_bad_file_is_refused_before_anything_is_computed(
    engine: FakeEngine, tmp_path: Path, records: list[Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(tmp_path, records)
    assert code == 2 and not found and reason in capsys.readouterr().err


def test_an_output_of_something_else_is_not_touched(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in ("my notes\n", json.dumps({"custom_id": "other"}) + "\n"):
        (tmp_path / "out.jsonl").write_text(content)
        write(tmp_path / "in.jsonl", [line("a", prompt="x")])
        arguments = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
        assert main(["run-batch", *arguments]) == 2
        assert "name another output file" in capsys.readouterr().err
        assert (tmp_path / "out.jsonl").read_text() == content
