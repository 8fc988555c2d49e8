"""`outrider doctor`: what works on this machine, what does not, and what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider import __version__
from outrider.config import DEFAULT_MODEL, ServerConfig
from outrider.entrypoints.arguments import Parser

GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report. `broken` keeps Outrider from serving; `advice` says what to do."""

    name: str
    text: str
    advice: str = ""
    broken: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print the report; 1 if something keeps Outrider from serving."""
    parser = Parser(prog="outrider doctor", description="What works here, what does not, what to do.")
    parser.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL, help="model to look for")
    options = parser.parse_args(arguments)
    findings = [finding for check in checks(options.model) for finding in check()]
    for finding in findings:
        mark = "FAIL" if finding.broken else "note" if finding.advice else "ok"
        print(f"{mark:>4}  {finding.name:<9} {finding.text}")
        if finding.advice:
            print(f"{'':>16}-> {finding.advice}")
    broken = sum(finding.broken for finding in findings)
    print(f"\n{broken} problem(s) to solve before serving" if broken else "\nready: outrider serve")
    return 1 if broken else 0


def checks(model: str) -> list[Callable[[], Iterator[Finding]]]:
    return [_python, _machine, _native, _compiler, _packages, _gpu, _port, lambda: _model(model)]


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    old = sys.version_info < (3, 10)
    yield Finding(
        "python", f"{version}, outrider {__version__}", "install Python 3.10 or newer" if old else "", old
    )


def _machine() -> Iterator[Finding]:
    total, available = memory()
    advice = "stop other programs: loading a model needs memory" if available < GIB else ""
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cpu", f"{cpu_name()}, {usable} usable of {os.cpu_count()} logical cores")
    yield Finding("memory", f"{available / GIB:.1f} GiB available of {total / GIB:.1f}", advice)


def _native() -> Iterator[Finding]:
    try:
        from outrider import _native as native

        yield Finding("kernels", f"instruction set {native.isa()} (OUTRIDER_ISA forces another)")
    except (ImportError, RuntimeError) as error:
        yield Finding(
            "kernels", f"the native module does not load: {error}", "reinstall: pip install .", True
        )


def _compiler() -> Iterator[Finding]:
    command = next(
        (c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None
    )
    if command is None:
        yield Finding("compiler", "none", "only building needs one; on Debian: apt install g++")
        return
    reply = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    yield Finding("compiler", (reply.stdout or reply.stderr).splitlines()[0])


def _packages() -> Iterator[Finding]:
    extras = {
        "torch": "optional: reference backend; pip install 'outrider[torch]'",
        "matplotlib": "optional: plots of benchmarks; pip install 'outrider[bench]'",
        "huggingface_hub": "optional: models by hub id; pip install huggingface_hub",
    }
    for name, advice in extras.items():
        if importlib.util.find_spec(name) is None:
            yield Finding("extra", f"{name} is not installed", advice)
        else:
            yield Finding("extra", f"{name} {importlib.metadata.version(name)}")


def _gpu() -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        yield Finding("gpu", "none found; this version computes on the CPU")
    else:
        yield Finding("gpu", "found, but this version computes on the CPU")


def _port() -> Iterator[Finding]:
    config = ServerConfig()
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((config.host, config.port))
        except OSError:
            yield Finding("port", f"{config.port} is in use", "serve on another: outrider serve --port 8001")
            return
    yield Finding("port", f"{config.port} is free")


def _model(name: str) -> Iterator[Finding]:
    try:
        from outrider.models.loader import resolve_model

        if name.count("/") == 1 and name[0] not in "/.~" and not Path(name).exists():
            yield Finding("model", f"{name} is no path here", f"get it from the hub: outrider pull {name}")
            return
        path = Path(resolve_model(name))
        files = [path] if path.is_file() else [p for p in path.iterdir() if p.is_file()]
        size = sum(p.stat().st_size for p in files)
        yield Finding("model", f"{name}: {path} ({size / (1 << 20):.0f} MiB)")
    except (ValueError, OSError) as error:
        yield Finding("model", f"{name} is not here", str(error), True)


def memory() -> tuple[int, int]:
    """Bytes of memory: all, and available."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return total, kilobytes * 1024
    except (OSError, StopIteration):
        return total, total


def cpu_name() -> str:
    """The processor's own name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
