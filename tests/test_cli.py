"""The command line: what it says, what it answers, how it fails."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import TEXT, FakeEngine, FakeTokenizer

import outrider
from outrider.entrypoints import bench, doctor
from outrider.entrypoints.cli import COMMANDS, main
from outrider.entrypoints.terminal import TokenWriter

ROOT = Path(outrider.__file__).resolve().parents[1]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Commands that load a model get this one."""
    import outrider.engine.factory as factory

    tokenizer = FakeTokenizer()
    tokenizer.special_ids = frozenset()  # type: ignore[attr-defined]
    fake = FakeEngine()
    monkeypatch.setattr(factory, "load", lambda config: SimpleNamespace(tokenizer=tokenizer))
    monkeypatch.setattr(factory, "build_engine", lambda config, checkpoint: fake)
    return fake


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **env}, timeout=60
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence that a wrong command gets."""
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse ends by itself
        code = end.code  # type: ignore[assignment]
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


# --- help and errors --------------------------------------------------------------------------------


def test_help_lists_every_command_and_nothing_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert "quantize" not in text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"outrider {outrider.__version__}\n"


def test_help_and_the_server_module_import_nothing_heavy() -> None:
    heavy = "{'numpy', 'fastapi', 'pydantic', 'zmq', 'tokenizers', 'torch', 'yaml'}"
    for statement in (
        "from outrider.entrypoints.cli import main; main(['--help'])",
        "import outrider.entrypoints.api_server, outrider.entrypoints.arguments",
    ):
        result = python("-c", f"import sys; {statement}; sys.exit(str({heavy} & set(sys.modules)))")
        assert result.stderr.strip() == "set()"


@pytest.mark.parametrize(
    "command", [["-m", "outrider.entrypoints.api_server"], ["outrider/entrypoints/api_server.py"]]
)
def test_every_way_to_serve_takes_the_same_flags(command: Sequence[str]) -> None:
    result = subprocess.run(
        [sys.executable, *command, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    expected = python("-m", "outrider.entrypoints.cli", "serve", "--help")
    assert result.returncode == 0 and result.stdout == expected.stdout
    assert "--speculative-config" in result.stdout and "--port" in result.stdout


def test_wrong_commands_get_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean 'serve'" in refused(capsys, "serv")
    assert "did you mean --port" in refused(capsys, "serve", "--prt", "1")
    assert "max_num_seqs must be an integer" in refused(capsys, "serve", "--max-num-seqs", "x")
    assert "given twice" in refused(capsys, "serve", "a", "--model", "b")
    assert "cannot read configuration file" in refused(capsys, "serve", "--config", "/no.yaml")
    assert "not offered by this version" in refused(capsys, "serve", "--tensor-parallel-size", "2")
    bad = tmp_path / "bad.yaml"
    bad.write_text("port: [")
    assert "not valid YAML" in refused(capsys, "serve", "--config", str(bad))
    assert "--prompt or -f" in refused(capsys, "generate")
    assert "there is no benchmark 'nothing'" in refused(capsys, "bench", "nothing")
    assert "no such directory or file" in refused(capsys, "pull", "./nowhere")


def test_a_flag_can_be_given_in_every_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.entrypoints import api_server

    seen: list[Any] = []
    monkeypatch.setattr(api_server, "serve", lambda plan: seen.append(plan) or 0)
    arguments = ["m.gguf", "--port=1", "--no-enable-prefix-caching", "--enable-chunked-prefill", "--api-key"]
    arguments += ["a", "--api-key", "b", "--speculative-config", '{"method": "off"}', "--metrics-port", "9"]
    assert main(["serve", *arguments]) == 0
    plan = seen[0]
    assert plan.engine.model == "m.gguf" and plan.server.port == 1 and plan.server.api_key == ("a", "b")
    assert not plan.engine.enable_prefix_caching and plan.engine.enable_chunked_prefill
    assert plan.engine.speculative_config.method == "off"
    assert len(plan.warnings) == 1 and plan.warnings[0].startswith("metrics_port (flag)")


def test_tracebacks_are_for_debugging_only(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00 cut off")
    command = ("-m", "outrider.entrypoints.cli", "generate", str(broken), "--prompt", "x")
    result = python(*command)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "broken.gguf" in result.stderr and result.stderr.count("\n") == 1
    assert "Traceback" in python(*command, OUTRIDER_DEBUG="1").stderr


@pytest.mark.parametrize("name", ["missing.gguf", "cut.gguf"])
def test_a_server_without_a_usable_model_says_so_and_ends(tmp_path: Path, name: str) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    result = python("-m", "outrider.entrypoints.cli", "serve", str(tmp_path / name), "--port", "0")
    assert result.returncode in (1, 2) and "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("outrider: error:") and name in last


# --- generate and chat ----------------------------------------------------------------------------------


def test_generate_answers_prompts_as_json_lines(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--temperature", "0", "--max-tokens", "9"]
    assert main(["generate", "--prompt", "a", "--prompt", "b", *flags]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["index"] for record in records] == [0, 1]
    assert all(record["text"] == "The quick" and record["finish_reason"] == "length" for record in records)
    assert records[0]["usage"] == {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10}
    assert records[0]["speculation"]["steps"] > 0
    assert main(["generate", "--prompt", "a", "--chat", "--text", *flags]) == 0
    assert capsys.readouterr().out == "The quick\n"


def test_generate_reads_requests_from_a_file_and_repeats_by_seed(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [
        {"prompt": "x", "n": 2, "max_tokens": 5},
        {"messages": [{"role": "user", "content": "y"}], "seed": 3},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(map(json.dumps, lines)))
    arguments = ["generate", "-f", str(source), "-o", str(target), "--max-tokens", "7"]
    assert main(arguments) == 0
    records = {record["index"]: record for record in map(json.loads, target.read_text().splitlines())}
    assert [len(text) for text in records[0]["text"]] == [5, 5] and len(records[1]["text"]) == 7
    assert records[1]["seed"] == 3
    before = target.read_text()
    assert main(arguments) == 0 and target.read_text() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "bad.jsonl:2: not valid JSON"), ("[]", "bad.jsonl:2: a line must be a JSON object"),
     ('{"prompt": "x", "max_tokens": 0}', "bad.jsonl:2: max_tokens must be at least 1"),
     ('{"prompt": "x", "functions": [1]}', "bad.jsonl:2: functions is not supported"),
     ('{"prompt": "x", "stream": true}', "bad.jsonl:2: stream has a meaning only for a server")],
)  # fmt: skip
def test_generate_names_the_bad_line_and_answers_none(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, message: str
) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text('{"prompt": "fine"}\n' + line)
    assert message in refused(capsys, "generate", "-f", str(source))


def test_chat_answers_each_line_and_shows_figures(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/what\n/reset\nAgain\n/exit\nnever\n"))
    assert main(["chat", "--temperature", "0", "--max-tokens", "19"]) == 0
    out = capsys.readouterr().out
    assert out.count(TEXT[:19].decode()) == 2 and out.count("tokens/s") == 2 and "/reset   " in out
    assert "ngram" in out and "\x1b" not in out


def test_an_interrupted_answer_is_cancelled_and_the_chat_goes_on(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter([False, False, True])
    real = engine.step

    def step() -> Any:
        if next(steps, False):
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(engine, "step", step)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAgain\n"))
    assert main(["chat", "--temperature", "0", "--max-tokens", "19"]) == 0
    out = capsys.readouterr().out
    assert "(stopped)" in out and "19 tokens" in out and engine.cancelled == ["0"]


def test_drafted_tokens_are_coloured_and_characters_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.special_ids = frozenset({256})  # type: ignore[attr-defined]
    writer = TokenWriter(tokenizer, colour=True)
    writer.write([*"aö\x1b\n".encode(), 256], ["model", "ngram", "ngram", "model", "model", "model"])
    out = capsys.readouterr().out
    assert out == "a\x1b[32mö\x1b[0m\N{REPLACEMENT CHARACTER}\n"


def test_chat_takes_commands(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["/set seed 5", "/set temperature hot", "/set heat 1", "/set top_p 7", "/set"]
    races = ["/race", "/system say nothing", "/race tell me", "/race lossy"]
    lines = ["/help", *settings, *races, "/stats", "/set seed", "/set"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", "--max-tokens", "30"]) == 0
    out = capsys.readouterr().out
    assert out.count("/race [TEXT]") == 1 and "there is nothing to race yet" in out
    assert "temperature stays as it was" in out and "there is no setting 'heat'" in out
    assert "top_p stays as it was" in out
    assert out.count("seed = 5") == 1 and out.count("seed = unset") == 1
    assert out.count("--- speculation off") == out.count("--- speculation on") == 2
    assert "the texts are equal, all 30 tokens" in out and "THE TEXTS DIFFER from token 1 on" in out
    assert "ngram: 4 of 10 drafted tokens accepted" in out and "1.50 times the speed" in out
    assert len({request.cache_salt for request in engine.requests}) == 4


@pytest.mark.server
def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    """In a real terminal, as the user's keyboard does it."""
    import pty

    script = tmp_path / "chat.py"
    script.write_text(CHAT_ON_A_FAKE)
    master, slave = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=slave, stdout=slave, stderr=slave, env=env,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    seen = ""

    def wait_for(text: str) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(master, 4096).decode()
        seen = seen.partition(text)[2]

    wait_for("> ")
    os.write(master, b"slow\n")
    wait_for("The quick")
    os.write(master, b"\x03")
    wait_for("(stopped)")
    wait_for("tokens/s")
    wait_for("> ")
    os.write(master, b"\x03")
    wait_for("> ")
    os.write(master, b"say: still here\n")
    wait_for("\nstill here")
    os.write(master, b"/exit\n")
    assert process.wait(20) == 0
    os.close(master)


CHAT_ON_A_FAKE = """
import time
from types import SimpleNamespace
from fake_engine import FakeEngine, FakeTokenizer
import outrider.engine.factory as factory
from outrider.entrypoints.cli import main

class Slow(FakeEngine):
    def step(self):
        time.sleep(0.02)
        return super().step()

tokenizer = FakeTokenizer()
tokenizer.special_ids = frozenset({256})
factory.load = lambda config: SimpleNamespace(tokenizer=tokenizer)
factory.build_engine = lambda config, checkpoint: Slow()
raise SystemExit(main(["chat", "--temperature", "0"]))
"""


# --- doctor, bench, pull -----------------------------------------------------------------------


def test_doctor_reports_and_its_code_tells_whether_one_can_serve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "/no/such/model.gguf"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  model" in out and "problem(s) to solve" in out
    assert all(name in out for name in ("python", "cpu", "memory", "kernels", "compiler", "extra", "port"))
    monkeypatch.setattr(doctor, "checks", lambda model: [doctor._python])
    assert main(["doctor"]) == 0
    assert "ready: outrider serve" in capsys.readouterr().out


def test_bench_finds_the_scripts_of_the_checkout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in bench.SCRIPTS)
    for name in bench.SCRIPTS:
        assert bench.find_script(name).is_file()
    monkeypatch.setattr(outrider, "__file__", str(tmp_path / "site" / "outrider" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert "part of the source checkout" in refused(capsys, "bench", "serving")


def test_pull_prints_the_path_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert main(["pull", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
