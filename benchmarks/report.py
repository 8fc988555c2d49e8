"""Shows results: a table for the terminal, a JSON file, a picture."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.metrics import LABELS, METRICS, TIME_METRICS, Run, request_metrics

# Figure of a summary, label, digits.
HEADLINE = (
    ("completed", "requests completed", 0),
    ("failed", "requests failed", 0),
    ("duration", "duration, s", 2),
    ("total_input_tokens", "prompt tokens", 0),
    ("total_cached_tokens", "  of them from the prefix cache", 0),
    ("total_output_tokens", "output tokens", 0),
    ("request_throughput", "requests/s", 2),
    ("request_goodput", "good requests/s", 2),
    ("output_throughput", "output tokens/s", 1),
    ("total_token_throughput", "prompt + output tokens/s", 1),
    ("mean_decode_throughput", "decode tokens/s of one stream", 1),
)
# What --baseline compares, round by round.
COMPARED = ("output_throughput", "mean_decode_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")


def format_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *others = row
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([line(header), rule, *map(line, rows)])


def number(value: Any, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def serving_tables(results: Mapping[str, Mapping[str, Any]], statistic_names: Sequence[str]) -> str:
    """Headline figures side by side, then the distribution of each metric, one block a variant."""
    names = list(results)
    shown = [row for row in HEADLINE if any(row[0] in results[name] for name in names)]
    rows = [[label, *(number(results[n].get(key), digits) for n in names)] for key, label, digits in shown]
    rows += _speculation_rows([results[name].get("speculation") for name in names])
    blocks = [format_table(rows, ["", *names])]
    for name in names:
        blocks.append(_metric_table(name, results[name], statistic_names))
    return "\n\n".join(blocks)


def _speculation_rows(figures: Sequence[Mapping[str, Any] | None]) -> list[list[str]]:
    if not any(figures):
        return []
    rows = []
    for key, label, digits in (
        ("draft_tokens", "draft tokens", 0),
        ("accepted_tokens", "accepted draft tokens", 0),
        ("acceptance_rate", "acceptance rate", 3),
        ("mean_acceptance_length", "tokens per step (1 + accepted/steps)", 2),
    ):
        rows.append([label, *(number((one or {}).get(key), digits) for one in figures)])
    per_position = [
        " ".join(number(rate, 2) for rate in (one or {}).get("per_position") or ()) or "-" for one in figures
    ]
    if any(text != "-" for text in per_position):
        rows.append(["acceptance by position", *per_position])
    return rows


def _metric_table(name: str, result: Mapping[str, Any], statistic_names: Sequence[str]) -> str:
    rows, missing = [], []
    for metric in METRICS:
        suffix = "_ms" if metric in TIME_METRICS else ""
        if f"mean_{metric}{suffix}" not in result:
            missing.append(metric)
            continue
        digits = 2 if suffix or metric == "s_decode" else 1
        values = [number(result.get(f"{one}_{metric}{suffix}"), digits) for one in statistic_names]
        rows.append([f"{metric} ({LABELS[metric]}{', ms' if suffix else ''})", *values])
    table = format_table(rows, [name, *statistic_names])
    server_side = [metric for metric in missing if metric.startswith("s_")]
    if server_side:
        table += f"\nnot given by this server: {', '.join(server_side)}"
    means = result.get("server_means_s")
    if means:
        table += "\nserver's histograms, mean over the run, ms: "
        table += ", ".join(
            f"{key.removesuffix('_seconds')} {value * 1000:.2f}" for key, value in means.items()
        )
    return table


def compare(
    rounds: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, dict[str, float]]:
    """(baseline, configured) summaries of each round -> median, min and max of configured / baseline."""
    ratios = {}
    for key in COMPARED:
        values = [now[key] / base[key] for base, now in rounds if base.get(key) and now.get(key)]
        if values:
            ratios[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return ratios


def ratio_table(ratios: Mapping[str, Mapping[str, float]], num_rounds: int) -> str:
    rows = [
        [key, *(number(figures[one], 3) for one in ("median", "min", "max"))]
        for key, figures in ratios.items()
    ]
    return format_table(rows, [f"configured / speculation off, {num_rounds} rounds", "median", "min", "max"])


def result_stem(backend: str, request_rate: float, max_concurrency: int | None, model: str) -> str:
    """File name without ending, as FastDeploy forms it."""
    model = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2])
    concurrency = "" if max_concurrency is None else f"-concurrency{max_concurrency}"
    return f"{backend}-{request_rate:g}qps{concurrency}-{model}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )


def details(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Per request, in sending order over the rounds: what --save-detailed adds."""
    records = [record for run in runs for record in run.records]
    sent = [count for run in runs for count in run.sent_tokens]
    metrics = [request_metrics(record, count) for record, count in zip(records, sent, strict=True)]

    def one(name: str) -> list[float | None]:
        return [values[name][0] if values[name] else None for values in metrics]

    return {
        "ids": [record.item_id for record in records],
        "starts": [record.start for record in records],
        "input_lens": one("input_len"),
        "infer_input_lens": one("s_input_len"),
        "output_lens": one("output_len"),
        "ttfts": one("ttft"),
        "e2els": one("e2el"),
        "itls": [values["itl"] for values in metrics],
        "generated_texts": [record.text for record in records],
        "finish_reasons": [record.finish_reason for record in records],
        "speculations": [record.speculation for record in records],
        "errors": [record.error for record in records],
    }


def plot(path: Path, variants: Mapping[str, Sequence[Run]], title: str) -> bool:
    """Distributions of ttft, itl and e2el, and the output rate over time; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    for axis, metric in zip(axes.flat, ("ttft", "itl", "e2el"), strict=False):
        for name, runs in variants.items():
            values = sorted(
                value * 1000
                for run in runs
                for r in run.records
                if r.ok
                for value in request_metrics(r)[metric]
            )
            if values:
                shares = [(i + 1) / len(values) for i in range(len(values))]
                axis.step(values, shares, where="post", label=name)
        axis.set_xlabel(f"{LABELS[metric]} ({metric}), ms")
        axis.set_ylabel("share of values at or below")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        axis.legend()
    _plot_rate(axes[1][1], variants)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _plot_rate(axis: Any, variants: Mapping[str, Sequence[Run]]) -> None:
    """Output tokens/s of each variant's first round, in 40 equal slices."""
    for name, runs in variants.items():
        run = runs[0]
        width = max(run.duration, 1e-9) / 40
        slices = [0.0] * 40
        for record in run.records:
            if record.ok and record.output_times:
                # A request's tokens are spread evenly over its chunks: a chunk does not tell its count.
                share = (record.output_tokens or len(record.output_times)) / len(record.output_times)
                for when in record.output_times:
                    slices[min(39, int((record.start + when) / width))] += share / width
        axis.step([i * width for i in range(40)], slices, where="post", label=name)
    axis.set_xlabel("seconds into the first round")
    axis.set_ylabel("output tokens/s")
    axis.grid(alpha=0.3)
    axis.legend()
