"""From records to figures. The definitions are listed in benchmarks/README.md; this is where they are code.

Inter-token gaps are between chunks that carry output: the role chunk and the usage chunk do not count,
and under speculation a chunk may hold several tokens. Metrics whose name starts with `s_` come from the
server's own clock and exist only when the server sends it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.client import Record

TIME_METRICS = ("ttft", "s_ttft", "tpot", "itl", "s_itl", "e2el", "s_e2el")  # seconds here, ms in reports
PLAIN_METRICS = ("s_decode", "input_len", "s_input_len", "cached_len", "output_len")
METRICS = TIME_METRICS + PLAIN_METRICS
LABELS = {
    "ttft": "time to first token", "s_ttft": "time to first token, server", "tpot": "time per output token",
    "itl": "gap between chunks", "s_itl": "gap between chunks, server", "e2el": "whole request",
    "s_e2el": "whole request, server", "s_decode": "decode tokens/s, server", "input_len": "prompt tokens",
    "s_input_len": "prompt tokens, server", "cached_len": "prompt tokens from cache",
    "output_len": "output tokens",
}  # fmt: skip


def output_len(record: Record) -> int:
    """Tokens the server says it wrote; its output chunks when it does not say."""
    return len(record.output_times) if record.output_tokens is None else record.output_tokens


def ttft(record: Record) -> float:
    """An answer without visible output (an end token first) has its first token when it ends."""
    return record.output_times[0] if record.output_times else record.end


def request_metrics(record: Record, sent_tokens: int | None = None) -> dict[str, list[float]]:
    """All metrics one finished request contributes; a metric it cannot give has an empty list.

    `sent_tokens`: the prompt's length when the client itself sent token ids.
    """
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    tokens = output_len(record)
    values["ttft"] = [ttft(record)]
    values["e2el"] = [record.end]
    values["itl"] = _gaps(record.output_times)
    if tokens > 1:
        values["tpot"] = [(record.end - ttft(record)) / (tokens - 1)]
    values["output_len"] = [tokens]
    if record.prompt_tokens is not None:
        values["s_input_len"] = [record.prompt_tokens]
        values["cached_len"] = [record.cached_tokens]
    prompt_tokens = sent_tokens if sent_tokens is not None else record.prompt_tokens
    if prompt_tokens is not None:
        values["input_len"] = [prompt_tokens]
    if record.server_times and record.server_end is not None:
        first = record.server_times[0]
        values["s_ttft"] = [first]
        values["s_itl"] = _gaps(record.server_times)
        values["s_e2el"] = [record.server_end]
        if tokens > 1 and record.server_end > first:
            values["s_decode"] = [(tokens - 1) / (record.server_end - first)]
    return values


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` -> limits in ms."""
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"--goodput knows ttft, tpot and e2el; got {pair!r}")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"--goodput wants NAME:MILLISECONDS, got {pair!r}") from None
    return limits


@dataclass(frozen=True, slots=True)
class Run:
    """One measured load."""

    records: Sequence[Record]
    duration: float  # seconds
    sent_tokens: Sequence[int | None]  # per record, see `request_metrics`
    counters: Mapping[str, float]  # what the server's counters gained meanwhile, see prometheus.py


def pooled(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Every metric's values over all finished requests of the runs."""
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for run in runs:
        for record, sent in zip(run.records, run.sent_tokens, strict=True):
            if record.ok:
                for name, more in request_metrics(record, sent).items():
                    values[name] += more
    return values


def throughput(runs: Sequence[Run], goodput: Mapping[str, float]) -> dict[str, Any]:
    """Counts and rates over the runs' summed duration."""
    records = [record for run in runs for record in run.records]
    finished = [record for record in records if record.ok]
    duration = sum(run.duration for run in runs)
    input_tokens = sum(record.prompt_tokens or 0 for record in finished)
    output_tokens = sum(output_len(record) for record in finished)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(finished),
        "failed": len(records) - len(finished),
        "without_usage": sum(record.output_tokens is None for record in finished),
        "total_input_tokens": input_tokens,
        "total_cached_tokens": sum(record.cached_tokens for record in finished),
        "total_output_tokens": output_tokens,
        "request_throughput": len(finished) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "mean_decode_throughput": decode_rate(finished),
    }
    if goodput:
        figures["request_goodput"] = sum(_is_good(record, goodput) for record in finished) / duration
    return figures


def decode_rate(records: Sequence[Record]) -> float | None:
    """Tokens after each request's first, over the seconds after its first: what one stream sees."""
    tokens = sum(output_len(record) - 1 for record in records if output_len(record) > 1)
    seconds = sum(record.end - ttft(record) for record in records if output_len(record) > 1)
    return tokens / seconds if seconds > 0 else None


def _is_good(record: Record, limits_ms: Mapping[str, float]) -> bool:
    values = request_metrics(record)
    return all(value * 1000 <= limit for name, limit in limits_ms.items() for value in values[name])


def acceptance(runs: Sequence[Run]) -> dict[str, Any] | None:
    """What speculation did: from the answers when every one tells, else from the server's counters."""
    records = [record for run in runs for record in run.records if record.ok]
    told = [record.speculation for record in records if record.speculation]
    if told and len(told) == len(records):
        steps, drafted, accepted = (
            sum(int(one.get(key) or 0) for one in told)
            for key in ("steps", "draft_tokens", "accepted_tokens")
        )
        return {
            "from": "answers",
            **_acceptance(steps, drafted, accepted),
            "per_position": _per_position(told),
        }
    counters = {key: sum(run.counters.get(key, 0) for run in runs) for key in _COUNTERS}
    if not counters["spec_decode_num_draft_tokens"]:
        return None
    drafts, drafted, accepted = (int(counters[key]) for key in _COUNTERS)
    return {"from": "counters", **_acceptance(drafts, drafted, accepted), "per_position": None}


_COUNTERS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")


def _acceptance(steps: int, drafted: int, accepted: int) -> dict[str, Any]:
    """`steps`: rounds that emitted tokens (answers), or rounds that had a draft (counters)."""
    return {
        "steps": steps,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
    }


def _per_position(told: Sequence[Mapping[str, Any]]) -> list[float | None] | None:
    """Acceptance of the first, second, ... draft token, of those drafted."""
    totals: list[list[int]] = []
    for one in told:
        for position, counts in enumerate(one.get("per_position") or ()):
            if position == len(totals):
                totals.append([0, 0])
            # A pair, or a mapping of two names.
            pair = counts if isinstance(counts, list) else (counts["draft_tokens"], counts["accepted_tokens"])
            totals[position][0] += pair[0]
            totals[position][1] += pair[1]
    return [accepted / drafted if drafted else None for drafted, accepted in totals] or None


def statistics_of(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean, median, std and the percentiles (linear between ranks); empty for no values."""
    if not values:
        return {}
    figures = {"mean": statistics.fmean(values), "median": statistics.median(values)}
    figures["std"] = statistics.pstdev(values)
    for percentile in percentiles:
        figures[f"p{percentile:g}"] = float(np.percentile(values, percentile))
    return figures


def summarize(
    runs: Sequence[Run],
    metric_names: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """The result file's figures: counts, rates, acceptance, and mean_/median_/std_/pNN_ of every metric.

    Times are in ms and their keys end in `_ms`. A metric the server does not allow is absent.
    """
    unknown = [name for name in metric_names if name not in METRICS]
    if unknown:
        raise ValueError(f"unknown metric {unknown[0]!r}; there are {', '.join(METRICS)}")
    result = throughput(runs, goodput)
    result["speculation"] = acceptance(runs)
    values = pooled(runs)
    for name in metric_names:
        scale, suffix = (1000, "_ms") if name in TIME_METRICS else (1, "")
        for statistic, value in statistics_of(values[name], percentiles).items():
            result[f"{statistic}_{name}{suffix}"] = value * scale
    return result
