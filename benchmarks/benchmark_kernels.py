"""Cost of a model's step by number of rows, beside what the machine could do at best.

    python benchmarks/benchmark_kernels.py --rows 1,2,4,8,16,32,64 --contexts 256

Runs the real executable: embedding to logits, no sampling, no engine. `verify` gives all rows to one
sequence, as the verification of a chain does, and `tree` as that of a tree with two nodes at every depth;
`batch` gives each row a sequence of its own. All row counts
take turns in every repetition, so that a disturbance hits them alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine, physical_cores, wait_until_quiet, watch_others
from benchmarks.report import format_table, number, write_json

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Step:
    """The arrays of one step (`outrider.backends.StepBatch`)."""

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    logits_indices: np.ndarray
    parents: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))


def make_step(num_sequences: int, tokens_each: int, context: int, vocab_size: int, all_logits: bool) -> Step:
    """`tokens_each` new tokens for each of `num_sequences`, after `context` cached ones.

    Sequence i owns the i-th run of blocks. `all_logits`: of every row, else of each sequence's last.
    """
    rng = np.random.default_rng(context + 1000 * tokens_each + num_sequences)
    length = context + tokens_each
    blocks_each = -(-length // BLOCK_SIZE)
    tables = np.arange(num_sequences * blocks_each, dtype=np.int32).reshape(num_sequences, blocks_each)
    positions = np.tile(np.arange(context, length, dtype=np.int32), num_sequences)
    owners = np.repeat(np.arange(num_sequences), tokens_each)
    slots = tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    rows = np.arange(num_sequences * tokens_each, dtype=np.int32)
    return Step(
        token_ids=rng.integers(0, vocab_size, len(rows), dtype=np.int32),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        query_start_loc=np.arange(0, len(rows) + 1, tokens_each, dtype=np.int32),
        seq_lens=np.full(num_sequences, length, np.int32),
        block_tables=tables,
        logits_indices=rows if all_logits else rows[tokens_each - 1 :: tokens_each],
    )


def row_step(shape: str, rows: int, context: int, vocab_size: int) -> Step:
    if shape == "batch":
        return make_step(rows, 1, context, vocab_size, all_logits=True)
    step = make_step(1, rows, context, vocab_size, all_logits=True)
    return as_tree(step, context) if shape == "tree" else step


def as_tree(step: Step, context: int) -> Step:
    """One sequence's rows as a draft tree: two nodes at every depth, of which the second goes on."""
    rows = np.arange(len(step.token_ids), dtype=np.int32)
    positions = context + (rows + 1) // 2
    return replace(step, positions=positions, parents=np.maximum((rows - 1) // 2 * 2, 0) - (rows == 0))


@dataclass(frozen=True, slots=True)
class Model:
    """A compiled model and what one row of a step costs at least."""

    executable: Any
    vocab_size: int
    weight_bytes: int  # of the checkpoint's matrices that every step reads
    macs_per_row: int  # multiply-accumulates with those matrices
    load_s: float


def load_model(args: argparse.Namespace, max_rows: int, num_blocks: int) -> Model:
    from outrider.backends import make_backend
    from outrider.models.loader import load_checkpoint
    from outrider.models.registry import build_function, weight_plan

    begin = time.perf_counter()
    checkpoint = load_checkpoint(args.model)
    config, plan = checkpoint.config, weight_plan(checkpoint.config)
    backend = make_backend("native", num_threads=args.threads)
    weights = {
        handle: backend.weight([checkpoint.tensors[name] for name in names], args.quantization)
        for handle, names in plan.items()
    }
    executable = backend.compile(
        build_function(config),
        config,
        weights,
        max_rows=max_rows,
        max_logits_rows=max(args.rows),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    # The embedding table is read row by row, unless it is the output matrix as well.
    used = [name for names in plan.values() for name in names if name != "embed" or config.tie_embeddings]
    matrices = [tensor for tensor in (checkpoint.tensors[name] for name in used) if len(tensor.shape) == 2]
    return Model(
        executable,
        config.vocab_size,
        sum(tensor.data.nbytes for tensor in matrices),
        sum(int(np.prod(tensor.shape)) for tensor in matrices),
        time.perf_counter() - begin,
    )


def fill_cache(executable: Any) -> None:
    """Write something plausible to every slot: untouched memory is faster to read than real memory."""
    cache = executable.cache
    noise = np.random.default_rng(0).normal(0, 0.5, 1 << 16).astype(np.float32)
    for layer in range(cache.num_layers):
        for array in (cache.keys(layer), cache.values(layer)):
            flat = array.reshape(-1)
            values = noise if flat.dtype == np.float32 else noise.astype(np.float16).view(np.uint16)
            for begin in range(0, len(flat), len(values)):
                part = flat[begin : begin + len(values)]
                part[:] = values[: len(part)]


def interleaved(steps: Mapping[Any, Step], executable: Any, repetitions: int) -> dict[Any, list[float]]:
    """Seconds of each repetition of each step; the order is turned round from one to the next."""
    seconds: dict[Any, list[float]] = {key: [] for key in steps}
    for step in steps.values():
        executable.run(step)
    for repetition in range(repetitions):
        keys = list(steps) if repetition % 2 == 0 else list(steps)[::-1]
        for key in keys:
            begin = time.perf_counter()
            executable.run(steps[key])
            seconds[key].append(time.perf_counter() - begin)
    return seconds


def summary_of(seconds: Sequence[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(seconds) * 1e3, "min_ms": min(seconds) * 1e3}


def measure_ceilings() -> dict[str, Any]:
    """Best of several reads of memory and of register-only products, by the step's own threads."""
    from outrider import _native

    return {
        "isa": _native.isa(),
        "threads": _native.num_threads(),
        "read_gb_s": max(_native.measure_read_bandwidth(256 << 20, 12)),
        "multiply_gmac_s_core": max(_native.measure_multiply_rate(0.2)),
    }


def row_figures(
    model: Model, ceilings: Mapping[str, Any], seconds: Mapping[int, list[float]]
) -> list[dict[str, Any]]:
    """One entry a row count. Rates are of the medians; shares are of the measured ceilings."""
    one = summary_of(seconds[min(seconds)])["median_ms"] * min(seconds)
    figures = []
    for rows, values in seconds.items():
        entry: dict[str, Any] = {"rows": rows, **summary_of(values)}
        median_s = entry["median_ms"] / 1e3
        entry["ratio"] = entry["median_ms"] / one
        entry["tokens_s"] = rows / median_s
        entry["gb_s"] = model.weight_bytes / median_s / 1e9
        entry["gmac_s_core"] = model.macs_per_row * rows / median_s / ceilings["threads"] / 1e9
        entry["read_share"] = entry["gb_s"] / ceilings["read_gb_s"]
        entry["multiply_share"] = entry["gmac_s_core"] / ceilings["multiply_gmac_s_core"]
        figures.append(entry)
    return figures


def profile(model: Model, step: Step, repetitions: int) -> dict[str, float]:
    """Milliseconds a step spends in each kind of instruction, median over repetitions."""
    program = model.executable.program
    program.set_profile(True)
    totals: dict[str, list[float]] = {}
    for _ in range(repetitions):
        model.executable.run(step)
        split: dict[str, float] = {}
        for name, nanoseconds in program.profile():
            split[name] = split.get(name, 0.0) + nanoseconds / 1e6
        for name, value in split.items():
            totals.setdefault(name, []).append(value)
    program.set_profile(False)
    return {name: statistics.median(values) for name, values in totals.items()}


def blocks_needed(args: argparse.Namespace) -> int:
    """Cache blocks for the largest step asked for."""

    def blocks(sequences: int, length: int) -> int:
        return sequences * -(-length // BLOCK_SIZE)

    rows, context = max(args.rows), max(args.contexts)
    most = [blocks(1, context + rows), blocks(1, args.prefill)]
    if "batch" in args.shapes:
        most.append(blocks(rows, context + 1))
    return max(most)


def measure_rows(model: Model, args: argparse.Namespace) -> dict[tuple[str, int], dict[int, list[float]]]:
    """(shape, context) -> rows -> seconds of each repetition."""
    measured = {}
    for shape in args.shapes:
        for context in args.contexts:
            steps = {rows: row_step(shape, rows, context, model.vocab_size) for rows in args.rows}
            measured[shape, context] = interleaved(steps, model.executable, args.repetitions)
    return measured


def run(args: argparse.Namespace) -> dict[str, Any]:
    quiet = wait_until_quiet(limit_s=args.quiet)
    model = load_model(args, max(args.prefill, *args.rows), blocks_needed(args))
    fill_cache(model.executable)
    with watch_others() as others:
        ceilings = measure_ceilings()
        measured = measure_rows(model, args)
        prefill = make_step(1, args.prefill, 0, model.vocab_size, all_logits=False)
        prefill_s = interleaved({0: prefill}, model.executable, args.prefill_repetitions)[0]
        # The machine may have been disturbed during one of the two: the better one is the ceiling.
        again = measure_ceilings()
    ceilings = {key: max(ceilings[key], again[key]) for key in ceilings}
    first_context = args.contexts[0]
    return {
        "model": args.model,
        "machine": describe_machine(),
        "quiet_at_start": quiet,
        "others_cores": others.cores,
        "load_s": model.load_s,
        "weight_bytes": model.weight_bytes,
        "macs_per_row": model.macs_per_row,
        "ceilings": ceilings,
        "steps": [
            {"shape": shape, "context": context, "rows": row_figures(model, ceilings, seconds)}
            for (shape, context), seconds in measured.items()
        ],
        "prefill": {
            "tokens": args.prefill,
            **summary_of(prefill_s),
            "tokens_s": args.prefill / statistics.median(prefill_s),
        },
        "profiles": [
            {"rows": rows, "ms": profile(model, row_step("verify", rows, first_context, model.vocab_size), 5)}
            for rows in args.profile
        ],
    }


COLUMNS = (
    ("rows", "rows", "{}"),
    ("median_ms", "median ms", "{:.2f}"),
    ("min_ms", "min ms", "{:.2f}"),
    ("ratio", "T/T(1)", "{:.2f}"),
    ("tokens_s", "tokens/s", "{:.0f}"),
    ("gb_s", "GB/s", "{:.1f}"),
    ("read_share", "of read", "{:.0%}"),
    ("gmac_s_core", "GMAC/s/core", "{:.1f}"),
    ("multiply_share", "of multiply", "{:.0%}"),
)


def show(result: Mapping[str, Any]) -> None:
    ceilings = result["ceilings"]
    print(
        f"{result['model']}: {result['weight_bytes'] / 1e6:.1f} MB of matrices, "
        f"{result['macs_per_row'] / 1e6:.1f} M MACs a row, loaded in {result['load_s']:.2f} s\n"
        f"{ceilings['isa']}, {ceilings['threads']} threads; ceilings measured here: "
        f"{ceilings['read_gb_s']:.1f} GB/s read, {ceilings['multiply_gmac_s_core']:.0f} GMAC/s a core\n"
        f"other processes used {result['others_cores']:.2f} cores meanwhile"
    )
    for block in result["steps"]:
        rows = [[form.format(one[key]) for key, _, form in COLUMNS] for one in block["rows"]]
        table = format_table(rows, [label for _, label, _ in COLUMNS])
        print(f"\n{block['shape']}, {block['context']} tokens of context\n{table}")
    prefill = result["prefill"]
    print(
        f"\nprefill of {prefill['tokens']} tokens: {prefill['median_ms']:.0f} ms "
        f"(min {prefill['min_ms']:.0f}), {prefill['tokens_s']:.0f} tokens/s"
    )
    for one in result["profiles"]:
        total = sum(one["ms"].values())
        split = sorted(one["ms"].items(), key=lambda entry: -entry[1])
        rows = [[name, number(ms, 3), f"{ms / total:.0%}"] for name, ms in split]
        print(f"\nwhere a step of {one['rows']} rows goes\n{format_table(rows, ['op', 'ms', 'share'])}")


def _ints(text: str) -> list[int]:
    values = [int(part) for part in text.split(",") if part]
    if any(value < 0 for value in values):
        raise argparse.ArgumentTypeError(f"want numbers, got {text}")
    return values


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmark_kernels.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", choices=["wint4", "wint8"], help="of matrices stored as floats")
    parser.add_argument("--kv-cache-dtype", default="f16", choices=["f16", "bf16", "f32"])
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--rows", type=_ints, default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
    parser.add_argument("--contexts", type=_ints, default=[256])
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["verify", "batch"])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--prefill", type=int, default=1000, help="tokens of the prefill step")
    parser.add_argument("--prefill-repetitions", type=int, default=3)
    parser.add_argument("--profile", type=_ints, default=[1, 8], help="row counts whose time is split by op")
    parser.add_argument("--quiet", type=float, default=30, help="seconds to wait for other work to end first")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if not args.rows or min(args.rows) < 1 or set(args.shapes) - {"verify", "tree", "batch"}:
        print("error: --rows wants numbers from 1 on, --shapes some of verify, tree, batch", file=sys.stderr)
        return 2
    result = run(args)
    show(result)
    if args.json is not None:
        write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
