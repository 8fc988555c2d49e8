"""How long does a step take? Measured at start, kept on disk, and read as seconds per rows and context.

The controller needs the cost of verifying: the time of a forward pass as its rows grow. A damaged or
foreign file in the cache is measured anew and replaced; an unwritable cache only costs the next start.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outrider
import outrider._native as _native

# Kernels work on rows in groups of four or eight, so a step's time jumps where a group begins.
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 17, 24, 32, 48, 64)
CONTEXTS = (128, 1024)
_LONG_ROWS = (1, 4, 8, 16, 32, 64)  # with the longer context; it only adds to the others' times
BUDGET_S = 0.9  # of all measuring; the smallest sizes are measured in any case
MOST_REPEATS = 7
STEADY = 1.2  # how many times its least a step usually takes, where nothing else runs on the machine
BETTER = 0.75  # of the stored time of the smallest step: then what is stored was measured on a busy machine

RunRows = Callable[[int, int], float]  # (rows, context tokens of each) -> seconds of one step


@dataclass(frozen=True)
class Calibration:
    """Seconds of a step at some numbers of rows, for one or two lengths of context.

    Between the measured points it is linear, outside it goes on as at the end. More rows never take
    less time: a measurement that says so is noise, and is raised to what fewer rows took.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]  # [context][rows]
    is_steady: bool = True  # measured while the machine did nothing else, as far as can be told

    def __post_init__(self) -> None:
        if not self.rows or list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise ValueError(f"rows must be positive and increasing, got {self.rows}")
        if not 1 <= len(self.contexts) <= 2 or list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError(f"contexts must be one or two increasing lengths, got {self.contexts}")
        if [len(row) for row in self.seconds] != [len(self.rows)] * len(self.contexts):
            raise ValueError("seconds must hold one time for each number of rows, for each context")
        if not all(math.isfinite(value) and value > 0 for row in self.seconds for value in row):
            raise ValueError("seconds must be finite and above 0")

    def hopeful(self) -> Calibration:
        """What the machine may do when it is not busy: the usual shape, as low as any time measured.

        A curve that promises too much is found out by the steps that follow from it. One that promises too
        little is not, because then there are none.
        """
        shape = [1.0 + 0.035 * (rows - 1) + 0.17 * max(0, rows - 4) for rows in self.rows]
        scaled = []
        for measured in self.seconds:
            least = min(value / part for value, part in zip(measured, shape, strict=True))
            scaled.append(tuple(least * part for part in shape))
        return Calibration(self.rows, self.contexts, tuple(scaled), self.is_steady)

    def curve(self, context: int, num_rows: int) -> list[float]:
        """Seconds for 0..num_rows rows (none cost as much as one), never decreasing."""
        return _rising([self._at(rows, context) for rows in range(num_rows + 1)])

    def _at(self, rows: int, context: int) -> float:
        times = [interpolate(self.rows, seconds, rows) for seconds in self.seconds]
        return times[0] if len(times) == 1 else max(interpolate(self.contexts, times, context), 1e-9)


def interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Through the points (xs, ys), xs increasing: level before the first, straight on after the last."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    # Past the last point a falling line would cross zero; time does not.
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), min(y0, y1))


def _rising(values: list[float]) -> list[float]:
    for i in range(1, len(values)):
        values[i] = max(values[i], values[i - 1])
    return values


def measure(
    run_rows: RunRows,
    *,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Time each size once, then again in turn while the budget lasts, and keep the least of each.

    The least, because whatever else runs on the machine only ever adds. Where a step is so slow that the
    budget ends in the first round, the larger sizes are left out: the curve goes on straight.
    """
    run_rows(rows[0], contexts[0])  # the first run pays for cold caches
    end = clock() + budget_s
    long_rows = {rows[0], rows[-1], *(num for num in rows if num in _LONG_ROWS)}
    taken: dict[tuple[int, int], list[float]] = {}
    for num in rows:
        if num > rows[min(2, len(rows) - 1)] and clock() >= end:
            break
        for context in contexts:
            if context == contexts[0] or num in long_rows:
                taken[context, num] = [max(run_rows(num, context), 1e-9)]
    measured = tuple(num for num in rows if (contexts[0], num) in taken)
    for _ in range(MOST_REPEATS - 1):
        for context, num in sorted(taken):
            # However slow it is: that the first sizes take as long again tells whether to believe any.
            if clock() >= end and (num > rows[min(2, len(rows) - 1)] or len(taken[context, num]) > 1):
                break
            taken[context, num].append(max(run_rows(num, context), 1e-9))
    best = {size: min(seconds) for size, seconds in taken.items()}
    seconds_of = tuple(tuple(_rising(_filled(best, context, contexts[0], measured))) for context in contexts)
    return Calibration(measured, tuple(contexts), seconds_of, _is_steady(taken))


def _is_steady(taken: Mapping[tuple[int, int], Sequence[float]]) -> bool:
    """Whether most sizes that were measured again took about as long again."""
    again = [sorted(seconds)[1] <= STEADY * min(seconds) for seconds in taken.values() if len(seconds) > 1]
    return 3 * sum(again) > 2 * len(again)


def _filled(
    best: Mapping[tuple[int, int], float], context: int, first: int, rows: Sequence[int]
) -> list[float]:
    """Seconds by rows at a context; where it was not measured, what it adds to the first is interpolated."""
    known = [num for num in rows if (context, num) in best]
    added = [best[context, num] - best[first, num] for num in known]
    return [max(best[first, num] + interpolate(known, added, num), 1e-9) for num in rows]


def load_or_measure(key: Mapping[str, str | int], run_rows: RunRows, **options: Any) -> Calibration:
    """The calibration for `key` (what names the model and how it runs), from disk if it was measured before.

    The machine and the build are added to the key. `options` go to `measure`. What was measured while the
    machine was busy serves this start only.
    """
    full_key = {**{name: str(value) for name, value in key.items()}, **_machine()}
    path = (
        _cache_dir()
        / f"{hashlib.sha256(json.dumps(full_key, sort_keys=True).encode()).hexdigest()[:32]}.json"
    )
    stored = _read(path, full_key)
    if stored is not None and not _is_outdone(stored, run_rows):
        return stored
    found = measure(run_rows, **options)
    if found.is_steady:
        _write(path, full_key, found)
    return found


def _is_outdone(stored: Calibration, run_rows: RunRows) -> bool:
    """Whether the smallest step takes much less than when it was measured."""
    size = stored.rows[0], stored.contexts[0]
    run_rows(*size)  # the first run pays for cold caches
    return min(run_rows(*size) for _ in range(2)) < BETTER * stored.seconds[0][0]


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outrider" / "calibration"


def _machine() -> dict[str, str]:
    """What makes one machine and build differ from another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    build = os.stat(_native.__file__)
    return {
        "points": f"{ROWS} {CONTEXTS}",
        "machine": f"{platform.node()} {platform.machine()} {cpu} x{os.cpu_count()} {_native.isa()}",
        "build": f"{outrider.__version__} {build.st_size} {build.st_mtime_ns}",
    }


def _read(path: Path, key: dict[str, str]) -> Calibration | None:
    try:
        stored = json.loads(path.read_text())
        if stored["key"] != key:
            return None
        seconds = tuple(tuple(float(value) for value in row) for row in stored["seconds"])
        return Calibration(tuple(map(int, stored["rows"])), tuple(map(int, stored["contexts"])), seconds)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, key: dict[str, str], calibration: Calibration) -> None:
    stored = {
        "key": key,
        "rows": calibration.rows,
        "contexts": calibration.contexts,
        "seconds": calibration.seconds,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and moved, so that a reader never sees half a file.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(stored, file)
        os.replace(file.name, path)
    except OSError:
        return
