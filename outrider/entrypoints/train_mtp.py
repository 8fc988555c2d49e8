"""`outrider train-mtp`: train a draft head for a model on what the model itself writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.config import DEFAULT_MODEL
from outrider.entrypoints.arguments import Parser

_DESCRIPTION = """Train an MTP head. The model writes conversations in large batches, and the head learns to
foresee its next tokens from its hidden states. DIR gets config.json and model.safetensors, a checkpoint to go
on from, and report.json with the head's acceptance on held-out conversations."""


def main(arguments: Sequence[str]) -> int:
    """Generate data, train, and print the held-out acceptance."""
    options = _parser().parse_args(arguments)
    _check(options)
    try:
        from outrider.training import pipeline
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise RuntimeError("training needs PyTorch: pip install 'outrider[train]'") from error
    if options.num_threads:
        import torch

        torch.set_num_threads(options.num_threads)
    report = pipeline.run(_options(options, pipeline))
    if report:
        print(pipeline.table(report))
        print(f"head: {options.out}")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="outrider train-mtp", description=_DESCRIPTION)
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="the target: built-in name, path or hub id")
    add("--out", metavar="DIR", type=Path, required=True, help="where the head goes")
    add("--data", metavar="DIR", type=Path, help="where the generated data is kept (default: OUT/data)")
    add("--data-files", metavar="FILE", nargs="+", default=[], help="texts for summarise and edit prompts")
    add("--tokens", type=int, default=1_000_000, help="tokens to generate (default: %(default)s)")
    add("--heldout-tokens", type=int, default=7000, help="of each held-out set (default: %(default)s)")
    add("--heldout-limit", type=int, help="evaluate only so many conversations of each held-out set")
    add("--hours", type=float, help="train for so long, generating not counted")
    add("--steps", type=int, help="train for so many updates (default without --hours: 2 epochs)")
    add("--resume", action="store_true", help="go on from DIR's checkpoint")
    add("--only", choices=("data", "train", "evaluate"), help="one part of the work")
    add("--vocab", type=int, default=8192, help="tokens that can be drafted (default: %(default)s)")
    add("--num-steps", type=int, default=3, help="draft steps that are trained (default: %(default)s)")
    add("--beta", type=float, default=0.6, help="weight of each step relative to the one before")
    add("--sharpen", type=float, default=1.0, help="temperature of the distribution that is learned")
    add("--hidden-weight", type=float, default=0.0, help="weight of the hidden states' distance")
    add("--learning-rate", type=float, help="of matrices (default: 0.005 for muon, 0.001 for adamw)")
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--batch-tokens", type=int, default=2048, help="of an update (default: %(default)s)")
    add("--question-weight", type=float, default=0.5, help="of tokens in questions that the model wrote")
    add("--prompt-weight", type=float, default=0.0, help="of tokens that the model was given")
    add("--start", choices=("residual", "layer", "identity"), default="residual", help="first weights")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=1, help="processes that generate, of one thread each if several")
    add("--places", type=int, default=64, help="conversations in a batch (default: %(default)s)")
    add("--num-threads", type=int, help="of the trainer")
    add("--backend", choices=("native", "torch"), default="native", help="that generates")
    add("--device", default="auto", help="of the trainer: auto, cpu or cuda")
    add("--compute", choices=("auto", "float32", "bfloat16"), default="auto", help="of matrix products")
    add("--no-progress", action="store_true", help="no progress bars")
    add("--worker", type=int, help="internal: this process is worker number N")
    return parser


def _check(options: Any) -> None:
    """Bounds, before anything is loaded."""
    positive = (
        "tokens",
        "heldout_tokens",
        "vocab",
        "num_steps",
        "batch_tokens",
        "workers",
        "places",
        "steps",
        "hours",
    )
    for name in positive:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
    if not 0 < options.sharpen <= 10:
        raise ValueError(f"--sharpen must be above 0 and at most 10, got {options.sharpen}")
    for file in options.data_files:
        if not Path(file).is_file():
            raise ValueError(f"--data-files: there is no file {file}")


def _options(options: Any, pipeline: Any) -> Any:
    rate = options.learning_rate or {"muon": 0.005, "adamw": 0.001}[options.optimizer]
    return pipeline.Options(
        model=options.model,
        out=options.out,
        data=options.data or options.out / "data",
        data_files=tuple(options.data_files),
        tokens=options.tokens,
        heldout_tokens=options.heldout_tokens,
        heldout_limit=options.heldout_limit,
        places=options.places,
        workers=options.workers,
        worker=options.worker,
        backend=options.backend,
        vocab=options.vocab,
        batch_tokens=options.batch_tokens,
        question_weight=options.question_weight,
        prompt_weight=options.prompt_weight,
        start=options.start,
        compute=options.compute,
        device=options.device,
        resume=options.resume,
        only=options.only,
        progress=not options.no_progress,
        train=pipeline.TrainOptions(
            steps=options.steps,
            hours=options.hours,
            learning_rate=rate,
            optimizer=options.optimizer,
            seed=options.seed,
        ),
        loss=pipeline.LossOptions(
            num_steps=options.num_steps,
            beta=options.beta,
            sharpen=options.sharpen,
            hidden_weight=options.hidden_weight,
        ),
    )
