"""Throughput by concurrency, with speculation against without, in one alternating run.

    python benchmarks/benchmark_sweep.py --config benchmarks/yaml/smollm2-135m-sweep.yaml --dataset-path mixed

One server gets the same load in turns, as it is and with speculation off for every request, the order turned
round every round, first with one request at a time, then with two, and so on. (Two servers would differ by
where their memory lies.) It runs without prefix cache, which would help whoever comes second. Flags are those
of benchmark_serving.py; --num-prompts is the least number of requests, or twice the concurrency if that is
more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.benchmark_serving import (
    BASELINE,
    CONFIGURED,
    build_result,
    make_variants,
    measure,
    prepare_items,
    start_servers,
)
from benchmarks.machine import watch_others
from benchmarks.metrics import METRICS
from benchmarks.plots import plot_concurrency
from benchmarks.server_process import ServerFailed, is_listening, stop_on_sigterm
from benchmarks.serving_arguments import build_parser, check

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser(METRICS)
    parser.prog, parser.description = "benchmark_sweep.py", (__doc__ or "").split("\n")[0]
    parser.add_argument(
        "--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=list(CONCURRENCY),
        help="requests at once, one after the other: 1,2,4",
    )  # fmt: skip
    args = parser.parse_args(argv)
    args.baseline = True
    check(args)
    return args


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One result of benchmark_serving for each concurrency, on the same two servers."""
    results = []
    with stop_on_sigterm(), contextlib.ExitStack() as stack:
        alone = copy.copy(args)
        alone.baseline = False
        if not is_listening(args.base_url):
            alone.server_args = [*args.server_args, "--no-enable-prefix-caching"]
        (url,) = start_servers(alone, stack).values()
        urls = {CONFIGURED: url, BASELINE: url}
        variants = asyncio.run(make_variants(args, urls, started=False))
        for number, concurrency in enumerate(args.concurrency):
            one = copy.copy(args)
            one.max_concurrency = concurrency
            one.num_prompts = max(args.num_prompts or 8, 2 * concurrency)
            # Rounds of another concurrency find neither prefixes nor drafts of the ones before.
            one.seed = args.seed + 1000 * number
            with watch_others() as others:
                runs = asyncio.run(measure(one, variants, prepare_items(one)))
            result = build_result(one, variants, runs)
            result["concurrency"], result["others_cores"] = concurrency, others.cores
            results.append(result)
            print(line_of(result), flush=True)
    return results


def line_of(result: Mapping[str, Any]) -> str:
    """What one concurrency brought."""
    ratio = result["ratios"]["output_throughput"]
    speculation = result.get("speculation") or {}
    return (
        f"{result['concurrency']:>3} at once: {result['baseline']['output_throughput']:8.1f} -> "
        f"{result['output_throughput']:8.1f} tokens/s, x{ratio['median']:.3f} "
        f"({ratio['min']:.3f}-{ratio['max']:.3f}), "
        f"{speculation.get('mean_acceptance_length') or 1:.2f} tokens/step, same output "
        f"{result['same_outputs']} of {result['compared_outputs']}, failed {result['failed']}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        results = sweep(args)
    except (ValueError, ServerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not args.no_save:
        model = str(results[0]["model_id"])
        name = (
            args.result_filename
            or f"sweep-{report.result_stem(args.backend, args.request_rate, None, model)}"
        )
        path = args.result_dir / (name if name.endswith(".json") else f"{name}.json")
        report.write_json(path, {"sweep": results})
        title = f"{model}, {args.dataset_path or args.dataset_name}"
        drawn = plot_concurrency(path.with_suffix(".png"), results, title)
        print(f"written: {path}" + (f" and {path.with_suffix('.png')}" if drawn else ""))
    differs = any(result["same_outputs"] < result["compared_outputs"] for result in results)
    return 1 if differs or any(result["failed"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
