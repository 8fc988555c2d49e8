"""Does multi-token prediction pay, and is it understood? Predicted speed-up beside the measured one.

    python benchmarks/benchmark_mtp.py --head HEAD --dataset-path chat --concurrency 1,4

From acceptance by position a1, a2, ..., the time of a verifying step T(rows) and of drafting T_mtp(k), all
measured here, the speed-up with k model steps for each of n requests should be

    (1 + a1 + a1*a2 + ...) * T(n) / (T(n * (1 + k)) + T_mtp(k))

Measured are k = 1, 2, ... (always drafted, always verified), the same head under the controller, and `auto`,
taking turns in one process. Each is compared with plain decoding on the very same engine, right before or
after: two copies of a model can differ in speed by where their memory lies. Outputs must all be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine, physical_cores, wait_until_quiet, watch_others
from benchmarks.plots import plot_prediction
from benchmarks.report import format_table, number, write_json
from benchmarks.workload import DATASETS, DatasetOptions, Item, load_dataset


@dataclass
class Variant:
    """One way to decode, its engine, and what was seen of it."""

    name: str
    steps: int  # model steps that are always drafted and verified; 0: as configured
    llm: Any
    seconds: list[float] = field(default_factory=list)  # a token, by round, decoding only
    plain: list[float] = field(default_factory=list)  # the same without drafts
    plain_outputs: list[list[int]] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)  # by call of the drafter
    outputs: list[list[int]] = field(default_factory=list)  # of the last round
    num_tokens: int = 0  # decoded in a round
    num_steps: int = 0


def make_variants(args: argparse.Namespace) -> list[Variant]:
    from outrider import LLM

    head = {"model": args.head} if args.head else {}
    plans: dict[str, tuple[int, dict[str, Any]]] = {}
    for k in range(1, args.model_steps + 1):
        fixed = {"num_model_steps": k, "num_speculative_tokens": k, "adaptive": False, "tree": "off"}
        plans[f"mtp, always {k}"] = (k, {"method": "mtp", **fixed, **head})
    plans["mtp"] = (0, {"method": "mtp", **head})
    plans["mtp with_ngram"] = (0, {"method": "mtp", "mtp_strategy": "with_ngram", **head})
    plans["auto"] = (0, {"method": "auto", **head})
    variants = []
    for name, (steps, plan) in plans.items():
        llm = LLM(args.model, num_threads=args.threads, num_kv_blocks=args.kv_blocks, speculative_config=plan)
        variants.append(Variant(name, steps, llm))
        _time_drafting(variants[-1])
    return variants


def _time_drafting(variant: Variant) -> None:
    proposer = variant.llm.engine.drafting.proposer
    original = proposer.propose

    def propose(requests: Any, limits: Any) -> Any:
        begin = time.perf_counter()
        drafts = original(requests, limits)
        if any(one.token_ids for one in drafts):
            variant.drafting.append(time.perf_counter() - begin)
        return drafts

    proposer.propose = propose


def step_seconds(variant: Variant, rows: Sequence[int], context: int) -> dict[int, float]:
    """T(rows): the least of several steps of each size, through the engine's own runner and sampler."""
    from outrider.engine.calibrate import StepTimer

    engine = variant.llm.engine
    timer = StepTimer(engine.runner, engine.sampler, engine.scheduler.kv_cache.block_size)
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(7):
        for num in rows:
            best[num] = min(best[num], timer(num, context))
    return best


def run_round(
    variant: Variant, prompts: Sequence[list[int]], args: argparse.Namespace, number: int, plain: bool
) -> None:
    """Decode all prompts, `args.now` at once; only steps in which nobody reads a prompt are timed."""
    from outrider.request import AddRequest, SamplingParams, SpeculationParams

    engine = variant.llm.engine
    outputs: list[list[int]] = [[] for _ in prompts]
    num_tokens = num_steps = 0
    seconds = 0.0
    waiting = list(range(len(prompts)))[::-1]
    begun: set[str] = set()
    while waiting or engine.has_work:
        running = len(engine.scheduler.running) + len(engine.scheduler.waiting)
        while waiting and running < args.now:
            index = waiting.pop()
            params = SamplingParams(
                max_tokens=args.max_tokens, temperature=args.temperature, seed=index, ignore_eos=True,
                speculation=SpeculationParams(method="off") if plain else None,
            )  # fmt: skip
            name = f"{number}-{index}"
            # A tenant of its own each time: drafts must not come from the answers of earlier rounds.
            salt = f"{args.now}-{name}-{plain}"
            engine.add_request(AddRequest(name, prompts[index], params, time.monotonic(), cache_salt=salt))
            running += 1
        decoding = all(request.request_id in begun for request in engine.scheduler.running)
        decoding = decoding and not engine.scheduler.waiting
        begin = time.perf_counter()
        increments = engine.step()
        spent = time.perf_counter() - begin
        for output in increments:
            outputs[int(output.request_id.partition("-")[2])] += output.token_ids
            begun.add(output.request_id)
        if decoding:
            seconds += spent
            num_tokens += sum(len(output.token_ids) for output in increments)
            num_steps += len(increments)
    if plain:
        variant.plain.append(seconds / num_tokens)
        variant.plain_outputs = outputs
    else:
        variant.seconds.append(seconds / num_tokens)
        variant.outputs, variant.num_tokens, variant.num_steps = outputs, num_tokens, num_steps


def conditional_acceptance(variant: Variant) -> list[float]:
    """By position: accepted, of those whose predecessors were accepted."""
    stats = variant.llm.engine.stats()
    drafted = stats["num_draft_tokens_per_position"].get("mtp", [])
    accepted = stats["num_accepted_per_position"].get("mtp", [])
    before = [drafted[0], *accepted] if drafted else []
    return [a / b if b else 0.0 for a, b in zip(accepted, before, strict=False)]


def predicted(
    acceptance: Sequence[float], steps: int, times: Mapping[int, float], n: int, draft: float
) -> float:
    """The formula at the top, for n requests at once."""
    tokens, alive = 1.0, 1.0
    for rate in acceptance[:steps]:
        alive *= rate
        tokens += alive
    return tokens * times[n] / (times[n * (1 + steps)] + draft)


def measure(args: argparse.Namespace, variants: Sequence[Variant], items: Sequence[Item]) -> dict[str, Any]:
    """All variants in turn, at one concurrency."""
    n, most = args.now, args.model_steps
    tokenizer = variants[0].llm.tokenizer
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template(item.messages), add_special_tokens=False)
        if item.token_ids is None
        else list(item.token_ids)
        for item in items
    ]
    context = sum(map(len, prompts)) // len(prompts) + args.max_tokens // 2
    times = step_seconds(variants[0], [n * (1 + k) for k in range(most + 1)], context)
    for variant in variants:
        for seconds in (variant.seconds, variant.plain, variant.drafting):
            seconds.clear()
    with watch_others() as others:
        for number in range(args.rounds):
            for variant in variants:
                for plain in (True, False) if number % 2 == 0 else (False, True):
                    run_round(variant, prompts, args, number, plain)
    longest = next(variant for variant in variants if variant.steps == most)
    acceptance = conditional_acceptance(longest)
    rows = []
    for variant in variants:
        ratios = [a / b for a, b in zip(variant.plain, variant.seconds, strict=True)]
        draft = statistics.median(variant.drafting) if variant.drafting else 0.0
        row = {
            "name": variant.name,
            "steps": variant.steps,
            "tokens_per_step": variant.num_tokens / variant.num_steps,
            "draft_ms": draft * 1e3,
            "measured": statistics.median(ratios),
            "measured_range": [min(ratios), max(ratios)],
            "same_outputs": sum(a == b for a, b in zip(variant.outputs, variants[0].outputs, strict=True)),
        }
        if variant.steps:
            row["predicted"] = predicted(acceptance, variant.steps, times, n, draft)
        rows.append(row)
    return {
        "concurrency": n,
        "context": context,
        "acceptance": acceptance,
        "step_ms": {str(count): seconds * 1e3 for count, seconds in times.items()},
        "plain_ms_per_token": statistics.median([s for one in variants for s in one.plain]) * 1e3,
        "others_cores": others.cores,
        "prompts": len(prompts),
        "variants": rows,
    }


def show(result: Mapping[str, Any]) -> None:
    acceptance = " ".join(number(rate, 3) for rate in result["acceptance"]) or "-"
    steps = ", ".join(f"T({rows}) {ms:.2f}" for rows, ms in result["step_ms"].items())
    print(
        f"\n{result['concurrency']} at once, context {result['context']}; acceptance by position "
        f"(conditional) {acceptance}; ms: {steps}; other processes used {result['others_cores']:.2f} cores\n"
    )
    rows = []
    for one in result["variants"]:
        low, high = one["measured_range"]
        rows.append(
            [
                one["name"],
                number(one["tokens_per_step"], 2),
                number(one["draft_ms"], 2),
                number(one.get("predicted"), 2),
                number(one["measured"], 2),
                f"{low:.2f}-{high:.2f}",
                f"{one['same_outputs']} of {result['prompts']}",
            ]
        )
    header = ["", "tokens/step", "drafting ms", "predicted", "measured", "range", "same output"]
    print(format_table(rows, header))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmark_mtp.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", help="directory of the head (default: the model's own)")
    parser.add_argument("--model-steps", type=int, default=3, help="most model steps")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dataset-name", default="prompts", choices=list(DATASETS))
    parser.add_argument("--dataset-path", type=Path)
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kv-blocks", type=int, default=512, help="cache blocks of each engine")
    parser.add_argument("--quiet", type=float, default=30, help="seconds to wait for other work to end first")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument(
        "--plot", type=Path, help="predicted and measured speed-up of the first concurrency, PNG"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        options = DatasetOptions(path=args.dataset_path, num_prompts=args.num_prompts)
        items = load_dataset(args.dataset_name, options)
        variants = make_variants(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    quiet = wait_until_quiet(limit_s=args.quiet)
    results = []
    for concurrency in args.concurrency:
        args.now = concurrency
        results.append(measure(args, variants, items))
        show(results[-1])
    if args.json:
        settings = {key: value for key, value in vars(args).items() if isinstance(value, str | int | float)}
        whole = {
            "settings": settings, "machine": describe_machine(), "quiet_at_start": quiet, "results": results
        }  # fmt: skip
        write_json(args.json, json.loads(json.dumps(whole)))
    if args.plot:
        title = f"{args.model}, {args.dataset_path or args.dataset_name}, {results[0]['concurrency']} at once"
        if not plot_prediction(args.plot, results[0]["variants"], title):
            print("no plot: matplotlib is not installed", file=sys.stderr)
    return 1 if any(one["same_outputs"] < r["prompts"] for r in results for one in r["variants"]) else 0


if __name__ == "__main__":
    sys.exit(main())
