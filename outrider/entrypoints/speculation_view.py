"""What `GET /v1/speculation` shows: the engine's own figures, in the order in which people ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of the engine's statistics by source -> as shown.
_BY_SOURCE = {
    "num_draft_steps": "drafts",
    "num_draft_tokens": "draft_tokens",
    "num_accepted_tokens": "accepted_tokens",
    "num_draft_tokens_per_position": "draft_tokens_per_position",
    "num_accepted_per_position": "accepted_tokens_per_position",
}


def speculation_view(stats: Mapping[str, Any]) -> dict[str, Any]:
    """From the engine's statistics.

    `sources` counts what was verified since the start; `survival` is what the controller has learned of late:
    per source and depth, how often drafts came true once those before them had, and the curve from what the
    source guessed to what came true; `calibration` is what a step takes by its rows.
    """
    speculation = stats.get("speculation") or {}
    controller = dict(speculation.get("controller") or {})
    emitted, windows = stats.get("num_generation_tokens", 0), stats.get("num_emitting_windows", 0)
    return {
        "method": speculation.get("method", "off"),
        "profit": _profit(speculation),
        "emitted_tokens": emitted,
        "mean_acceptance_length": emitted / windows if windows else 0.0,
        "sources": _sources(stats),
        "survival": controller.pop("acceptance", {}),
        "calibration": controller.pop("cost", None),
        "decisions": controller.pop("decisions", []),
        "controller": controller,
        "health": speculation.get("health", {}),
        "proposer": speculation.get("proposer", {}),
    }


def _sources(stats: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sources: dict[str, dict[str, Any]] = {}
    for key, name in _BY_SOURCE.items():
        for source, value in stats.get(key, {}).items():
            sources.setdefault(source, {})[name] = value
    for counts in sources.values():
        counts["acceptance_rate"] = _ratio(counts.get("accepted_tokens", 0), counts.get("draft_tokens", 0))
        drafted = counts.get("draft_tokens_per_position", [])
        accepted = counts.get("accepted_tokens_per_position", [])
        counts["acceptance_rate_per_position"] = [
            _ratio(taken, of) for taken, of in zip(accepted, drafted, strict=False)
        ]
    return sources


def _profit(speculation: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last few dozen decoding steps against plain ones; None before there were any."""
    profit = speculation.get("profit")
    if profit is None:
        return None
    percent = 100.0 * profit["gain"]
    verdict = (
        f"{abs(percent):.1f} % {'more' if percent >= 0 else 'fewer'} tokens per second than plain decoding"
    )
    return {**{name: round(value, 4) for name, value in profit.items()}, "verdict": verdict}


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
