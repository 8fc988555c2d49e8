"""The benchmarks' arithmetic and data sets: figures computed by hand, times counted rather than slept."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_openai_server import SPECULATION  # noqa: E402

from benchmarks import (  # noqa: E402
    prometheus,
)
from benchmarks.client import Record, parse_answer  # noqa: E402
from benchmarks.metrics import Run, acceptance, parse_goodput, request_metrics, summarize, throughput  # noqa: E402
from benchmarks.workload import DATASETS, DatasetOptions, arrival_offsets, load_dataset  # noqa: E402


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
    told = {
        "steps": 4,
        "draft_tokens": 6,
        "accepted_tokens": 3,
        "per_position": [
            {"draft_tokens": 4, "accepted_tokens": 3},
            {"draft_tokens": 2, "accepted_tokens": 0},
            {"draft_tokens": 1, "accepted_tokens": 1},
        ],
    }
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
