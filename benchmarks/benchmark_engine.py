"""What the engine adds to the model's step: scheduling, batching, sampling, drafting, output.

    python benchmarks/benchmark_engine.py --batch 1,8,32 --methods off,naive,ngram

Runs the engine in this process, on requests that decode past their natural end, and times the parts of
every step. The methods take turns. Steps that verify drafts are counted too: their model time is longer,
what the engine adds is what is shown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine, physical_cores, wait_until_quiet, watch_others
from benchmarks.report import format_table, number, write_json
from benchmarks.workload import DatasetOptions, load_dataset

# What is timed inside a step: part -> (attribute of the engine, method).
PARTS = {
    "model": ("runner", "run"),
    "sampler": ("sampler", "sample"),
    "schedule": ("scheduler", "schedule"),
    "update": ("scheduler", "update"),
    "observe": ("drafting", "observe"),
    "propose": ("drafting", "propose"),
}


@dataclass
class Stopwatch:
    """Seconds by part since the last `take`."""

    seconds: dict[str, float] = field(default_factory=dict)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin
            return result

        return timed

    def attach(self, engine: Any) -> None:
        for part, (owner, method) in PARTS.items():
            target = getattr(engine, owner)
            setattr(target, method, self.around(part, getattr(target, method)))

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken


def decode_steps(llm: Any, watch: Stopwatch, batch: int, steps: int) -> list[dict[str, float]]:
    """Seconds by part (and `step`, the whole) of `steps` steps in which `batch` requests decode."""
    from outrider.request import AddRequest, SamplingParams

    items = load_dataset("prompts", DatasetOptions(path=Path("chat"), num_prompts=batch))
    params = SamplingParams(max_tokens=100_000, temperature=0, ignore_eos=True)
    engine = llm.engine
    for item in items:
        text = llm.tokenizer.apply_chat_template(item.messages)
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        engine.add_request(AddRequest(item.id, ids, params, time.monotonic()))
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in engine.step() if output.token_ids}
    watch.take()
    measured = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        measured.append({"step": time.perf_counter() - begin, **watch.take()})
    engine.cancel([])
    return measured


def summary_of(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians in ms; `rest` is the step without its timed parts, `overhead` all but the model."""
    parts = {part: [one.get(part, 0.0) for one in measured] for part in PARTS}
    rest = [one["step"] - sum(one.get(part, 0.0) for part in PARTS) for one in measured]
    overhead = [one["step"] - one.get("model", 0.0) for one in measured]
    shares = [seconds / one["step"] for seconds, one in zip(overhead, measured, strict=True)]
    columns = {"step": [one["step"] for one in measured], **parts, "rest": rest, "overhead": overhead}
    figures = {name: statistics.median(values) * 1e3 for name, values in columns.items()}
    return {**figures, "overhead_share": statistics.median(shares)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    from outrider import LLM

    engines = {}
    for method in args.methods:
        llm = LLM(
            args.model,
            num_threads=args.threads,
            speculative_config={"method": method},
            num_kv_blocks=args.kv_blocks,
        )
        watch = Stopwatch()
        watch.attach(llm.engine)
        engines[method] = (llm, watch)
    quiet = wait_until_quiet(limit_s=args.quiet)
    measured: dict[tuple[int, str], list[dict[str, float]]] = {}
    with watch_others() as others:
        for repetition in range(args.repetitions):
            for batch in args.batch:
                for method in args.methods if repetition % 2 == 0 else args.methods[::-1]:
                    steps = decode_steps(*engines[method], batch, args.steps)
                    measured.setdefault((batch, method), []).extend(steps)
    return {
        "model": args.model,
        "threads": args.threads,
        "machine": describe_machine(),
        "quiet_at_start": quiet,
        "others_cores": others.cores,
        "rows": [
            {"batch": batch, "method": method, **summary_of(steps)}
            for (batch, method), steps in measured.items()
        ],
    }


def show(result: Mapping[str, Any]) -> None:
    columns = ["step", *PARTS, "rest", "overhead"]
    rows = [
        [
            f"{one['batch']} {one['method']}",
            *(number(one[name], 3) for name in columns),
            f"{one['overhead_share']:.1%}",
        ]
        for one in result["rows"]
    ]
    print(
        f"{result['model']}, {result['threads']} threads; median ms of a decode step; "
        f"other processes used {result['others_cores']:.2f} cores\n\n"
        f"{format_table(rows, ['batch, method', *columns, 'of the step'])}"
    )


def build_parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="benchmark_engine.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32], help="requests that decode at once")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["off", "naive", "ngram"])
    parser.add_argument("--steps", type=int, default=64, help="steps in each turn")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--kv-blocks", type=int, default=512, help="cache blocks of each engine")
    parser.add_argument("--quiet", type=float, default=30, help="seconds to wait for other work to end first")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    result = run(args)
    show(result)
    if args.json is not None:
        write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
