"""What the native kernels' number formats cost in quality: against float32 of the very same file.

    python benchmarks/measure_quality.py [MODEL] [--quantization wint4] [--tokens 2000]

Both backends read the same tokens of a text (prose, then code, from `benchmarks/prompts`). The reference
holds every weight as the float32 number that the file defines, and its cache in float32; the native path
is as it serves. Prints the perplexity of both, the mean Kullback-Leibler divergence of the native
next-token distribution from the reference's, and how often their most likely tokens agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.benchmark_kernels import BLOCK_SIZE, Step
from outrider.backends import make_backend
from outrider.models.loader import DEFAULT_MODEL, Checkpoint, load_checkpoint
from outrider.models.registry import build_function, weight_plan

PROMPTS = Path(__file__).with_name("prompts")
CHUNK = 128  # rows a step: bounds the logits held at a time


@dataclass(frozen=True)
class Quality:
    """Over all predicted tokens of the text."""

    num_tokens: int
    perplexity_reference: float
    perplexity_native: float
    mean_kl: float  # nats a token
    p99_kl: float
    top1_agreement: float


def quality_text() -> str:
    """Prose, then code: the user turns of two prompt files."""
    turns = []
    for name in ("prefill.jsonl", "code.jsonl"):
        lines = (PROMPTS / name).read_text(encoding="utf-8").splitlines()
        turns += [json.loads(line)["messages"][0]["content"] for line in lines]
    return "\n\n".join(turns)


def measure(
    checkpoint: Checkpoint,
    token_ids: Sequence[int],
    *,
    num_threads: int | None = None,
    quantization: str | None = None,
) -> Quality:
    """Quality of the native path on `token_ids`, read as one text."""
    native = _executable(checkpoint, "native", len(token_ids), quantization, "f16", num_threads)
    reference = _executable(checkpoint, "torch", len(token_ids), None, "f32", num_threads)
    losses: list[np.ndarray] = []
    divergences, agreements = [], []
    for start in range(0, len(token_ids) - 1, CHUNK):
        step = _step(token_ids, start, min(start + CHUNK, len(token_ids) - 1))
        targets = np.asarray(token_ids[start + 1 : start + 1 + len(step.token_ids)])
        expected, got = (_log_softmax(executable.run(step).logits) for executable in (reference, native))
        rows = np.arange(len(targets))
        losses.append(np.stack([-expected[rows, targets], -got[rows, targets]], axis=1))
        divergences.append((np.exp(expected) * (expected - got)).sum(axis=1))
        agreements.append(expected.argmax(axis=1) == got.argmax(axis=1))
    perplexity = np.exp(np.concatenate(losses).mean(axis=0))
    kl = np.concatenate(divergences)
    return Quality(
        num_tokens=len(kl),
        perplexity_reference=float(perplexity[0]),
        perplexity_native=float(perplexity[1]),
        mean_kl=float(kl.mean()),
        p99_kl=float(np.quantile(kl, 0.99)),
        top1_agreement=float(np.concatenate(agreements).mean()),
    )


def _executable(
    checkpoint: Checkpoint, name: str, length: int, quantization: str | None, cache: str, threads: int | None
) -> Any:
    backend = make_backend(name, num_threads=threads)
    weights = {
        handle: backend.weight([checkpoint.tensors[tensor] for tensor in tensors], quantization)
        for handle, tensors in weight_plan(checkpoint.config).items()
    }
    return backend.compile(
        build_function(checkpoint.config),
        checkpoint.config,
        weights,
        max_rows=CHUNK,
        max_logits_rows=CHUNK,
        num_blocks=-(-length // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        kv_cache_dtype=cache,
    )


def _step(token_ids: Sequence[int], start: int, end: int) -> Step:
    """Tokens `start` to `end` of one sequence that owns all blocks in order."""
    positions = np.arange(start, end, dtype=np.int32)
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    return Step(
        token_ids=np.asarray(token_ids[start:end], np.int32),
        positions=positions,
        slot_mapping=positions,
        query_start_loc=np.array([0, end - start], np.int32),
        seq_lens=np.array([end], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logits_indices=np.arange(end - start, dtype=np.int32),
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", choices=["wint4", "wint8"])
    parser.add_argument("--tokens", type=int, default=2000, help="length of the text")
    parser.add_argument("--num-threads", type=int)
    arguments = parser.parse_args()
    checkpoint = load_checkpoint(arguments.model)
    token_ids = checkpoint.tokenizer.encode(quality_text())[: arguments.tokens]
    quality = measure(
        checkpoint, token_ids, num_threads=arguments.num_threads, quantization=arguments.quantization
    )
    for name, value in asdict(quality).items():
        print(f"{name:22} {value:.6g}")


if __name__ == "__main__":
    main()
