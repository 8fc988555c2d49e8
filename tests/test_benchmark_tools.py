"""benchmark_peers.py, benchmark_kernels.py, the YAML files and what the benchmarks know of the machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


from benchmarks import (  # noqa: E402
    benchmark_engine,
    benchmark_kernels,
    benchmark_peers,
    machine,
)
from benchmarks.client import Record  # noqa: E402
from benchmarks.peers import Peer, find_peers, outrider_peer  # noqa: E402
from benchmarks.workload import Item  # noqa: E402
from outrider.config import EngineConfig, SpeculativeConfig, load  # noqa: E402

FAKE_SERVER = ROOT / "tests" / "fake_openai_server.py"


# --- peers ----------------------------------------------------------------------------------------


def test_peers_are_measured_in_turns_and_summarised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = (sys.executable, str(FAKE_SERVER), "{port}")
    monkeypatch.setattr(
        benchmark_peers, "outrider_peer", lambda method: Peer(f"o {method}", command, salted=True)
    )
    monkeypatch.setattr(benchmark_peers, "find_peers", lambda given, file: [Peer("other", command)])
    ids = {
        name: [Item(f"{name}-{i}", token_ids=[1, 2, 3]) for i in range(4)] for name in benchmark_peers.SETS
    }
    monkeypatch.setattr(
        benchmark_peers,
        "load_token_ids",
        lambda model: {**ids, "prefill": [Item("p", token_ids=list(range(50)))]},
    )
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    arguments = ["--model", str(model), "--speculation", "off", "--repetitions", "2", "--quiet", "0"]
    code = benchmark_peers.main([*arguments, "--concurrency", "3", "--json", str(tmp_path / "p.json")])
    assert code == 0
    result = json.loads((tmp_path / "p.json").read_text())
    rows = [(row["repetition"], row["task"], row["peer"]) for row in result["measurements"]]
    assert [peer for repetition, task, peer in rows if task == "batch"] == [
        "o off",
        "other",
        "other",
        "o off",
    ]
    assert sum(task == "edit" for _, task, _ in rows) == 2 * 2 * 2, "two prompts, two peers, two repetitions"
    assert result["same_texts_as_first"] == {"o off": [12, 12], "other": [12, 12]}
    assert result["peers"]["other"]["batch"]["n"] >= 1
    printed = capsys.readouterr().out
    assert "batch tok/s" in printed and "o off / other" in printed


def test_each_prefill_differs_in_its_second_token() -> None:
    args = benchmark_peers.build_parser().parse_args([])
    schedule = benchmark_peers.Schedule({"prefill": [Item("p", token_ids=[1, 2, 3])]}, args)
    sent = [schedule.jobs("prefill", 0)[0][0] for _ in range(5)]
    assert len({item.token_ids[1] for item in sent if item.token_ids}) == 5
    assert all(item.max_tokens == 1 and item.token_ids and item.token_ids[::2] == [1, 3] for item in sent)


def make_record(**values: Any) -> Record:
    """Output at 2, 3 and 5 s, last chunk at 6; 5 tokens in those 3 chunks; 3 of 7 prompt tokens cached."""
    record = Record(
        "a", output_times=[2.0, 3.0, 5.0], end=6.0, prompt_tokens=7, cached_tokens=3, output_tokens=5
    )
    for name, value in values.items():
        setattr(record, name, value)
    return record


def test_figures_of_a_measurement_equal_the_hand_computed_ones() -> None:
    record = make_record(output_tokens=9)
    assert benchmark_peers.figures_of("chat", [record], 7, 6.0) == {"chat": 8 / 4.0}
    assert benchmark_peers.figures_of("chat", [make_record()], 7, 6.0) == {}, "five tokens give no rate"
    assert benchmark_peers.figures_of("prefill", [record], 100, 4.0) == {"ttft": 4.0, "prefill": 25.0}
    assert benchmark_peers.figures_of("batch", [record, record], 7, 6.0) == {"batch": 3.0}


def test_disturbed_measurements_are_left_out_unless_all_are() -> None:
    found = benchmark_peers.Measurements(max_others=0.2)
    for value, others in ((10.0, 0.0), (1.0, 0.9), (30.0, 0.1)):
        found.add(peer="a", task="chat", others_cores=others, chat=value)
    found.add(peer="b", task="chat", others_cores=0.5, chat=8.0)
    medians = found.medians(["a", "b"])
    assert medians["a"]["chat"] == {"median": 20.0, "min": 10.0, "max": 30.0, "n": 2}
    assert medians["b"]["chat"] == {"median": 8.0, "min": 8.0, "max": 8.0, "n": 1}
    assert found.disturbed == 2
    assert "2.50x" in benchmark_peers.ratio_table(medians)


def test_peers_are_found_by_path_and_described_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_peers({}, None) == []
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match="no program to run"):
        find_peers({"llama-server": str(program)}, None)
    program.chmod(0o755)
    [found] = find_peers({}, None)
    assert found.command[0] == str(program) and found.fields["cache_prompt"] is False
    monkeypatch.setenv("ENGINE", "/opt/engine")
    described = tmp_path / "peers.json"
    described.write_text('{"mine": {"command": ["${ENGINE}", "{port}"], "fields": {"top_k": 1}}}')
    assert find_peers({}, described)[1] == Peer("mine", ("/opt/engine", "{port}"), {"top_k": 1})
    with pytest.raises(ValueError, match="knows llama-server"):
        find_peers({"mystery": "/bin/true"}, None)
    values = {"model": "m", "threads": 2, "port": 3, "slots": 8, "context": 4}
    assert [part.format(**values) for part in outrider_peer("off").command][-1] == '{"method": "off"}'


# --- kernels --------------------------------------------------------------------------------------


def test_steps_of_the_kernel_benchmark_hold_what_they_say() -> None:
    step = benchmark_kernels.row_step("verify", 4, 62, vocab_size=9)
    assert step.positions.tolist() == [62, 63, 64, 65] and step.seq_lens.tolist() == [66]
    assert step.block_tables.tolist() == [[0, 1, 2]] and step.slot_mapping.tolist() == [62, 63, 64, 65]
    assert step.query_start_loc.tolist() == [0, 4] and step.logits_indices.tolist() == [0, 1, 2, 3]
    step = benchmark_kernels.row_step("batch", 3, 32, vocab_size=9)
    assert step.positions.tolist() == [32] * 3 and step.seq_lens.tolist() == [33] * 3
    assert step.block_tables.tolist() == [[0, 1], [2, 3], [4, 5]] and step.slot_mapping.tolist() == [
        32,
        96,
        160,
    ]
    assert step.query_start_loc.tolist() == [0, 1, 2, 3]
    step = benchmark_kernels.row_step("tree", 5, 62, vocab_size=9)
    assert step.positions.tolist() == [62, 63, 63, 64, 64] and step.parents.tolist() == [-1, 0, 0, 2, 2]
    assert step.slot_mapping.tolist() == [62, 63, 64, 65, 66] and step.seq_lens.tolist() == [67]
    step = benchmark_kernels.make_step(2, 5, 0, vocab_size=9, all_logits=False)
    assert step.logits_indices.tolist() == [4, 9] and step.token_ids.max() < 9
    assert {array.dtype.name for array in (step.token_ids, step.slot_mapping, step.block_tables)} == {"int32"}


def test_row_counts_take_turns_and_figures_follow_from_the_times() -> None:
    class Executable:
        def __init__(self) -> None:
            self.ran: list[Any] = []

        def run(self, step: Any) -> None:
            self.ran.append(step)

    executable = Executable()
    seconds = benchmark_kernels.interleaved({1: "a", 4: "b"}, executable, 2)  # type: ignore[dict-item]
    assert executable.ran == ["a", "b", "a", "b", "b", "a"] and len(seconds[1]) == len(seconds[4]) == 2
    model = benchmark_kernels.Model(executable, 9, weight_bytes=10**9, macs_per_row=2 * 10**9, load_s=0)
    ceilings = {"threads": 2, "read_gb_s": 20.0, "multiply_gmac_s_core": 100.0}
    one, four = benchmark_kernels.row_figures(model, ceilings, {1: [0.1, 0.1, 0.4], 4: [0.2, 0.25, 0.3]})
    assert (one["median_ms"], one["min_ms"], four["min_ms"]) == (100, 100, 200)
    assert (one["ratio"], four["ratio"]) == (1, 2.5)
    assert (one["gb_s"], one["read_share"], one["tokens_s"]) == (10, 0.5, 10)
    assert four["gmac_s_core"] == pytest.approx(4 * 2 / 0.25 / 2)


def test_what_the_engine_adds_is_the_step_without_the_model() -> None:
    steps = [{"step": 0.010, "model": 0.008, "sampler": 0.001}, {"step": 0.020, "model": 0.019}]
    figures = benchmark_engine.summary_of([*steps, {"step": 0.010, "model": 0.009, "propose": 0.0005}])
    assert (figures["step"], figures["model"]) == (10, 9)
    assert figures["overhead"] == pytest.approx(1.0) and figures["overhead_share"] == pytest.approx(0.1)
    assert figures["rest"] == pytest.approx(1.0) and figures["sampler"] == 0


@pytest.mark.model
def test_the_engine_benchmark_times_every_part(tmp_path: Path) -> None:
    flags = ["--batch", "1", "--methods", "ngram", "--steps", "3", "--repetitions", "1", "--quiet", "0"]
    assert benchmark_engine.main([*flags, "--kv-blocks", "300", "--json", str(tmp_path / "e.json")]) == 0
    [row] = json.loads((tmp_path / "e.json").read_text())["rows"]
    assert all(row[part] > 0 for part in ("step", "rest", *benchmark_engine.PARTS))


@pytest.mark.model
def test_the_kernel_benchmark_runs_the_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--rows 1,3 --contexts 40 --repetitions 1 --prefill 20 --prefill-repetitions 1 --profile 1 --quiet 0"
    )
    assert benchmark_kernels.main([*flags.split(), "--json", str(tmp_path / "k.json")]) == 0
    result = json.loads((tmp_path / "k.json").read_text())
    assert [block["shape"] for block in result["steps"]] == ["verify", "batch"]
    assert [row["rows"] for row in result["steps"][0]["rows"]] == [1, 3]
    assert result["macs_per_row"] == 134_479_872, "the built-in model's matrices, its tied head included"
    assert result["ceilings"]["read_gb_s"] > 0 and result["profiles"][0]["ms"]["linear"] > 0
    assert "prefill of 20 tokens" in capsys.readouterr().out


def test_ceilings_are_measured_by_every_thread_of_the_pool() -> None:
    from outrider import _native

    assert len(_native.measure_read_bandwidth(1 << 20, 3)) == 3
    rates = _native.measure_multiply_rate(0.001)
    assert len(rates) == _native.num_threads() and min(rates) > 0


# --- the rest -----------------------------------------------------------------------------------


def test_every_yaml_is_a_mapping_and_says_what_it_is_for() -> None:
    files = sorted((ROOT / "benchmarks" / "yaml").rglob("*.yaml"))
    assert len(files) >= 7
    for path in files:
        assert path.read_text().startswith("# "), path
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "yaml").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_configuration_starts_or_names_the_feature_it_waits_for(path: Path) -> None:
    """Every key is known, and nothing but a feature that this version lacks keeps a file from loading."""
    if path.stem in ("smollm2-135m-off", "smollm2-135m-ngram"):
        assert load(config_file=path, flags={}).engine.model == "smollm2-135m"
        return
    values = yaml.safe_load(path.read_text())
    speculative = values.pop("speculative_config")
    assert set(values) <= {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(speculative) <= {field.name for field in dataclasses.fields(SpeculativeConfig)}


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
