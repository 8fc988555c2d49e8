"""Pictures of speculation: acceptance by position, speed-up by concurrency, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def _pyplot() -> Any:
    """matplotlib's pyplot for files, or None where it is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    return pyplot


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_acceptance(path: Path, recordings: Sequence[Mapping[str, Any]]) -> bool:
    """One panel a recording: share accepted by place in the draft, one line a plan and source."""
    pyplot = _pyplot()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(
        1, len(recordings), figsize=(6 * len(recordings), 4.5), layout="constrained", squeeze=False
    )
    for axis, one in zip(axes.flat, recordings, strict=True):
        for plan in one["plans"]:
            for source, rates in plan["acceptance"].items():
                label = f"{source} in {plan['plan']}, {plan['concurrency']} at once"
                axis.plot(range(1, len(rates) + 1), rates, marker=".", label=label)
        axis.set_title(Path(one["file"]).name)
        axis.set_xlabel("place in the draft")
        axis.set_ylabel("share accepted")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    _save(pyplot, figure, path)
    return True


def plot_concurrency(path: Path, sweep: Sequence[Mapping[str, Any]], title: str) -> bool:
    """Ratio of output tokens/s to that without speculation, median and range over rounds."""
    pyplot = _pyplot()
    if pyplot is None:
        return False
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    places = [one["concurrency"] for one in sweep]
    ratios = [one["ratios"]["output_throughput"] for one in sweep]
    median = [one["median"] for one in ratios]
    below = [one["median"] - one["min"] for one in ratios]
    above = [one["max"] - one["median"] for one in ratios]
    axis.errorbar(places, median, yerr=[below, above], marker="o", capsize=3)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, [str(place) for place in places])
    axis.set_xlabel("requests at once")
    axis.set_ylabel("output tokens/s, with speculation / without")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    _save(pyplot, figure, path)
    return True


def plot_prediction(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> bool:
    """Predicted and measured speed-up by number of model steps; other variants as lines across."""
    pyplot = _pyplot()
    if pyplot is None:
        return False
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    fixed = [row for row in rows if row["steps"]]
    steps = [row["steps"] for row in fixed]
    axis.plot(steps, [row["predicted"] for row in fixed], marker="o", label="predicted")
    axis.plot(steps, [row["measured"] for row in fixed], marker="s", label="measured")
    for row, style in zip((row for row in rows if not row["steps"]), ("--", ":", "-."), strict=False):
        axis.axhline(row["measured"], linestyle=style, color="gray", label=f"{row['name']}, measured")
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(steps)
    axis.set_xlabel("model steps, always verified")
    axis.set_ylabel("speed-up over no speculation")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend()
    _save(pyplot, figure, path)
    return True
