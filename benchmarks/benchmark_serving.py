"""Measures an OpenAI-compatible server under load.

    python benchmarks/benchmark_serving.py --base-url http://127.0.0.1:8000
    python benchmarks/benchmark_serving.py --config benchmarks/yaml/smollm2-135m-ngram.yaml --baseline

The second form needs no server: it starts `outrider serve`, measures, and stops it again. With
--baseline the same load also runs with speculation off, in alternating rounds, and ratios are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import prometheus, report
from benchmarks.client import Client, Load, Record, Target, first_model, run_load
from benchmarks.machine import describe_machine
from benchmarks.metrics import METRICS, Run, parse_goodput, summarize
from benchmarks.server_process import (
    ServerFailed,
    ServerProcess,
    free_port,
    is_listening,
    outrider_command,
    stop_on_sigterm,
)
from benchmarks.serving_arguments import build_parser, check, request_fields
from benchmarks.workload import DatasetOptions, Item, arrival_offsets, load_dataset

OFF = '{"method": "off"}'
CONFIGURED, BASELINE = "configured", "speculation off"


@dataclass(frozen=True, slots=True)
class Variant:
    """One side of the comparison. `salted`: every round gets a prefix-cache namespace of its own."""

    name: str
    target: Target
    salted: bool

    def for_round(self, label: str) -> Target:
        if not self.salted:
            return self.target
        return replace(self.target, fields={**self.target.fields, "cache_salt": f"benchmark-{label}"})


def prepare_items(args: argparse.Namespace) -> list[Item]:
    options = DatasetOptions(
        path=args.dataset_path,
        num_prompts=args.num_prompts,
        seed=args.seed,
        shuffle=args.shuffle,
        output_len=args.sharegpt_output_len,
        random_input_len=args.random_input_len,
        random_output_len=args.random_output_len,
        random_range_ratio=args.random_range_ratio,
    )
    return load_dataset(args.dataset_name, options)


def start_servers(args: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, str]:
    """Variant name -> base URL. Starts what is not running; `stack` stops it again."""
    wants_server = bool(args.config or args.speculative_config or args.server_args)
    if is_listening(args.base_url):
        if wants_server:
            print(
                f"note: a server already answers at {args.base_url}; it is measured as it is, and --config, "
                "--speculative-config and --server-args are not applied",
                file=sys.stderr,
            )
        return dict.fromkeys([CONFIGURED, *([BASELINE] if args.baseline else [])], args.base_url)
    if not wants_server:
        raise SystemExit(
            f"nobody answers at {args.base_url}: start a server, or give --config or --speculative-config "
            "to have one started"
        )
    urls = {CONFIGURED: _start(args, stack, args.port, args.speculative_config)}
    if args.baseline:
        urls[BASELINE] = _start(args, stack, free_port(args.host), OFF)
    return urls


def _start(
    args: argparse.Namespace, stack: contextlib.ExitStack, port: int, speculative_config: str | None
) -> str:
    url = f"http://{args.host}:{port}"
    command = outrider_command(args.host, port, args.model, args.config, speculative_config, args.server_args)
    log = Path(tempfile.gettempdir()) / f"outrider-benchmark-{port}.log"
    print(f"starting {' '.join(command[1:])}", file=sys.stderr)
    server = stack.enter_context(ServerProcess(command, url, log, start_timeout_s=args.start_timeout))
    print(f"ready after {server.ready_s:.1f} s", file=sys.stderr)
    return url


async def make_variants(args: argparse.Namespace, urls: Mapping[str, str], started: bool) -> list[Variant]:
    """The targets to measure. On one server, the baseline is asked for request by request."""
    fields = request_fields(args)
    variants = []
    for name, url in urls.items():
        model = (
            args.served_model_name
            or (None if started else args.model)
            or await first_model(url, args.api_key)
        )
        extra = {"speculation": {"method": "off"}} if name == BASELINE and not started else {}
        target = Target(url, args.backend, model, {**fields, **extra}, args.endpoint, args.api_key)
        variants.append(Variant(name, target, salted=started or args.baseline))
    return variants


async def measure(
    args: argparse.Namespace, variants: Sequence[Variant], items: Sequence[Item]
) -> dict[str, list[Run]]:
    """Warm up, then `rounds` rounds over all variants, the order turned round each time."""
    offsets = arrival_offsets(len(items), args.request_rate, args.burstiness, args.seed)
    load = Load(items, offsets, args.max_concurrency, args.seed)
    runs: dict[str, list[Run]] = {variant.name: [] for variant in variants}
    async with Client(timeout_s=args.request_timeout) as client:
        for variant in variants:
            await _warm_up(client, variant, items, args.num_warmups)
        with _progress(args.disable_tqdm, len(items) * len(variants) * args.rounds) as bar:
            for number in range(args.rounds):
                for variant in variants if number % 2 == 0 else reversed(variants):
                    bar.set_description(variant.name)
                    target = variant.for_round(f"{args.seed}-{number}")
                    before = await prometheus.scrape(target.base_url)
                    records, duration = await run_load(client, target, load, lambda record: bar.update())
                    gained = prometheus.gained(before, await prometheus.scrape(target.base_url))
                    sent = [None if item.token_ids is None else len(item.token_ids) for item in items]
                    runs[variant.name].append(Run(records, duration, sent, gained))
    return runs


async def _warm_up(client: Client, variant: Variant, items: Sequence[Item], count: int) -> None:
    """The first requests, not counted; the first failure ends the benchmark with what the server said."""
    target = variant.for_round("warm-up")
    records = await asyncio.gather(*(client.send(target, item) for item in items[:count]))
    for record in records:
        if not record.ok:
            raise SystemExit(f"warm-up request {record.item_id} to {target.url} failed: {record.error}")


def _progress(disabled: bool, total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="req", disable=disabled, file=sys.stderr)


def same_outputs(runs: Mapping[str, Sequence[Run]]) -> tuple[int, int]:
    """(requests whose text is equal on both sides, requests finished on both sides)."""
    pairs: list[tuple[Record, Record]] = []
    for base, now in zip(runs[BASELINE], runs[CONFIGURED], strict=True):
        pairs += [(a, b) for a, b in zip(base.records, now.records, strict=True) if a.ok and b.ok]
    return sum((a.text, a.finish_reason) == (b.text, b.finish_reason) for a, b in pairs), len(pairs)


def build_result(
    args: argparse.Namespace, variants: Sequence[Variant], runs: Mapping[str, Sequence[Run]]
) -> dict[str, Any]:
    """The result file: settings, the configured side's figures flat, and the baseline's under `baseline`."""
    goodput, percentiles, metrics = (
        parse_goodput(args.goodput),
        args.metric_percentiles,
        args.percentile_metrics,
    )

    def figures(of: Sequence[Run]) -> dict[str, Any]:
        result = summarize(of, metrics, percentiles, goodput)
        counters = {key: sum(run.counters.get(key, 0) for run in of) for run in of for key in run.counters}
        result["server_means_s"] = prometheus.histogram_means(counters)
        result["rounds"] = [summarize([run], metrics, percentiles, goodput) for run in of]
        if args.save_detailed:
            result.update(report.details(of))
        return result

    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "backend": args.backend,
        "model_id": variants[0].target.model,
        "tokenizer_id": variants[0].target.model,
        "dataset": {"name": args.dataset_name, "path": str(args.dataset_path) if args.dataset_path else None},
        "num_prompts": len(runs[CONFIGURED][0].records),
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        "request_fields": dict(variants[0].target.fields),
        "server": {
            "config": args.config,
            "speculative_config": args.speculative_config,
            "args": args.server_args,
        },
        "machine": describe_machine(),
        "metadata": dict(pair.split("=", 1) for pair in args.metadata),
        **figures(runs[CONFIGURED]),
    }
    if BASELINE in runs:
        result["baseline"] = figures(runs[BASELINE])
        result["ratios"] = report.compare(
            list(zip(result["baseline"]["rounds"], result["rounds"], strict=True))
        )
        result["same_outputs"], result["compared_outputs"] = same_outputs(runs)
    return result


def show(args: argparse.Namespace, result: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]) -> None:
    sides = (
        {BASELINE: result["baseline"], CONFIGURED: result} if "baseline" in result else {CONFIGURED: result}
    )
    rate, places = result["request_rate"], result["max_concurrency"] or "unlimited"
    title = f"{result['model_id']}, {args.dataset_name}, {result['num_prompts']} requests"
    title += f", rate {rate}/s, concurrency {places}"
    statistics = ["mean", "median", *(f"p{percentile:g}" for percentile in args.metric_percentiles)]
    print(f"\n{title}\n\n{report.serving_tables(sides, statistics)}")
    if "ratios" in result:
        print(f"\n{report.ratio_table(result['ratios'], len(result['rounds']))}")
        same, compared = result["same_outputs"], result["compared_outputs"]
        print(f"same output with speculation on and off: {same} of {compared}")
    _show_problems(result, runs)
    if args.no_save:
        return
    stem = report.result_stem(args.backend, args.request_rate, args.max_concurrency, str(result["model_id"]))
    path = args.result_dir / (args.result_filename or f"{stem}.json")
    report.write_json(path, result)
    picture = path.with_suffix(".png")
    drawn = report.plot(picture, {name: runs[name] for name in sides}, title)
    print(f"\nwritten: {path}" + (f" and {picture}" if drawn else " (no plot: matplotlib is not installed)"))


def _show_problems(result: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]) -> None:
    if result["without_usage"]:
        count = result["without_usage"]
        print(f"warning: {count} answers had no usage; their output chunks were counted as tokens")
    errors = {
        record.error for side in runs.values() for run in side for record in run.records if record.error
    }
    for error in sorted(errors)[:5]:
        print(f"failed: {error}")


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser(METRICS).parse_args(argv)
    try:
        check(args)
        items = prepare_items(args)
        with stop_on_sigterm(), contextlib.ExitStack() as stack:
            started = not is_listening(args.base_url)
            urls = start_servers(args, stack)
            variants = asyncio.run(make_variants(args, urls, started))
            runs = asyncio.run(measure(args, variants, items))
        result = build_result(args, variants, runs)
    except (ValueError, ServerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(args, result, runs)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
