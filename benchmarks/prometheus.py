"""Reads a server's /metrics before and after a run: what its own counters say happened in between."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import aiohttp

# A sample line: name, optional labels, value. The engine's prefix (outrider:, vllm:) is dropped.
_SAMPLE = re.compile(r"^(?:[a-z]+:)?([A-Za-z_][A-Za-z0-9_]*)(\{.*\})? +(\S+)")

# Counters worth keeping, and histograms whose mean over the run is reported.
COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_emitted_tokens",
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "step_duration_seconds",
)


def parse(text: str) -> dict[str, float]:
    """Sample values by name, summed over labels; `_total` is dropped from names, buckets are left out."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match[1].endswith("_bucket"):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        name = match[1].removesuffix("_total")
        totals[name] = totals.get(name, 0.0) + value
    return totals


def gained(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What the known counters and histograms gained; names the server lacks are absent."""
    names = [*COUNTERS, *(name + part for name in HISTOGRAMS for part in ("_sum", "_count"))]
    return {name: after[name] - before.get(name, 0.0) for name in names if name in after}


def histogram_means(counters: Mapping[str, float]) -> dict[str, float]:
    """Mean of each histogram's observations, in seconds."""
    means = {}
    for name in HISTOGRAMS:
        count = counters.get(f"{name}_count", 0.0)
        if count > 0:
            means[name] = counters[f"{name}_sum"] / count
    return means


async def scrape(base_url: str, timeout_s: float = 10) -> dict[str, float]:
    """The server's current values; empty when it has no /metrics."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(base_url.rstrip("/") + "/metrics") as response,
        ):
            return parse(await response.text()) if response.status == 200 else {}
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        return {}
