"""The flags of benchmark_serving.py. Names follow FastDeploy's and vLLM's script where they have one."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.client import ENDPOINTS
from benchmarks.metrics import parse_goodput
from benchmarks.workload import DATASETS

# Flag -> request field; a flag that is given goes into every request and beats file and data set.
SAMPLING_FLAGS: dict[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
}


def _comma_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _percentiles(text: str) -> list[float]:
    return [float(part) for part in _comma_list(text)]


def build_parser(metrics: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark_serving.py", description="Measure an OpenAI-compatible server under load."
    )
    _add_server(parser)
    _add_load(parser)
    _add_sampling(parser)
    _add_output(parser, metrics)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", default="openai-chat", choices=list(ENDPOINTS))
    group.add_argument("--base-url", help="default: http://HOST:PORT")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--endpoint", help="path, if not the backend's usual one")
    group.add_argument("--api-key")
    group.add_argument(
        "--model", help="name in requests (default: the first the server lists); MODEL to start"
    )
    group.add_argument("--served-model-name", help="name in requests, where it differs from --model")
    group.add_argument("--config", help="YAML for `outrider serve`, which is started if nobody answers")
    group.add_argument("--speculative-config", help="JSON for `outrider serve`, likewise")
    group.add_argument(
        "--server-args", type=shlex.split, default=[], help="further flags for `outrider serve`"
    )
    group.add_argument("--start-timeout", type=float, default=600, help="seconds until it must be ready")
    group.add_argument(
        "--baseline", action="store_true", help="also measure with speculation off; print ratios"
    )
    group.add_argument(
        "--rounds", type=int, help="repetitions of the load (default: 3 with --baseline, else 1)"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--dataset-name", default="prompts", choices=list(DATASETS))
    group.add_argument(
        "--dataset-path", type=Path, help="file; for `prompts` also chat, edit, code, mixed or prefill"
    )
    group.add_argument("--num-prompts", type=int, help="default: the whole file, or 100 random prompts")
    group.add_argument("--shuffle", action="store_true")
    group.add_argument(
        "--seed", type=int, default=0, help="of everything drawn here; request i carries SEED + i"
    )
    group.add_argument(
        "--request-rate", type=float, default=float("inf"), help="requests/s; inf: all at once"
    )
    group.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson arrivals; lower: burstier")
    group.add_argument("--max-concurrency", type=int, help="most requests under way at once")
    group.add_argument("--num-warmups", type=int, default=1, help="requests before the run, not counted")
    group.add_argument("--request-timeout", type=float, default=3600, help="seconds one request may take")
    group.add_argument(
        "--sharegpt-output-len", type=int, help="tokens out where the data set names no number"
    )
    group.add_argument("--random-input-len", type=int, default=200, help="words, or ids for random_token_ids")
    group.add_argument("--random-output-len", type=int, default=128)
    group.add_argument(
        "--random-range-ratio", type=float, default=0.1, help="lengths are within L(1-r)..L(1+r)"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "request fields (flag > --extra-body > --hyperparameter-path > data set)"
    )
    group.add_argument("--hyperparameter-path", type=Path, help="YAML merged over every request")
    group.add_argument("--extra-body", type=json.loads, default={}, help="JSON merged over every request")
    group.add_argument("--ignore-eos", action="store_true", help="go on to max_tokens")
    for name, kind in SAMPLING_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind)


def _add_output(parser: argparse.ArgumentParser, metrics: Sequence[str]) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--percentile-metrics", type=_comma_list, default=list(metrics), help=",".join(metrics)
    )
    group.add_argument("--metric-percentiles", type=_percentiles, default=[90.0, 99.0])
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft:200 tpot:50 e2el:5000"
    )
    group.add_argument("--result-dir", type=Path, default=Path("results"))
    group.add_argument("--result-filename", help="default: backend, rate, concurrency, model and time")
    group.add_argument("--save-detailed", action="store_true", help="also every request's figures and text")
    group.add_argument("--no-save", action="store_true", help="the table only")
    group.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="kept in the result file"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def check(args: argparse.Namespace) -> None:
    """Fill in what depends on other flags; refuse what cannot be."""
    args.base_url = args.base_url or f"http://{args.host}:{args.port}"
    args.rounds = args.rounds or (3 if args.baseline else 1)
    for name in ("rounds", "num_prompts", "max_concurrency", "random_input_len", "random_output_len"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= args.random_range_ratio < 1:
        raise ValueError(
            f"--random-range-ratio must be at least 0 and below 1, got {args.random_range_ratio}"
        )
    parse_goodput(args.goodput)
    for pair in args.metadata:
        if "=" not in pair:
            raise ValueError(f"--metadata wants KEY=VALUE, got {pair!r}")
    if not isinstance(args.extra_body, dict):
        raise ValueError("--extra-body must be a JSON object")


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What is merged over every request, the stronger source last."""
    fields: dict[str, Any] = {}
    if args.hyperparameter_path is not None:
        loaded = yaml.safe_load(args.hyperparameter_path.read_text(encoding="utf-8"))
        if not isinstance(loaded, dict):
            raise ValueError(f"{args.hyperparameter_path} must hold a mapping of request fields")
        fields.update(loaded)
    fields.update(args.extra_body)
    if args.ignore_eos:
        fields["ignore_eos"] = True
    fields.update({name: getattr(args, name) for name in SAMPLING_FLAGS if getattr(args, name) is not None})
    return fields
