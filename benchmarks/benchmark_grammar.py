"""What a grammar costs, and what its forced tokens give: JSON answers beside free text of the same length.

    python benchmarks/benchmark_grammar.py --methods off,ngram,auto

Runs the engine in this process, greedily. Every prompt of the set `json` is answered under its schema and, as
free text, with exactly as many tokens. The two forms and the methods take turns. Drafts come from the request
alone, so that no round profits from the one before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine, physical_cores, wait_until_quiet, watch_others
from benchmarks.report import format_table, number, write_json
from benchmarks.workload import DatasetOptions, load_dataset

FORMS = ("json", "text")


def answer(llm: Any, form: str, items: Sequence[Any], lengths: Sequence[int] | None) -> tuple[float, Any]:
    """Seconds and the answers: under the schema, or free and of the given lengths."""
    from outrider import GrammarSpec, SamplingParams

    params = []
    for i, item in enumerate(items):
        if form == "json":
            grammar = GrammarSpec.json_schema(item.fields["response_format"]["json_schema"]["schema"])
            params.append(SamplingParams(temperature=0, max_tokens=item.max_tokens, grammar=grammar))
        else:
            assert lengths is not None
            params.append(SamplingParams(temperature=0, max_tokens=lengths[i], ignore_eos=True))
    begin = time.perf_counter()
    completions = llm.chat([item.messages for item in items], params, use_progress_bar=False)
    return time.perf_counter() - begin, completions


def figures_of(seconds: Sequence[float], completions: Sequence[Any]) -> dict[str, Any]:
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    num_steps = sum(completion.speculation["steps"] for completion in completions)
    by_source: dict[str, list[int]] = {}
    for completion in completions:
        for source, counts in completion.speculation["by_source"].items():
            mine = by_source.setdefault(source, [0, 0])
            mine[:] = [mine[0] + counts["draft_tokens"], mine[1] + counts["accepted_tokens"]]
    median = statistics.median(seconds)
    return {
        "tokens": num_tokens,
        "seconds": median,
        "tokens_per_s": num_tokens / median,
        "ms_per_token": 1e3 * median / num_tokens,
        "tokens_per_step": num_tokens / num_steps,
        "by_source": by_source,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    from outrider import LLM

    items = load_dataset("prompts", DatasetOptions(path=Path("json"), num_prompts=args.num_prompts))
    engines = {}
    for method in args.methods:
        speculative: dict[str, Any] = {"method": method}
        if method in ("auto", "suffix"):
            speculative["draft_memory"] = "request"
        engines[method] = LLM(
            args.model,
            num_threads=args.threads,
            max_num_seqs=args.batch,
            num_kv_blocks=args.kv_blocks,
            speculative_config=speculative,
        )
    lengths: list[int] | None = None
    seconds: dict[tuple[str, str], list[float]] = {}
    last: dict[tuple[str, str], Any] = {}
    quiet = wait_until_quiet(limit_s=args.quiet)
    with watch_others() as others:
        for repetition in range(args.repetitions + 1):  # the first is a warm-up: grammars are compiled
            for method in args.methods if repetition % 2 == 0 else args.methods[::-1]:
                for form in FORMS:
                    took, completions = answer(engines[method], form, items, lengths)
                    if form == "json":
                        lengths = [len(completion.token_ids) for completion in completions]
                    if repetition:
                        seconds.setdefault((method, form), []).append(took)
                    last[method, form] = completions
    same = all(
        [c.token_ids for c in last[method, form]] == [c.token_ids for c in last[args.methods[0], form]]
        for method in args.methods
        for form in FORMS
    )
    return {
        "model": args.model,
        "threads": args.threads,
        "batch": args.batch,
        "machine": describe_machine(),
        "quiet_at_start": quiet,
        "others_cores": others.cores,
        "same_tokens": same,
        "rows": [
            {"method": method, "form": form, **figures_of(seconds[method, form], last[method, form])}
            for method, form in seconds
        ],
    }


def show(result: Mapping[str, Any]) -> None:
    text = {one["method"]: one["tokens_per_s"] for one in result["rows"] if one["form"] == "text"}
    rows = [
        [
            f"{one['method']} {one['form']}",
            str(one["tokens"]),
            number(one["tokens_per_s"], 1),
            number(one["ms_per_token"], 2),
            number(one["tokens_per_step"], 2),
            number(one["tokens_per_s"] / text[one["method"]], 2),
            ", ".join(f"{name} {kept}/{drafted}" for name, (drafted, kept) in one["by_source"].items()),
        ]
        for one in result["rows"]
    ]
    columns = ["tokens", "tok/s", "ms/token", "tokens/step", "of text", "accepted/drafted"]
    print(
        f"{result['model']}, {result['threads']} threads, {result['batch']} at once; median of "
        f"the rounds; other processes used {result['others_cores']:.2f} cores; "
        f"{'the same tokens everywhere' if result['same_tokens'] else 'THE TOKENS DIFFER'}\n\n"
        f"{format_table(rows, ['method, form', *columns])}"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmark_grammar.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["off", "ngram", "auto"])
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--kv-blocks", type=int, default=256, help="cache blocks of each engine")
    parser.add_argument("--quiet", type=float, default=30, help="seconds to wait for other work to end first")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    result = run(args)
    show(result)
    if args.json is not None:
        write_json(args.json, result)
    return 0 if result["same_tokens"] else 1


if __name__ == "__main__":
    sys.exit(main())
