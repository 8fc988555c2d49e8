"""Outrider beside other engines: the same file, token ids and threads, taking turns in one run.

    python benchmarks/benchmark_peers.py --peer llama-server=/path/to/llama-server

Greedy, natural end of text. A measurement during which other processes used more than --max-others cores
is left out of the medians, and the table says how many were.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.client import Record
from benchmarks.machine import (
    describe_machine,
    peak_memory_mib,
    physical_cores,
    wait_until_quiet,
    watch_others,
)
from benchmarks.metrics import decode_rate, output_len
from benchmarks.peers import RunningPeer, find_peers, outrider_peer
from benchmarks.report import format_table, number, write_json
from benchmarks.server_process import ServerFailed, stop_on_sigterm
from benchmarks.workload import DatasetOptions, Item, load_dataset

SETS = ("chat", "edit", "code")
TASKS = ("prefill", *SETS, "batch")
FIRST_VARIED_ID = 1000  # the prefill prompt's second token: another one each time, so that no cache knows it

# Figure, label, digits, is more better?
FIGURES = (
    ("chat", "chat tok/s", 1, True),
    ("edit", "edit tok/s", 1, True),
    ("code", "code tok/s", 1, True),
    ("ttft", "TTFT s", 3, False),
    ("prefill", "prefill tok/s", 0, True),
    ("batch", "batch tok/s", 1, True),
)


def load_token_ids(model: str) -> dict[str, list[Item]]:
    """Every prompt set as token ids, by the model's own chat template and tokenizer."""
    from outrider.models.loader import load_tokenizer

    tokenizer = load_tokenizer(model)
    sets = {}
    for name in (*SETS, "prefill"):
        items = load_dataset("prompts", DatasetOptions(path=Path(name)))
        sets[name] = [
            Item(
                item.id,
                token_ids=tokenizer.encode(
                    tokenizer.apply_chat_template(item.messages or []), add_special_tokens=False
                ),
                max_tokens=item.max_tokens,
            )
            for item in items
        ]
    return sets


class Measurements:
    """Rows as they come; medians over the undisturbed ones."""

    def __init__(self, max_others: float) -> None:
        self.max_others = max_others
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        self.rows.append(row)

    def values(self, peer: str, figure: str) -> list[float]:
        """The undisturbed values; all of them when every one was disturbed."""
        rows = [row for row in self.rows if row["peer"] == peer and figure in row]
        quiet = [row for row in rows if row["others_cores"] <= self.max_others]
        return [row[figure] for row in quiet or rows]

    @property
    def disturbed(self) -> int:
        return sum(row["others_cores"] > self.max_others for row in self.rows)

    def medians(self, peers: Sequence[str]) -> dict[str, dict[str, dict[str, float] | None]]:
        def spread(values: list[float]) -> dict[str, float] | None:
            if not values:
                return None
            figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            return {**figures, "n": len(values)}

        return {peer: {key: spread(self.values(peer, key)) for key, *_ in FIGURES} for peer in peers}


def figures_of(task: str, records: Sequence[Record], prompt_tokens: int, seconds: float) -> dict[str, float]:
    """What one measurement says; nothing for an answer too short to have a rate."""
    if task == "prefill":
        return {"ttft": seconds, "prefill": prompt_tokens / seconds}
    if task == "batch":
        return {"batch": sum(map(output_len, records)) / seconds}
    rate = decode_rate(records) if output_len(records[0]) >= 8 else None
    return {} if rate is None else {task: rate}


class Schedule:
    """What each repetition asks of every peer: the same prompts, others in the next repetition."""

    def __init__(self, sets: Mapping[str, list[Item]], args: argparse.Namespace) -> None:
        self._sets = sets
        self._args = args
        self._varied = FIRST_VARIED_ID + int(time.time()) % 20000

    def jobs(self, task: str, repetition: int) -> list[list[Item]]:
        """Groups of items that are sent at once."""
        if task == "prefill":
            return [[self._fresh_prefill()]]
        if task == "batch":
            chosen = self._sets["chat"][: self._args.concurrency]
            return [
                [
                    Item(item.id, token_ids=item.token_ids, max_tokens=self._args.batch_tokens)
                    for item in chosen
                ]
            ]
        items, each = self._sets[task], self._args.prompts
        chosen = [items[(repetition * each + i) % len(items)] for i in range(each)]
        most = self._args.max_tokens
        return [
            [Item(item.id, token_ids=item.token_ids, max_tokens=min(item.max_tokens or most, most))]
            for item in chosen
        ]

    def _fresh_prefill(self) -> Item:
        item = self._sets["prefill"][0]
        ids = list(item.token_ids or [])
        self._varied += 1
        ids[1] = self._varied
        return Item(item.id, token_ids=ids, max_tokens=1)


async def measure(
    running: Mapping[str, RunningPeer],
    schedule: Schedule,
    args: argparse.Namespace,
    log: Callable[[str], None],
) -> tuple[Measurements, dict[str, dict[str, str]]]:
    """(measurements, peer -> prompt id -> text). In each task the peers take turns, in changing order."""
    found = Measurements(args.max_others)
    texts: dict[str, dict[str, str]] = {name: {} for name in running}
    for repetition in range(args.repetitions):
        for task in args.tasks:
            order = list(running) if repetition % 2 == 0 else list(running)[::-1]
            for name in order:
                jobs = schedule.jobs(task, repetition)
                quiet = wait_until_quiet(limit_s=args.quiet)
                for items in jobs:
                    with watch_others(running[name].server.pid) as others:
                        begin = time.perf_counter()
                        records = await running[name].generate(items)
                        seconds = time.perf_counter() - begin
                    figures = figures_of(task, records, len(items[0].token_ids or []), seconds)
                    found.add(
                        peer=name, task=task, repetition=repetition, prompt=items[0].id, quiet_before=quiet,
                        others_cores=others.cores, tokens=sum(map(output_len, records)), **figures,
                    )  # fmt: skip
                    if task in SETS:
                        texts[name].setdefault(items[0].id, records[0].text)
        log(f"repetition {repetition + 1} of {args.repetitions} done")
    return found, texts


def same_texts(texts: Mapping[str, Mapping[str, str]], reference: str) -> dict[str, tuple[int, int]]:
    """Peer -> (prompts whose text equals the reference's, prompts answered by both)."""
    result = {}
    for name, answers in texts.items():
        both = [key for key in answers if key in texts[reference]]
        result[name] = (sum(answers[key] == texts[reference][key] for key in both), len(both))
    return result


def run(args: argparse.Namespace) -> dict[str, Any]:
    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    from outrider.models.loader import resolve_model

    model = str(resolve_model(args.model))
    sets = load_token_ids(model)
    peers = [outrider_peer(method) for method in args.speculation] + find_peers(
        dict(args.peer), args.peers_file
    )
    with stop_on_sigterm(), contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-peers-")))
        running = {}
        for peer in peers:
            slots = max(args.concurrency, 1)
            one = RunningPeer(peer, model, args.threads, slots, args.context, logs)
            stack.enter_context(one.server)
            asyncio.run(one.prepare())
            running[peer.name] = one
            log(f"{peer.name} ready after {one.server.ready_s:.1f} s")
        found, texts = asyncio.run(measure(running, Schedule(sets, args), args, log))
        memory = {name: peak_memory_mib(one.server.pid) for name, one in running.items()}
    names = list(running)
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": describe_machine(),
        "model": args.model,
        "threads": args.threads,
        "repetitions": args.repetitions,
        "prompt_tokens_prefill": len(sets["prefill"][0].token_ids or []),
        "peers": found.medians(names),
        "ready_s": {name: one.server.ready_s for name, one in running.items()},
        "peak_memory_mib": memory,
        "same_texts_as_first": same_texts(texts, names[0]),
        "disturbed": found.disturbed,
        "measurements": found.rows,
    }


def show(result: Mapping[str, Any]) -> None:
    names = list(result["peers"])

    def cell(figures: Mapping[str, float] | None, digits: int) -> str:
        if figures is None:
            return "-"
        low, high = number(figures["min"], digits), number(figures["max"], digits)
        return f"{number(figures['median'], digits)} ({low}-{high})"

    rows = []
    for name in names:
        same, compared = result["same_texts_as_first"][name]
        rows.append(
            [name]
            + [cell(result["peers"][name][key], digits) for key, _, digits, _ in FIGURES]
            + [
                number(result["ready_s"][name], 1),
                number(result["peak_memory_mib"][name], 0),
                f"{same}/{compared}",
            ]
        )
    header = ["median (min-max)", *(label for _, label, _, _ in FIGURES), "ready s", "peak MiB", "same text"]
    print(
        f"\n{result['model']}, {result['threads']} threads, {result['repetitions']} repetitions, "
        f"prefill of {result['prompt_tokens_prefill']} tokens; left out as disturbed: "
        f"{result['disturbed']} of {len(result['measurements'])} measurements\n\n{format_table(rows, header)}"
    )
    if len(names) > 1:
        print(f"\n{ratio_table(result['peers'])}")


def ratio_table(peers: Mapping[str, Mapping[str, Mapping[str, float] | None]]) -> str:
    """How many times as fast the first is as each other, by medians (times are inverted)."""
    first, *others = peers
    rows = []
    for name in others:
        cells = [f"{first} / {name}"]
        for key, _, _, more_is_better in FIGURES:
            ours, theirs = peers[first][key], peers[name][key]
            if ours is None or theirs is None:
                cells.append("-")
            else:
                ratio = ours["median"] / theirs["median"]
                cells.append(f"{ratio if more_is_better else 1 / ratio:.2f}x")
        rows.append(cells)
    return format_table(rows, ["times as fast", *(label for _, label, _, _ in FIGURES)])


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"want NAME=PATH, got {text!r}")
    return name, value


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmark_peers.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="a .gguf file, or the built-in model")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument(
        "--speculation", type=_names, default=["off", "ngram"], help="Outrider's methods to run"
    )
    parser.add_argument("--peer", type=_pair, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--peers-file", type=Path, help="JSON that describes further peers")
    parser.add_argument("--tasks", type=_names, default=list(TASKS), help=",".join(TASKS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each set in a repetition")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--batch-tokens", type=int, default=128, help="tokens out of each request of a batch")
    parser.add_argument("--context", type=int, default=2048, help="tokens a request may have")
    parser.add_argument("--quiet", type=float, default=45, help="most seconds to wait for other work to end")
    parser.add_argument("--max-others", type=float, default=0.2, help="cores others may use in a measurement")
    parser.add_argument("--json", type=Path, help="also write figures and measurements there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if set(args.tasks) - set(TASKS):
            raise ValueError(f"--tasks knows {', '.join(TASKS)}; got {', '.join(args.tasks)}")
        result = run(args)
    except (ValueError, ServerFailed, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    if args.json is not None:
        write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
