"""benchmark_drafts.py, benchmark_mtp.py and benchmark_sweep.py."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mtp_heads import chain_prompt, save_chain_model  # noqa: E402
from test_benchmark_serving import FakeServer  # noqa: E402

from benchmarks import benchmark_drafts, benchmark_mtp, benchmark_sweep, plots  # noqa: E402
from benchmarks.draft_replay import Recording, Stream, oracle, plain_seconds, replay  # noqa: E402
from benchmarks.workload import DatasetOptions, Item, load_dataset  # noqa: E402
from outrider.entrypoints.bench import SCRIPTS, find_script  # noqa: E402
from outrider.spec_decode.calibration import Calibration  # noqa: E402
from outrider.spec_decode.proposer import Parts  # noqa: E402

CALIBRATION = Calibration((1, 4, 8, 64), (128,), ((1.0, 1.2, 1.8, 12.0),))
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}


def recording(*, repeats: bool, num: int = 6) -> Recording:
    """Streams that copy their prompt, or that nobody foresees."""
    rng = random.Random(0)
    streams = []
    for i in range(num):
        text = [rng.randrange(1000) for _ in range(60)]
        output = text[:50] if repeats else [rng.randrange(1000) for _ in range(50)]
        streams.append(Stream(str(i), text, output))
    return Recording("a model", CALIBRATION, streams)


def run(what: Recording, plan: dict[str, Any], concurrency: int = 1) -> dict[str, Any]:
    return replay(what, plan, Parts(branches=True), concurrency=concurrency, clock=lambda: 0.0).figures()


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, written = tmp_path / "r.jsonl", recording(repeats=True)
    written.write(path)
    assert Recording.read(path) == written
    path.write_text('{"model": "m"}\n')
    with pytest.raises(ValueError, match="no recording"):
        Recording.read(path)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_replaying_tells_tokens_per_step_speed_up_and_acceptance(concurrency: int) -> None:
    what = recording(repeats=True)
    figures = run(what, NGRAM, concurrency)
    assert figures["tokens"] == 6 * 50
    assert figures["tokens_per_step"] > 4
    assert figures["speed_up"] > (2.5 if concurrency == 1 else 1.1)
    assert figures["accepted_tokens"]["ngram"] > 200
    assert 0.9 < figures["acceptance"]["ngram"][0] <= 1.0
    assert figures["speed_up"] <= figures["hindsight_speed_up"] <= oracle(what, concurrency) + 1e-9


def test_without_drafts_the_replay_is_plain_decoding() -> None:
    for concurrency in (1, 4):
        figures = run(recording(repeats=True), {"method": "off"}, concurrency)
        assert (figures["tokens_per_step"], figures["speed_up"]) == (1.0, 1.0)
    assert plain_seconds(recording(repeats=True), 1) == 300.0


def test_text_that_nobody_foresees_is_not_slower_in_a_replay() -> None:
    for plan in (NGRAM, {"method": "suffix"}, {"method": "auto"}):
        assert run(recording(repeats=False), plan)["speed_up"] > 0.98


def test_plans_are_replayed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "r.jsonl", tmp_path / "r.json"
    recording(repeats=True).write(path)
    arguments = ["replay", str(path), "--speculative-config", json.dumps(NGRAM), "--json", str(out)]
    picture = tmp_path / "r.png"
    assert benchmark_drafts.main([*arguments, "--concurrency", "1,2", "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "oracle" in text and "ngram" in text
    (one,) = json.loads(out.read_text())["recordings"]
    assert set(one["oracle"]) == {"1", "2"} and len(one["plans"]) == 2
    assert picture.stat().st_size > 1000
    assert benchmark_drafts.main(["replay", str(path), "--speculative-config", '{"method": "x"}']) == 2


def test_streams_are_recorded_from_a_model_and_replayed(tmp_path: Path) -> None:
    model = save_chain_model(tmp_path / "chain", noise=0.5)
    data = tmp_path / "ids.jsonl"
    data.write_text(
        "".join(
            json.dumps(
                {"id": str(i), "messages": [{"role": "user", "content": "ab ab ab"}], "max_tokens": 12}
            )
            + "\n"
            for i in range(2)
        )
    )
    out = tmp_path / "r.jsonl"
    arguments = ["--model", str(model), "--threads", "1", "--dataset-path", str(data)]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    assert benchmark_drafts.main(["record", str(out), *arguments]) == 0
    read = Recording.read(out)
    assert [len(stream.output_token_ids) for stream in read.streams] == [12, 12]
    assert read.calibration.rows[0] == 1
    assert run(read, NGRAM)["tokens"] == 24


def test_the_prediction_follows_from_acceptance_and_costs() -> None:
    times = {1: 1.0, 2: 1.1, 3: 1.2, 2 * 3: 2.0}
    assert benchmark_mtp.predicted([0.5, 0.4], 0, times, 1, 0.0) == 1.0
    assert benchmark_mtp.predicted([0.5, 0.4], 2, times, 1, 0.3) == pytest.approx(1.7 / 1.5)
    assert benchmark_mtp.predicted([1.0, 1.0], 2, times, 2, 0.2) == pytest.approx(3 * 1.1 / 2.2)


def test_predicted_and_measured_stand_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_chain_model(tmp_path / "chain", noise=0.5)
    flags = ["--model", str(model), "--threads", "1", "--rounds", "2", "--max-tokens", "16", "--quiet", "0"]
    args = benchmark_mtp.build_parser().parse_args([*flags, "--model-steps", "2", "--kv-blocks", "64"])
    variants = benchmark_mtp.make_variants(args)
    args.now = 2
    items = [Item(str(i), token_ids=chain_prompt(i, 12)) for i in range(3)]
    result = benchmark_mtp.measure(args, variants, items)
    benchmark_mtp.show(result)
    text = capsys.readouterr().out
    assert "mtp, always 2" in text and "3 of 3" in text
    assert len(result["acceptance"]) == 2 and all(rate > 0.3 for rate in result["acceptance"])
    assert {one["name"]: one["same_outputs"] for one in result["variants"]} == dict.fromkeys(
        ["mtp, always 1", "mtp, always 2", "mtp", "mtp with_ngram", "auto"], 3
    )
    assert all(one["predicted"] > 0 for one in result["variants"] if one["steps"])
    assert plots.plot_prediction(tmp_path / "p.png", result["variants"], "title")


def test_a_sweep_measures_every_concurrency_against_speculation_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer() as server:
        flags = ["--base-url", server.url, "--concurrency", "1,3", "--rounds", "2", "--num-prompts", "2"]
        flags += ["--result-dir", str(tmp_path), "--result-filename", "s.json", "--disable-tqdm"]
        assert benchmark_sweep.main(flags) == 0
    results = json.loads((tmp_path / "s.json").read_text())["sweep"]
    assert [(one["concurrency"], one["num_prompts"]) for one in results] == [(1, 2), (3, 6)]
    assert all(one["same_outputs"] == one["compared_outputs"] for one in results)
    assert (tmp_path / "s.png").stat().st_size > 1000
    assert capsys.readouterr().out.count(" at once: ") == 2


def test_mixed_prompts_take_turns() -> None:
    ids = [item.id for item in load_dataset("prompts", DatasetOptions(path=Path("mixed"), num_prompts=4))]
    assert [one.split("-")[0] for one in ids] == ["chat", "edit", "code", "chat"]


def test_every_script_of_outrider_bench_is_there() -> None:
    assert {"serving", "sweep", "drafts", "mtp", "kernels", "engine", "peers"} <= set(SCRIPTS)
    for name in SCRIPTS:
        assert find_script(name).is_file()
    assert isinstance(benchmark_sweep.parse(["--concurrency", "2"]), argparse.Namespace)
