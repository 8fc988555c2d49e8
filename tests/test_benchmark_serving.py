"""The load client and benchmark_serving.py against a stand-in for a server, from start to result file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_openai_server import NUM_TOKENS, SPECULATION, FakeServer  # noqa: E402

from benchmarks import (  # noqa: E402
    benchmark_serving,
    report,
)
from benchmarks.client import Client, Load, Record, Target, build_payload, run_load  # noqa: E402
from benchmarks.server_process import ServerFailed, ServerProcess, free_port, health_ok  # noqa: E402
from benchmarks.serving_arguments import build_parser, check, request_fields  # noqa: E402
from benchmarks.workload import Item  # noqa: E402

FAKE_SERVER = ROOT / "tests" / "fake_openai_server.py"
ITEM = Item("a", messages=[{"role": "user", "content": "hello"}], max_tokens=9)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


# --- the client against a server ------------------------------------------------------------------


def test_payload_layers_are_merged_the_stronger_last() -> None:
    item = Item("a", [{"role": "user", "content": "q"}], None, 5, {"temperature": 0.1, "top_p": 0.2})
    chat = build_payload(Target("http://x/", "openai-chat", "m", {"temperature": 0.9}), item, seed=4)
    assert chat == {
        "model": "m", "messages": item.messages, "max_tokens": 5, "temperature": 0.9, "top_p": 0.2, "seed": 4,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    ids = Item("b", token_ids=[5, 6])
    assert build_payload(Target("http://x", "openai", "m"), ids)["prompt"] == [5, 6]
    assert build_payload(Target("http://x", "openai", "m"), item)["prompt"] == "q"
    chat = build_payload(Target("http://x", "openai-chat", "m"), ids)
    assert chat["prompt_token_ids"] == [5, 6] and chat["messages"] == []
    assert Target("http://x/", "openai", "m").url == "http://x/v1/completions"


def counted_clock() -> Any:
    ticks = iter(range(1_000_000))
    return lambda: float(next(ticks))


@pytest.mark.parametrize("backend", ["openai-chat", "openai"])
def test_the_client_times_an_answer_on_its_own_clock(backend: str) -> None:
    async def send(url: str) -> Record:
        async with Client(clock=counted_clock()) as client:
            return await client.send(Target(url, backend, "m"), ITEM, seed=1)

    with FakeServer(server_clock=True) as server:
        record = asyncio.run(send(server.url))
    assert record.ok, record.error
    assert record.text == "w0 w1 w2 w3 w4 " and record.output_tokens == NUM_TOKENS
    assert (record.prompt_tokens, record.cached_tokens) == (7, 3)
    # The clock ticks once when the request leaves and once a read: whole numbers, from 1 on, in order.
    assert record.output_times == sorted(record.output_times) and record.output_times[0] >= 1
    assert all(value == int(value) for value in record.output_times)
    assert record.server_times == [1.0, 2.0, 3.0, 4.0, 5.0] and record.server_end == 6.0
    assert record.speculation == SPECULATION
    assert server.requests[0]["seed"] == 1 and server.requests[0]["stream_options"] == {"include_usage": True}


def test_a_failing_request_costs_the_others_nothing_and_order_is_kept() -> None:
    texts = ["fine", "http500", "cut", "error", "fine"]
    items = [Item(str(i), [{"role": "user", "content": text}]) for i, text in enumerate(texts)]

    async def run(url: str) -> list[Record]:
        async with Client() as client:
            records, duration = await run_load(
                client, Target(url, "openai-chat", "m"), Load(items, [0.0] * 5, 2, 10)
            )
            assert duration > 0
            return records

    with FakeServer() as server:
        records = asyncio.run(run(server.url))
    assert [record.item_id for record in records] == list("01234")
    assert [record.ok for record in records] == [True, False, False, False, True]
    assert "HTTP 500" in str(records[1].error) and "out of cheese" in str(records[1].error)
    assert sorted(request["seed"] for request in server.requests) == [10, 11, 12, 13, 14]


def test_nobody_listening_is_a_failed_record() -> None:
    async def send() -> Record:
        async with Client() as client:
            return await client.send(Target(f"http://127.0.0.1:{free_port()}", "openai", "m"), ITEM)

    assert "Connect" in str(asyncio.run(send()).error)


# --- starting and stopping a server -----------------------------------------------------------------


def fake_command(port: int, *more: str) -> list[str]:
    return [sys.executable, str(FAKE_SERVER), str(port), *more]


def test_a_started_server_is_ready_and_gone_afterwards(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ServerProcess(fake_command(port, "2"), url, tmp_path / "log") as server:
        assert health_ok(url) and server.ready_s > 0
        pid = server.pid
    assert not health_ok(url)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_is_stopped_when_the_measurement_fails(tmp_path: Path) -> None:
    port = free_port()
    with (
        pytest.raises(KeyboardInterrupt),
        ServerProcess(fake_command(port), f"http://127.0.0.1:{port}", tmp_path / "log") as server,
    ):
        pid = server.pid
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_ends_early_is_reported_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    server = ServerProcess(command, f"http://127.0.0.1:{free_port()}", tmp_path / "log")
    with pytest.raises(ServerFailed, match=r"code 3(.|\n)*no such model"):
        server.start()


def test_a_server_that_is_never_ready_is_stopped(tmp_path: Path) -> None:
    port = free_port()
    command = fake_command(port, "1000000")
    server = ServerProcess(command, f"http://127.0.0.1:{port}", tmp_path / "log", start_timeout_s=0.5)
    with pytest.raises(ServerFailed, match=r"not ready in 0\.5 s"):
        server.start()
    assert not health_ok(server.base_url)


def test_a_server_deaf_to_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    port = free_port()
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"child = subprocess.Popen({fake_command(port)!r}); print(child.pid, flush=True); child.wait()"
    )
    log = tmp_path / "log"
    with ServerProcess([sys.executable, "-c", code], f"http://127.0.0.1:{port}", log, stop_timeout_s=0.1):
        child = int(log.read_text().split()[0])
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]:
            break  # killed; nobody is left to collect it
        time.sleep(0.01)
    assert not health_ok(f"http://127.0.0.1:{port}")


# --- the whole script -----------------------------------------------------------------------------


def run_script(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    code = benchmark_serving.main(
        [*arguments, "--result-dir", str(tmp_path), "--result-filename", "r.json", "--disable-tqdm"]
    )
    assert code == 0
    return json.loads((tmp_path / "r.json").read_text())


REQUIRED_KEYS = {
    "date",
    "backend",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "speculation",
    "machine",
    "rounds",
}


def test_the_script_measures_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        result = run_script(
            tmp_path,
            "--base-url",
            server.url,
            "--dataset-path",
            "chat",
            "--num-prompts",
            "12",
            "--max-concurrency",
            "3",
            "--temperature",
            "0",
            "--goodput",
            "ttft:60000",
            "--save-detailed",
            "--metadata",
            "note=hi",
        )
        assert len(server.requests) == 13, "one warm-up request, then the load"
        assert {request["temperature"] for request in server.requests} == {0.0}
        assert not any("cache_salt" in request or "speculation" in request for request in server.requests)
    assert set(result) >= REQUIRED_KEYS
    assert (result["completed"], result["model_id"], result["metadata"]) == (12, "fake-model", {"note": "hi"})
    assert result["total_output_tokens"] == 12 * NUM_TOKENS and result["total_input_tokens"] == 12 * 7
    assert result["request_goodput"] == result["request_throughput"]
    assert result["mean_output_len"] == NUM_TOKENS and result["p99_input_len"] == 7
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{s}_{metric}_ms" for s in ("mean", "median", "std", "p90", "p99")} <= set(result)
    assert result["speculation"]["acceptance_rate"] == 0.5 and result["speculation"]["from"] == "answers"
    assert result["generated_texts"] == ["w0 w1 w2 w3 w4 "] * 12 and len(result["itls"][0]) == NUM_TOKENS - 1
    assert result["server_means_s"] == {"time_to_first_token_seconds": 0.25}
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "output tokens/s" in printed
    assert "not given by this server: s_ttft, s_itl, s_e2el, s_decode" in printed


def test_the_script_starts_alternates_and_stops_its_own_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "plot", lambda *a: False)
    commands = []

    def command(host: str, port: int, *rest: object) -> list[str]:
        commands.append((port, *rest))
        return fake_command(port)

    monkeypatch.setattr(benchmark_serving, "outrider_command", command)
    port = free_port()
    result = run_script(
        tmp_path,
        "--port",
        str(port),
        "--config",
        "some.yaml",
        "--speculative-config",
        '{"method": "ngram"}',
        "--baseline",
        "--rounds",
        "2",
        "--num-prompts",
        "3",
    )
    assert [(c[2], c[3]) for c in commands] == [
        ("some.yaml", '{"method": "ngram"}'),
        ("some.yaml", '{"method": "off"}'),
    ]
    assert commands[0][0] == port != commands[1][0]
    assert len(result["rounds"]) == len(result["baseline"]["rounds"]) == 2
    assert (result["same_outputs"], result["compared_outputs"]) == (6, 6)
    # The fake server answers in one piece, so only what cannot be zero has a ratio for certain.
    assert {"output_throughput", "mean_e2el_ms"} <= set(result["ratios"]) <= set(report.COMPARED)
    assert "same output with speculation on and off: 6 of 6" in capsys.readouterr().out
    assert not any(health_ok(f"http://127.0.0.1:{c[0]}") for c in commands)


def test_the_baseline_on_a_running_server_is_asked_for_by_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "plot", lambda *a: False)
    with FakeServer() as server:
        run_script(tmp_path, "--base-url", server.url, "--baseline", "--rounds", "2", "--num-prompts", "2")
        requests = server.requests[2:]  # after the warm-up of both sides
    off = [request for request in requests if request.get("speculation") == {"method": "off"}]
    assert len(off) == 4 and len(requests) == 8
    # Both sides of a round share a namespace, rounds do not: no round finds the last one's prompts cached.
    assert len({request["cache_salt"] for request in requests}) == 2


def test_without_a_server_or_a_configuration_the_script_says_what_to_do() -> None:
    with pytest.raises(SystemExit, match="nobody answers at"):
        benchmark_serving.main(["--port", str(free_port())])


def test_a_failed_warm_up_ends_the_run_with_the_servers_words(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x", {"messages": [{"role": "user", "content": "http500"}]})
    with FakeServer() as server, pytest.raises(SystemExit, match="out of cheese"):
        benchmark_serving.main(["--base-url", server.url, "--dataset-path", str(path)])


def test_sigterm_stops_the_server_the_script_started(tmp_path: Path) -> None:
    """The script runs as a process, with a server whose /health never turns 200."""
    port = free_port()
    code = (
        "import sys; from benchmarks import benchmark_serving as b\n"
        f"b.outrider_command = lambda *a: {fake_command(port, '1000000')!r}\n"
        f"sys.exit(b.main(['--port', '{port}', '--config', 'x.yaml']))"
    )
    script = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not _answers(port) and time.monotonic() < deadline:
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    assert script.wait(20) == 128 + signal.SIGTERM
    assert not _answers(port)


def _answers(port: int) -> bool:
    from benchmarks.server_process import is_listening

    return is_listening(f"http://127.0.0.1:{port}")


def test_request_fields_are_layered(tmp_path: Path) -> None:
    path = tmp_path / "fields.yaml"
    path.write_text("temperature: 0.8\ntop_p: 0.5\ntop_k: 3\n")
    parser = build_parser(["ttft"])
    args = parser.parse_args(
        ["--hyperparameter-path", str(path), "--extra-body", '{"top_p": 0.6}', "--top-k", "7", "--ignore-eos"]
    )
    check(args)
    assert request_fields(args) == {"temperature": 0.8, "top_p": 0.6, "top_k": 7, "ignore_eos": True}
    path.write_text("- a list\n")
    with pytest.raises(ValueError, match="must hold a mapping"):
        request_fields(args)


@pytest.mark.parametrize(
    "flags",
    [["--num-prompts", "0"], ["--random-range-ratio", "1"], ["--metadata", "x"], ["--extra-body", "[]"]],
)
def test_impossible_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_serving.main(flags) == 2
    assert flags[0] in capsys.readouterr().err
