"""What machine a figure was measured on, and whether something else was using it meanwhile."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


def describe_machine() -> dict[str, Any]:
    """CPU model, cores, memory and kernel: enough to tell figures of different machines apart."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    with contextlib.suppress(OSError):
        for line in (_PROC / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                facts["cpu"] = line.partition(":")[2].strip()
                break
        facts["memory_gib"] = round(int((_PROC / "meminfo").read_text().split()[1]) / 2**20, 1)
    return facts


def physical_cores() -> int:
    """Cores this process may use, counting SMT siblings once; what Outrider takes as its thread count."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(path.read_text().strip())
        except OSError:
            siblings.add(str(cpu))
    return max(1, len(siblings))


def _ticks() -> float:
    return float(os.sysconf("SC_CLK_TCK"))


def busy_seconds() -> float:
    """CPU seconds all cores have worked since boot; 0 where the system does not tell."""
    try:
        fields = [int(field) for field in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    idle, iowait = fields[3], fields[4]
    return (sum(fields) - idle - iowait) / _ticks()


def process_tree(pid: int) -> list[int]:
    """`pid` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir() if _PROC.exists() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int(_stat_fields(int(entry.name))[1])
                children.setdefault(parent, []).append(int(entry.name))
    tree, todo = [], [pid]
    while todo:
        pid = todo.pop()
        tree.append(pid)
        todo += children.get(pid, [])
    return tree


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the name before it may hold blanks)."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def process_seconds(pids: Iterable[int]) -> float:
    """CPU seconds these processes have used."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat_fields(pid)
            total += int(fields[11]) + int(fields[12])
    return total / _ticks()


def peak_memory_mib(pid: int) -> float:
    """Peak resident memory of a process and its descendants, summed; shared pages count each time."""
    total = 0
    for member in process_tree(pid):
        with contextlib.suppress(OSError, ValueError):
            for line in (_PROC / str(member) / "status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1])
    return total / 1024


def wait_until_quiet(cores: float = 0.25, limit_s: float = 30, sample_s: float = 0.3) -> bool:
    """Wait until less than `cores` cores are busy; False when that did not come in time."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(sample_s)
        if (busy_seconds() - before) / sample_s < cores:
            return True
    return False


@dataclass
class Disturbance:
    """How many cores, on average, others used during a measurement."""

    cores: float = 0.0


@contextlib.contextmanager
def watch_others(*pids: int) -> Iterator[Disturbance]:
    """Measures what everything but this process and the trees of `pids` uses inside the block."""
    own = [os.getpid()] + [member for pid in pids for member in process_tree(pid)]
    result = Disturbance()
    began, busy, used = time.monotonic(), busy_seconds(), process_seconds(own)
    try:
        yield result
    finally:
        seconds = max(0.01, time.monotonic() - began)
        others = (busy_seconds() - busy) - (process_seconds(own) - used)
        result.cores = round(max(0.0, others) / seconds, 3)
