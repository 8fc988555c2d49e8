"""The benchmark client and its arithmetic: figures computed by hand, times counted rather than slept."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_openai_server import NUM_TOKENS, SPECULATION, FakeServer  # noqa: E402

from benchmarks import benchmark_serving, machine, prometheus, report  # noqa: E402
from benchmarks.client import Client, Load, Record, Target, build_payload, parse_answer, run_load  # noqa: E402
from benchmarks.metrics import Run, acceptance, parse_goodput, request_metrics, summarize, throughput  # noqa: E402
from benchmarks.server_process import ServerFailed, ServerProcess, free_port, health_ok  # noqa: E402
from benchmarks.serving_arguments import build_parser, check, request_fields  # noqa: E402
from benchmarks.workload import DATASETS, DatasetOptions, Item, arrival_offsets, load_dataset  # noqa: E402

FAKE_SERVER = ROOT / "tests" / "fake_openai_server.py"
ITEM = Item("a", messages=[{"role": "user", "content": "hello"}], max_tokens=9)


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def content(text: str, **more: Any) -> bytes:
    return event({"choices": [{"delta": {"content": text}, **more}]})


ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
FINISH = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
DONE = b"data: [DONE]\n\n"


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    figures = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return event({"choices": [], "usage": figures})


# --- one answer -----------------------------------------------------------------------------------


def test_role_finish_and_usage_chunks_carry_no_output() -> None:
    reads = [
        (1.0, ROLE),
        (2.0, content("a")),
        (2.5, content("bc")),
        (4.0, FINISH),
        (4.5, usage(7, 4)),
        (5.0, DONE),
    ]
    record = parse_answer("x", reads)
    assert record.ok and record.text == "abc" and record.finish_reason == "stop"
    assert record.output_times == [2.0, 2.5]
    assert record.end == 4.5
    assert (record.prompt_tokens, record.output_tokens) == (7, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_an_answer_parses_the_same_however_it_is_cut(size: int) -> None:
    stream = b": comment\n\n" + ROLE + content("häl") + content("lo\n\n") + FINISH + usage(3, 2) + DONE
    cut = [(float(i), stream[i : i + size]) for i in range(0, len(stream), size)]
    record = parse_answer("x", cut)
    assert record.ok and record.text == "hällo\n\n" and record.output_tokens == 2
    assert len(record.output_times) == 2 and record.output_times == sorted(record.output_times)


def test_an_event_has_the_time_of_the_read_that_completed_it() -> None:
    first = content("a")
    record = parse_answer("x", [(1.0, first[:10]), (3.0, first[10:]), (4.0, FINISH + DONE)])
    assert record.output_times == [3.0]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (ROLE + content("a"), "without [DONE]"),
        (content("a") + DONE, "without a finish_reason"),
        (event({"error": {"message": "engine lost"}}), "engine lost"),
        (b"data: {oops\n\n", "not JSON"),
    ],
)
def test_a_broken_answer_is_a_failure_that_says_why(stream: bytes, message: str) -> None:
    record = parse_answer("x", [(1.0, stream)])
    assert record.error is not None and message in record.error


def test_completion_chunks_and_token_ids_count_as_output() -> None:
    chunks = [event({"choices": [{"text": "", "token_ids": [4, 5]}]})]
    chunks.append(event({"choices": [{"text": "b", "token_ids": [6], "finish_reason": "length"}]}))
    record = parse_answer("x", [(1.0, chunks[0]), (2.0, chunks[1]), (3.0, DONE)])
    assert record.output_times == [1.0, 2.0] and record.token_ids == [4, 5, 6] and record.text == "b"


# --- metrics, by hand -----------------------------------------------------------------------------


def make_record(**values: Any) -> Record:
    """Output at 2, 3 and 5 s, last chunk at 6; 5 tokens in those 3 chunks; 3 of 7 prompt tokens cached."""
    record = Record(
        "a", output_times=[2.0, 3.0, 5.0], end=6.0, prompt_tokens=7, cached_tokens=3, output_tokens=5
    )
    for name, value in values.items():
        setattr(record, name, value)
    return record


def test_request_metrics_equal_the_hand_computed_ones() -> None:
    values = request_metrics(make_record())
    assert values["ttft"] == [2.0]
    assert values["itl"] == [1.0, 2.0]
    assert values["e2el"] == [6.0]
    assert values["tpot"] == [(6.0 - 2.0) / 4]
    assert values["input_len"] == values["s_input_len"] == [7]
    assert values["cached_len"] == [3]
    assert values["output_len"] == [5]
    assert all(values[name] == [] for name in ("s_ttft", "s_itl", "s_e2el", "s_decode"))


def test_server_metrics_use_the_servers_clock_and_keep_the_last_gap() -> None:
    values = request_metrics(make_record(server_times=[1.5, 2.0, 4.5], server_end=5.5))
    assert values["s_ttft"] == [1.5]
    assert values["s_itl"] == [0.5, 2.5]
    assert values["s_e2el"] == [5.5]
    assert values["s_decode"] == [(5 - 1) / (5.5 - 1.5)]


def test_input_len_is_what_the_client_sent_when_it_sent_token_ids() -> None:
    values = request_metrics(make_record(), sent_tokens=9)
    assert (values["input_len"], values["s_input_len"]) == ([9], [7])


def test_a_single_token_has_no_time_per_output_token() -> None:
    values = request_metrics(make_record(output_times=[2.0], output_tokens=1))
    assert values["tpot"] == [] and values["itl"] == []


def test_an_answer_without_visible_output_has_its_first_token_at_its_end() -> None:
    assert request_metrics(make_record(output_times=[], output_tokens=1))["ttft"] == [6.0]


def make_run(*records: Record, duration: float = 10.0, counters: dict[str, float] | None = None) -> Run:
    return Run(records, duration, [None] * len(records), counters or {})


def test_throughputs_count_finished_requests_only() -> None:
    run = make_run(make_record(), make_record(output_tokens=9), make_record(error="no"))
    figures = throughput([run], {})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["request_throughput"] == 0.2
    assert figures["output_throughput"] == 1.4
    assert figures["total_token_throughput"] == 2.8
    assert figures["mean_decode_throughput"] == (4 + 8) / (4.0 + 4.0)
    assert figures["total_cached_tokens"] == 6
    assert "request_goodput" not in figures


def test_goodput_counts_requests_within_every_limit() -> None:
    run = make_run(make_record(), make_record(output_times=[2.5, 3.0, 5.0]))  # tpot 1.0 and 0.875 s
    assert throughput([run], parse_goodput(["ttft:2000", "tpot:1000"]))["request_goodput"] == 0.1
    assert throughput([run], parse_goodput(["ttft:2500"]))["request_goodput"] == 0.2
    assert throughput([run], parse_goodput(["e2el:5999"]))["request_goodput"] == 0.0


@pytest.mark.parametrize("pair", ["itl:5", "ttft", "ttft:fast"])
def test_a_wrong_goodput_limit_is_refused(pair: str) -> None:
    with pytest.raises(ValueError, match="--goodput"):
        parse_goodput([pair])


def test_summary_reports_times_in_ms_and_lengths_as_they_are() -> None:
    records = [make_record(output_times=[t], end=t, output_tokens=t) for t in (1, 2, 3, 10)]
    result = summarize([make_run(*records)], ["ttft", "output_len", "s_ttft"], [50, 90], {})
    assert (result["mean_ttft_ms"], result["median_ttft_ms"], result["p50_ttft_ms"]) == (4000, 2500, 2500)
    assert result["std_ttft_ms"] == pytest.approx(1000 * ((9 + 4 + 1 + 36) / 4) ** 0.5)
    assert result["p90_ttft_ms"] == pytest.approx(3000 + 0.7 * 7000)
    assert result["mean_output_len"] == 4
    assert "mean_s_ttft_ms" not in result, "a metric the server does not give is left out, not zero"
    with pytest.raises(ValueError, match="unknown metric 'speed'"):
        summarize([make_run(*records)], ["speed"], [50], {})


def test_acceptance_comes_from_the_answers_when_all_tell() -> None:
    told = {"steps": 4, "draft_tokens": 6, "accepted_tokens": 3, "per_position": [[4, 3], [2, 0], [1, 1]]}
    run = make_run(make_record(speculation=SPECULATION), make_record(speculation=told), counters=COUNTERS)
    figures = acceptance([run])
    assert figures is not None and figures["from"] == "answers"
    assert (figures["steps"], figures["draft_tokens"], figures["accepted_tokens"]) == (7, 10, 5)
    assert figures["acceptance_rate"] == 0.5
    assert figures["mean_acceptance_length"] == 1 + 5 / 7
    assert figures["per_position"] == [5 / 7, 0.0, 1.0]


COUNTERS = {
    "spec_decode_num_drafts": 10.0,
    "spec_decode_num_draft_tokens": 40.0,
    "spec_decode_num_accepted_tokens": 20.0,
}


def test_acceptance_falls_back_to_the_servers_counters() -> None:
    figures = acceptance(
        [make_run(make_record(), counters=COUNTERS), make_run(make_record(), counters=COUNTERS)]
    )
    assert figures is not None and figures["from"] == "counters"
    assert (figures["acceptance_rate"], figures["mean_acceptance_length"]) == (0.5, 3.0)
    assert acceptance([make_run(make_record())]) is None


def test_prometheus_text_is_summed_over_labels_and_means_come_from_histograms() -> None:
    before = prometheus.parse("# HELP x\noutrider:prompt_tokens_total 5\n")
    after = prometheus.parse(
        'vllm:spec_decode_num_drafts_total{source="a"} 2\nvllm:spec_decode_num_drafts_total{source="b"} 3\n'
        "outrider:prompt_tokens_total 12\n"
        'outrider:time_to_first_token_seconds_bucket{le="1"} 4\n'
        "outrider:time_to_first_token_seconds_sum 6.0\noutrider:time_to_first_token_seconds_count 4\n"
        "something_else 1\n"
    )
    counters = prometheus.gained(before, after)
    assert counters["spec_decode_num_drafts"] == 5 and counters["prompt_tokens"] == 7
    assert "something_else" not in counters
    assert prometheus.histogram_means(counters) == {"time_to_first_token_seconds": 1.5}


# --- data sets ------------------------------------------------------------------------------------


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_ebchat_lines_become_items(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
    ]
    path = write_lines(
        tmp_path / "x.json", {"messages": messages, "max_tokens": 3, "min_tokens": 2, "junk": 1}
    )
    [item] = load_dataset("EBChat", DatasetOptions(path=path))
    assert (item.messages, item.max_tokens, item.fields, item.text) == (messages, 3, {"min_tokens": 2}, "q")


def test_eb_lines_become_items(tmp_path: Path) -> None:
    row = {"text": "q", "temperature": 0.5, "topp": 0.7, "penalty_score": 1.1, "max_dec_len": 8}
    [item] = load_dataset("EB", DatasetOptions(path=write_lines(tmp_path / "x", row)))
    assert item.messages == [{"role": "user", "content": "q"}] and item.max_tokens == 8
    assert item.fields == {"temperature": 0.5, "top_p": 0.7, "repetition_penalty": 1.1}


def test_sharegpt_takes_the_first_human_turn(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "x" * 40}]
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"id": "one", "conversations": turns}, {"conversations": turns[1:]}]))
    [item] = load_dataset("sharegpt", DatasetOptions(path=path))
    assert (item.id, item.text, item.max_tokens) == ("one", "q", 10)
    [item] = load_dataset("sharegpt", DatasetOptions(path=path, output_len=5))
    assert item.max_tokens == 5


@pytest.mark.parametrize("name", ["random", "random_token_ids"])
def test_random_sets_keep_their_lengths_and_repeat_with_the_seed(name: str) -> None:
    options = DatasetOptions(
        num_prompts=50, seed=3, random_input_len=20, random_output_len=10, random_range_ratio=0.5
    )
    items = load_dataset(name, options)
    assert items == load_dataset(name, options)
    assert items != load_dataset(name, DatasetOptions(num_prompts=50, seed=4, random_input_len=20))
    lengths = {len(item.token_ids or item.text.split()) for item in items}
    assert lengths <= set(range(10, 31)) and len(lengths) > 5
    assert {item.max_tokens for item in items} <= set(range(5, 16))
    assert all(item.fields == {"ignore_eos": True} for item in items)


def test_the_projects_own_prompts_are_found_by_name() -> None:
    counts = {
        name: len(load_dataset("prompts", DatasetOptions(path=Path(name))))
        for name in ("chat", "edit", "code")
    }
    assert counts == {"chat": 10, "edit": 10, "code": 10}
    [item] = load_dataset("prompts", DatasetOptions(path=Path("prefill")))
    assert len(item.text) > 3000


def test_a_short_file_is_gone_through_again_with_new_ids() -> None:
    items = load_dataset("prompts", DatasetOptions(path=Path("chat"), num_prompts=23))
    assert [items[0].id, items[10].id, items[22].id] == ["chat-0", "chat-0#1", "chat-2#2"]
    assert len({item.id for item in items}) == 23 and items[10].messages == items[0].messages


def test_shuffling_keeps_the_items_and_repeats_with_the_seed() -> None:
    plain, first, second = (
        [
            item.id
            for item in load_dataset("prompts", DatasetOptions(path=Path("chat"), shuffle=shuffle, seed=1))
        ]
        for shuffle in (False, True, True)
    )
    assert first == second != plain and sorted(first) == sorted(plain)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("EBChat", "{oops", "x:1: not a JSON line"),
        ("EBChat", "[]", "wants an object a line"),
        ("EBChat", '{"max_tokens": 3}', "no `messages`"),
        ("EB", "{}", "no `text`"),
        ("EBChat", "", "holds no request"),
    ],
)
def test_a_bad_data_set_is_refused_with_file_and_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_dataset(name, DatasetOptions(path=path))


def test_missing_paths_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="give --dataset-path"):
        load_dataset("sharegpt", DatasetOptions())
    with pytest.raises(ValueError, match="does not exist"):
        load_dataset("EB", DatasetOptions(path=Path("nowhere")))
    with pytest.raises(ValueError, match="EBChat, EB, sharegpt"):
        load_dataset("mystery", DatasetOptions())
    assert list(DATASETS) == ["EBChat", "EB", "sharegpt", "random", "random_token_ids", "prompts"]


def test_arrivals_have_the_asked_for_rate_and_burstiness() -> None:
    assert arrival_offsets(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    offsets = arrival_offsets(4001, 10.0, 1.0, 0)
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets == arrival_offsets(4001, 10.0, 1.0, 0)
    gaps = [b - a for a, b in itertools.pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    assert 0.09 < mean < 0.11
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert 0.8 < variance / mean**2 < 1.2  # Poisson: squared coefficient of variation 1
    even = arrival_offsets(1001, 10.0, 1000.0, 0)
    assert max(b - a for a, b in itertools.pairwise(even)) < 0.12
    with pytest.raises(ValueError, match="--request-rate"):
        arrival_offsets(3, 0.0, 1.0, 0)


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
    assert chat["prompt_token_ids"] == [5, 6] and chat["messages"] == [{"role": "user", "content": ""}]
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


def test_the_baseline_on_a_running_server_is_asked_for_by_request(tmp_path: Path) -> None:
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


# --- the rest -------------------------------------------------------------------------------------


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


def test_every_yaml_is_a_mapping_and_says_what_it_is_for() -> None:
    files = sorted((ROOT / "benchmarks" / "yaml").rglob("*.yaml"))
    assert len(files) >= 7
    for path in files:
        assert path.read_text().startswith("# "), path
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


def test_foreign_work_is_seen_and_own_work_is_not_foreign() -> None:
    with machine.watch_others() as others:
        sum(range(2_000_000))
    assert others.cores >= 0
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in machine.process_tree(os.getpid())
        assert machine.peak_memory_mib(os.getpid()) > 1
    finally:
        child.communicate(b"\n")
    assert 1 <= machine.physical_cores() <= (os.cpu_count() or 1)
