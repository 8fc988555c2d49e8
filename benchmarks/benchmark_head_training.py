"""What helps a draft head to learn: short trainings on the same data that differ in one choice.

    python benchmarks/benchmark_head_training.py --data DIR [--steps 24] [--only NAME ...]

DIR is the data of `outrider train-mtp` (its `--data`). Every training sees the same batches in the same
order. The table has the acceptance on held-out conversations; report.json of each run stays under --out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.entrypoints.train_mtp import main as train_mtp

# Name -> flags of `outrider train-mtp`.
VARIATIONS: dict[str, list[str]] = {
    "default": [],
    "start: sum of the inputs, last layer": ["--start", "identity"],
    "start: least squares, last layer": ["--start", "layer"],
    "muon, rate 0.003": ["--learning-rate", "0.003"],
    "muon, rate 0.01": ["--learning-rate", "0.01"],
    "adamw, rate 0.001": ["--optimizer", "adamw"],
    "hidden states' distance, weight 20": ["--hidden-weight", "20"],
    "one step (K=1)": ["--num-steps", "1"],
    "distribution sharpened to temperature 0.7": ["--sharpen", "0.7"],
    "questions do not count": ["--question-weight", "0"],
    "vocabulary of 16384": ["--vocab", "16384"],
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="of outrider train-mtp")
    parser.add_argument("--out", type=Path, default=Path("results/head-training"))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="+", choices=VARIATIONS, default=list(VARIATIONS), metavar="NAME")
    options = parser.parse_args(arguments)
    rows = []
    for number, name in enumerate(options.only):
        out = options.out / str(number)
        flags = ["--out", str(out), "--data", options.data, "--only", "train", "--no-progress"]
        flags += ["--heldout-limit", "10"]
        train_mtp([*flags, "--steps", str(options.steps), *VARIATIONS[name]])
        rows.append((name, json.loads((out / "report.json").read_text())))
    sets = list(rows[0][1]["heldout"])
    print(f"\n| {options.steps} updates | {' | '.join(sets)} |")
    print("|---|" + "---|" * len(sets))
    for name, report in rows:
        cells = [" / ".join(f"{v:.2f}" for v in report["heldout"][s]["conditional"]) for s in sets]
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
