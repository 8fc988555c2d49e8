"""Prometheus text from the engine's counters: names in the vocabulary of vLLM, prefix `outrider:`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES = {
    "num_requests_running": ("num_requests_running", "Requests in the running batch"),
    "num_requests_waiting": ("num_requests_waiting", "Requests waiting for a place in the batch"),
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of cache blocks in use, 0 to 1"),
}
COUNTERS = {
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "prompt_tokens": ("num_prompt_tokens", "Prompt tokens of requests that were prefilled"),
    "generation_tokens": ("num_generation_tokens", "Tokens emitted"),
    "num_preemptions": ("num_preemptions", "Requests preempted to free cache blocks"),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token", "Arrival to first token"),
    "inter_token_latency_seconds": ("inter_token_latency", "Gap before a token; tokens of one step share it"),
    "time_per_output_token_seconds": ("time_per_output_token", "Mean gap of a request after its first token"),
    "e2e_request_latency_seconds": ("e2e_request_latency", "Arrival to the end of a request"),
    "request_queue_time_seconds": ("request_queue_time", "Arrival to the first step"),
    "step_duration_seconds": ("step_duration", "One engine step"),
}
BY_SOURCE = {
    "spec_decode_num_drafts": ("num_draft_steps", "Verified windows that held drafts of the source"),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Draft tokens verified"),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Draft tokens accepted"),
}
# The end of a request that its client or a limit brought about is no success.
SUCCESSES = ("stop", "length")


def render(stats: Mapping[str, Any], failures: Mapping[str, int]) -> bytes:
    """The text of /metrics from the engine's statistics and the server's count of failed requests."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(list(_families(stats, failures))))
    return generate_latest(registry)


class _Snapshot:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(stats: Mapping[str, Any], failures: Mapping[str, int]) -> Iterator[Metric]:
    for name, (key, text) in GAUGES.items():
        yield GaugeMetricFamily(f"outrider:{name}", text, value=stats.get(key, 0))
    for name, (key, text) in COUNTERS.items():
        yield CounterMetricFamily(f"outrider:{name}", text, value=stats.get(key, 0))
    finished: Mapping[str, int] = stats.get("num_finished", {})
    successes = {reason: finished.get(reason, 0) for reason in SUCCESSES}
    yield _labelled("request_success", "Requests that ended by themselves", "finished_reason", successes)
    failed = {reason: count for reason, count in finished.items() if reason not in SUCCESSES}
    yield _labelled(
        "request_failure", "Requests that failed or were refused", "reason", {**failed, **failures}
    )
    for name, (key, text) in HISTOGRAMS.items():
        if key in stats:
            yield _histogram(f"outrider:{name}", text, stats[key])
    yield from _speculation(stats)


def _speculation(stats: Mapping[str, Any]) -> Iterator[Metric]:
    for name, (key, text) in BY_SOURCE.items():
        yield _labelled(name, text, "source", stats.get(key, {}))
    per_position = CounterMetricFamily(
        "outrider:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by place in the draft",
        labels=["source", "position"],
    )  # fmt: skip
    for source, counts in stats.get("num_accepted_per_position", {}).items():
        for position, count in enumerate(counts):
            per_position.add_metric([source, str(position)], count)
    yield per_position
    emitted, windows = stats.get("num_generation_tokens", 0), stats.get("num_emitting_windows", 0)
    yield CounterMetricFamily(
        "outrider:spec_decode_num_emitted_tokens", "Tokens emitted by verified windows", value=emitted
    )
    yield GaugeMetricFamily(
        "outrider:spec_decode_mean_acceptance_length", "Tokens a window emitted, mean since the start",
        value=emitted / windows if windows else 0.0,
    )  # fmt: skip
    speculation: Mapping[str, Any] = stats.get("speculation") or {}
    profit = speculation.get("profit_ratio")
    if profit is not None:
        yield GaugeMetricFamily(
            "outrider:spec_decode_profit_ratio",
            "Tokens per second of the last decoding steps against plain ones; under 1 speculation loses",
            value=profit,
        )
    health: Mapping[str, Any] = speculation.get("health") or {}
    errors = health.get("errors", {})
    yield _labelled(
        "spec_decode_num_draft_errors", "Failures of the drafter, by what was asked", "kind", errors
    )
    yield CounterMetricFamily(
        "outrider:spec_decode_num_draft_pauses", "Times that a failing or slow drafter was left alone",
        value=health.get("pauses", 0),
    )  # fmt: skip


def _labelled(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"outrider:{name}", text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _histogram(name: str, text: str, snapshot: Mapping[str, Any]) -> Metric:
    bounds = [*map(str, snapshot["bounds"]), "+Inf"]
    buckets = list(zip(bounds, accumulate(snapshot["counts"]), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=snapshot["sum"])
