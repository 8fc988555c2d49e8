"""`outrider bench`: the scripts of `benchmarks/`, from the source checkout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import outrider

SCRIPTS = {
    "serving": "load on a server: latencies, throughput, acceptance",
    "sweep": "throughput by concurrency, with speculation against without",
    "drafts": "record token streams once, replay any plan without the model",
    "mtp": "predicted and measured speed-up of multi-token prediction",
    "kernels": "cost of a decode step by rows, against the machine's ceilings",
    "engine": "what scheduling, sampling and drafting add to the model's step",
    "grammar": "what a grammar costs, and what its forced tokens give",
    "peers": "Outrider and other engines on the same file, prompts and threads",
}


def main(arguments: Sequence[str]) -> int:
    """Run a script with the rest of the arguments; its exit code is ours."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: outrider bench NAME [arguments]\n")
        print("\n".join(f"  {name:<8} {text}" for name, text in SCRIPTS.items()))
        print("\noutrider bench NAME --help shows the arguments of one.")
        return 0
    name = arguments[0]
    if name not in SCRIPTS:
        raise ValueError(f"there is no benchmark {name!r}; there are {', '.join(SCRIPTS)}")
    script = find_script(name)
    root = script.parent.parent
    return subprocess.call([sys.executable, "-m", f"benchmarks.{script.stem}", *arguments[1:]], cwd=root)


def find_script(name: str) -> Path:
    """The benchmark's file: beside the package in a checkout, or under the working directory."""
    for root in (Path(outrider.__file__).resolve().parents[1], Path.cwd()):
        script = root / "benchmarks" / f"benchmark_{name}.py"
        if script.is_file():
            return script
    raise ValueError(
        f"benchmark_{name}.py is not here: benchmarks are part of the source checkout, not of the installed "
        "package; run this command in a checkout"
    )
