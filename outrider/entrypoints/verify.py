"""`outrider verify`: the losslessness certificate of a model on this machine.

Plain decoding of single requests is recorded; then every method, number of drafts, tree, batch, chunk and
block size, number of threads, cache state and adversarial drafter must give the same tokens, the same
log-probabilities and the same ends, bit for bit. The first difference is shown; the exit status is 1.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from outrider import __version__
from outrider.config import ConfigError, EngineConfig
from outrider.entrypoints.arguments import Parser, add_config_flags, configuration_from
from outrider.verification.cases import make_cases
from outrider.verification.certificate import FAILED, IDLE, LACKING, Certificate, Outcome
from outrider.verification.questions import make_questions

# --quick and --full: requests and the most tokens each gets.
QUICK, FULL = (12, 24), (72, 64)


def main(arguments: Sequence[str]) -> int:
    """Examine; 0 if everything is equal, 1 if something differs."""
    options = _parse(arguments)
    config: EngineConfig = configuration_from(options).engine
    if config.plas_attention_config:
        raise ConfigError("sparse attention changes results, so there is no certificate for it")
    from outrider.engine.factory import load
    from outrider.engine.machine import physical_cores

    begin = time.perf_counter()
    checkpoint = load(config)
    num_questions, max_tokens = FULL if options.full else QUICK
    questions = make_questions(
        checkpoint.tokenizer, checkpoint.config.vocab_size, options.requests or num_questions, max_tokens
    )
    certificate = Certificate(config, checkpoint, questions)
    threads = config.num_threads or physical_cores()
    print(f"{config.model}: {len(questions)} requests of up to {max_tokens} tokens, {threads} threads\n")
    outcomes = [certificate.record()]
    _show(outcomes[0])
    if outcomes[0].verdict != FAILED:
        head = config.speculative_config.model
        cases = make_cases(questions, threads, target=config.model, head=head, thorough=options.full)
        for case in cases:
            if not options.only or options.only in case.name:
                outcomes.append(certificate.examine(case))
                _show(outcomes[-1])
    seconds = time.perf_counter() - begin
    failed = [outcome for outcome in outcomes if outcome.verdict == FAILED]
    print(f"\n{_summary(outcomes, seconds)}")
    if options.report:
        _write(options.report, config, threads, options, outcomes, seconds)
        print(f"written: {options.report}")
    return 1 if failed else 0


def _parse(arguments: Sequence[str]) -> Any:
    parser = Parser(prog="outrider verify", usage="outrider verify [MODEL] [--full] [--report FILE] [flags]")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="a sample, in a minute or two (the default)")
    effort.add_argument("--full", action="store_true", help="more requests, longer answers, more cases")
    parser.add_argument("--report", metavar="FILE.json", help="also write the certificate there, as JSON")
    parser.add_argument("--only", metavar="TEXT", help="only the cases whose name holds this")
    parser.add_argument("--requests", type=int, metavar="N", help=f"number of requests [{QUICK[0]}]")
    add_config_flags(parser, EngineConfig)
    return parser.parse_args(arguments)


def _show(outcome: Outcome) -> None:
    counts = ", ".join(f"{count} {what}" for what, count in outcome.events.items() if count)
    line = (
        f"{outcome.verdict:<13} {outcome.case:<48} {outcome.seconds:6.1f} s  {outcome.num_tokens:>6} tokens"
    )
    print(f"{line}; {counts}" if counts else line, flush=True)
    if outcome.reason:
        print(f"{'':<14}{outcome.reason}")
    if outcome.verdict == FAILED and outcome.first_difference is not None:
        print(
            f"{'':<14}{outcome.num_different} of the requests differ; first: "
            f"{outcome.first_difference.describe()}"
        )


def _summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    counts = {name: sum(o.verdict == name for o in outcomes) for name in (FAILED, IDLE, LACKING)}
    passed = len(outcomes) - sum(counts.values())
    tokens = sum(outcome.num_tokens for outcome in outcomes)
    rest = "".join(f", {count} {name}" for name, count in counts.items() if count)
    verdict = "NOT lossless" if counts[FAILED] else "lossless: every case gives the tokens of plain decoding"
    return f"{verdict}\n{passed} of {len(outcomes)} cases passed{rest}; {tokens} tokens in {seconds:.0f} s"


def _write(
    path: str, config: EngineConfig, threads: int, options: Any, outcomes: Sequence[Outcome], seconds: float
) -> None:
    import outrider._native as native

    report = {
        "outrider": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": config.model,
        "quantization": config.quantization,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "backend": config.backend,
        "isa": native.isa(),
        "threads": threads,
        "python": sys.version.split()[0],
        "effort": "full" if options.full else "quick",
        "lossless": all(outcome.verdict != FAILED for outcome in outcomes),
        "seconds": round(seconds, 1),
        "cases": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1, ensure_ascii=False)
        file.write("\n")
