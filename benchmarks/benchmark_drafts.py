"""What would another plan have drafted? Records token streams once, replays any plan without the model.

    python benchmarks/benchmark_drafts.py record chat.jsonl --dataset-path chat --temperature 0
    python benchmarks/benchmark_drafts.py replay chat.jsonl --speculative-config '{"method": "suffix"}' \
        --speculative-config '{"method": "ngram"}' --concurrency 1,4

`record` asks a running server (--base-url) or the model in this process, and keeps what a step takes by its
rows. `replay` gives tokens per step, acceptance by source and position, the speed-up that the step times make
of them, and two bounds: hindsight (the same drafts, but only the right ones verified) and the oracle (a
drafter that is always right). Sources that run a model of their own cannot be replayed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.draft_replay import (
    Recording,
    Report,
    Stream,
    acceptance_text,
    best_first,
    calibration_of,
    oracle,
    replay,
)
from benchmarks.plots import plot_acceptance
from benchmarks.report import format_table, number, write_json
from benchmarks.workload import DATASETS, DatasetOptions, Item, load_dataset

PLANS = ('{"method": "auto"}', '{"method": "suffix"}', '{"method": "ngram"}')


def record(args: argparse.Namespace) -> Recording:
    options = DatasetOptions(path=args.dataset_path, num_prompts=args.num_prompts, seed=args.seed)
    items = load_dataset(args.dataset_name, options)
    fields: dict[str, Any] = {"temperature": args.temperature}
    if args.max_tokens is not None:
        fields["max_tokens"] = args.max_tokens
    if args.base_url:
        return asyncio.run(_from_server(args, items, fields))
    return _from_model(args, items, fields)


async def _from_server(
    args: argparse.Namespace, items: Sequence[Item], fields: Mapping[str, Any]
) -> Recording:
    import aiohttp

    from benchmarks.client import Client, Target, fetch_json, first_model

    view = await fetch_json(args.base_url, "/v1/speculation", args.api_key)
    if not view or not view.get("calibration"):
        raise SystemExit(
            f"{args.base_url} does not tell what its steps take: it must be `outrider serve` with speculation"
        )
    model = await first_model(args.base_url, args.api_key)
    fields = {**fields, "return_token_ids": True}
    target = Target(args.base_url, "openai-chat", model, fields, api_key=args.api_key)
    streams = []
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with Client() as client, aiohttp.ClientSession(headers=headers) as session:
        for index, item in enumerate(items):
            answer = await client.send(target, item, args.seed + index)
            if not answer.ok:
                raise SystemExit(f"request {item.id} failed: {answer.error}")
            prompt = item.token_ids
            if prompt is None:
                url = args.base_url.rstrip("/") + "/tokenize"
                async with session.post(url, json={"messages": item.messages}) as reply:
                    prompt = (await reply.json())["tokens"]
            streams.append(Stream(item.id, prompt, answer.token_ids))
    return Recording(model, calibration_of(view["calibration"]), streams)


def _from_model(args: argparse.Namespace, items: Sequence[Item], fields: Mapping[str, Any]) -> Recording:
    from outrider import LLM, SamplingParams

    with LLM(args.model, num_threads=args.threads) as llm:
        prompts = [
            llm.tokenizer.encode(llm.tokenizer.apply_chat_template(item.messages), add_special_tokens=False)
            if item.token_ids is None
            else item.token_ids
            for item in items
        ]
        params = [
            SamplingParams(**{"max_tokens": item.max_tokens, "seed": args.seed + i, **fields})
            for i, item in enumerate(items)
        ]
        answers = llm.generate(prompts, params)
        steps = llm.engine.stats()["speculation"]["controller"]["cost"]
    streams = [
        Stream(item.id, prompt, answer.token_ids)
        for item, prompt, answer in zip(items, prompts, answers, strict=True)
    ]
    return Recording(args.model, calibration_of(steps), streams)


def parts_for(model: str) -> Any:
    """What sources are made from without a model: the tables that belong to its vocabulary, and trees."""
    from outrider.config import EngineConfig
    from outrider.engine.factory import load
    from outrider.spec_decode.phrases import PhraseProposer, shipped_phrases, vocabulary_name
    from outrider.spec_decode.proposer import Parts

    try:
        tokenizer = load(EngineConfig(model=model)).tokenizer
    except (ValueError, OSError) as error:
        print(f"note: no phrases, as the model {model} is not here ({error})", file=sys.stderr)
        return Parts(branches=True)
    table = shipped_phrases(vocabulary_name(tokenizer.token_bytes()))

    def phrases(branches: bool) -> Any:
        return None if table is None else PhraseProposer(table, branches=branches)

    return Parts(phrases=phrases, branches=True)


def replay_all(args: argparse.Namespace) -> dict[str, Any]:
    plans = args.speculative_config or list(PLANS)
    results: dict[str, Any] = {"recordings": []}
    for path in args.recordings:
        recording = Recording.read(path)
        parts = parts_for(args.model or recording.model)
        reports: list[Report] = []
        bounds: dict[int, float] = {}
        for concurrency in args.concurrency:
            bounds[concurrency] = oracle(recording, concurrency)
            for plan in plans:
                reports.append(replay(recording, json.loads(plan), parts, concurrency=concurrency, name=plan))
        results["recordings"].append(
            {
                "file": str(path),
                "model": recording.model,
                "streams": len(recording.streams),
                "oracle": {str(concurrency): bound for concurrency, bound in bounds.items()},
                "plans": best_first(reports),
            }
        )
    return results


def show(results: Mapping[str, Any]) -> None:
    for one in results["recordings"]:
        print(f"\n{one['file']}: {one['streams']} streams of {one['model']}\n")
        rows = []
        for figures in one["plans"]:
            bound = one["oracle"][str(figures["concurrency"])]
            rows.append(
                [
                    f"{figures['concurrency']} {figures['plan']}",
                    number(figures["tokens_per_step"], 2),
                    number(figures["speed_up"], 2),
                    number(figures["hindsight_speed_up"], 2),
                    number(bound, 2),
                    number(figures["drafting_us_per_step"], 0),
                ]
            )
        header = ["concurrency, plan", "tokens/step", "speed-up", "hindsight", "oracle", "drafting us"]
        print(format_table(rows, header))
        for figures in one["plans"]:
            print(f"{figures['concurrency']} {figures['plan']}: {acceptance_text(figures)}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmark_drafts.py", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="keep token streams of a model")
    one.add_argument("out", type=Path, metavar="OUT.jsonl")
    one.add_argument("--base-url", help="a running server (default: the model in this process)")
    one.add_argument("--api-key")
    one.add_argument("--model", default="smollm2-135m")
    one.add_argument("--threads", type=int)
    one.add_argument("--dataset-name", default="prompts", choices=list(DATASETS))
    one.add_argument("--dataset-path", type=Path)
    one.add_argument("--num-prompts", type=int)
    one.add_argument("--max-tokens", type=int)
    one.add_argument("--temperature", type=float, default=0.0)
    one.add_argument("--seed", type=int, default=0)
    two = commands.add_parser("replay", help="try plans on recordings")
    two.add_argument("recordings", type=Path, nargs="+", metavar="FILE.jsonl")
    two.add_argument("--speculative-config", action="append", metavar="JSON", help="a plan; repeatable")
    two.add_argument("--concurrency", type=_numbers, default=[1], help="streams at once: 1,4,8")
    two.add_argument("--model", help="whose tables to use (default: the recorded one)")
    two.add_argument("--json", type=Path, help="also write the figures there")
    two.add_argument("--plot", type=Path, help="acceptance by position and source, as PNG")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.command == "record":
            begin = time.perf_counter()
            recording = record(args)
            recording.write(args.out)
            tokens = sum(len(stream.output_token_ids) for stream in recording.streams)
            seconds = time.perf_counter() - begin
            print(f"written: {args.out}, {len(recording.streams)} streams, {tokens} tokens, {seconds:.1f} s")
            return 0
        results = replay_all(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(results)
    if args.json:
        write_json(args.json, results)
    if args.plot and not plot_acceptance(args.plot, results["recordings"]):
        print("no plot: matplotlib is not installed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
