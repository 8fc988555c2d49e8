"""`outrider train-mtp` from end to end: data, training, report. Each part goes on where it was stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from tqdm import tqdm

from outrider.models.loader import Checkpoint, load_checkpoint
from outrider.models.mtp_loader import fingerprint, quick_fingerprint
from outrider.training.corpus import Batches, Corpus, frequent_tokens
from outrider.training.data import Generator, Record, Store, generate
from outrider.training.evaluate import Acceptance, measure
from outrider.training.export import write_head
from outrider.training.loss import LossOptions
from outrider.training.mtp import (
    HeadConfig,
    MTPHead,
    head_settings,
    start_as_sum,
    start_from_layer,
    start_projection,
)
from outrider.training.prompts import PromptSource
from outrider.training.trainer import Trainer, TrainOptions

HELDOUT_KINDS = ("chat", "text", "code")
HELDOUT_TEMPERATURES = (0.0, 0.7)
_HELDOUT_ANSWER = 160  # tokens at most
_HELDOUT_SEED = 7
_CHECKPOINT_SECONDS = 300
_REFRESH_EVERY = 8  # updates: data may still be coming
_EVALUATE_EVERY = 3  # checkpoints
_FOLLOWED = 8  # conversations of each held-out set that are evaluated on the way
_EPOCHS = 2  # without --steps and --hours
_START_DOCUMENTS = 300  # from which the projection starts


@dataclass(frozen=True)
class Options:
    """What `outrider train-mtp` was asked to do."""

    model: str
    out: Path
    data: Path
    data_files: tuple[str, ...] = ()
    tokens: int = 1_000_000
    heldout_tokens: int = 7000
    heldout_limit: int | None = None  # conversations of each held-out set that are evaluated
    places: int = 64
    workers: int = 1
    worker: int | None = None  # this process is one of the workers and only generates
    backend: str = "native"
    vocab: int = 8192
    batch_tokens: int = 2048
    question_weight: float = 0.5
    prompt_weight: float = 0.0
    start: str = "residual"  # or "layer" or "identity": see `_start`
    compute: str = "auto"
    device: str = "auto"
    resume: bool = False
    checkpoint_seconds: float = _CHECKPOINT_SECONDS
    train: TrainOptions = field(default_factory=TrainOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    only: str | None = None  # data, train or evaluate
    progress: bool = True


def run(options: Options) -> dict[str, Any]:
    """Everything that is asked for; the report."""
    checkpoint = load_checkpoint(options.model)
    HeadConfig.of(checkpoint.config)  # what cannot be trained is refused before hours are spent
    if options.worker is not None:
        _work(checkpoint, options)
        return {}
    if options.only in (None, "data"):
        make_data(checkpoint, options)
    if options.only == "data":
        return {}
    return train(checkpoint, options)


# Data


def make_data(checkpoint: Checkpoint, options: Options) -> None:
    """The training data and the held-out sets, with as many worker processes as asked for."""
    store = Store(options.data / "train")
    bar = _bar(options, options.tokens, "data", "tok")
    if options.workers == 1:
        _work(checkpoint, options, bar)
    else:
        command = [sys.executable, "-m", "outrider.entrypoints.cli", "train-mtp", *sys.argv[2:]]
        children = [
            subprocess.Popen([*command, "--worker", str(worker)]) for worker in range(options.workers)
        ]
        try:
            while any(child.poll() is None for child in children):
                time.sleep(2.0)
                bar.n = store.num_tokens()
                bar.refresh()
        finally:
            for child in children:
                if child.poll() is None:
                    child.terminate()
        failed = [child.returncode for child in children if child.returncode != 0]
        if failed:
            raise RuntimeError("a worker that generates data failed; its message is above")
    bar.close()


def _work(checkpoint: Checkpoint, options: Options, bar: Any = None) -> None:
    """Held-out sets (worker 0), then this worker's share of the training data."""
    worker = options.worker or 0
    generator = Generator(
        checkpoint,
        places=options.places,
        num_threads=None if options.workers == 1 else 1,
        backend=options.backend,
    )
    if worker == 0:
        for kind in HELDOUT_KINDS:
            for temperature in HELDOUT_TEMPERATURES:
                source = PromptSource(
                    checkpoint.tokenizer, seed=_HELDOUT_SEED, heldout=True, kinds=(kind,),
                    files=options.data_files, temperature=temperature, max_answer=_HELDOUT_ANSWER,
                )  # fmt: skip
                store = Store(options.data / f"heldout-{kind}-{temperature}")
                generate(generator, source, store, num_tokens=options.heldout_tokens)
    source = PromptSource(checkpoint.tokenizer, seed=options.train.seed, files=options.data_files)
    store = Store(options.data / "train", worker)
    if bar is not None:
        bar.update(store.num_tokens())
    generate(
        generator,
        source,
        store,
        num_tokens=-(-options.tokens // options.workers),
        worker=worker,
        num_workers=options.workers,
        progress=bar.update if bar is not None else None,
    )


# Training


def train(checkpoint: Checkpoint, options: Options) -> dict[str, Any]:
    """Train a head on the data there is, or go on; write it and its report."""
    torch.manual_seed(options.train.seed)
    rank, ranks = _join()
    corpus = Corpus(Store(options.data / "train"))
    num_tokens = corpus.refresh(_agree)
    if not num_tokens:
        raise ValueError(f"{options.data}: holds no training data; generate it first (--only data)")
    if options.train.steps is None and options.train.hours is None:
        steps = -(-_EPOCHS * num_tokens // options.batch_tokens)
        options = replace(options, train=replace(options.train, steps=steps))
    saved = options.out / "checkpoint.pt"
    is_resumed = saved.exists() and (options.resume or options.only == "evaluate")
    token_ids = _saved_ids(saved) if is_resumed else _choose_ids(checkpoint, corpus, options.vocab)
    head = make_head(checkpoint, token_ids, options)
    batches = Batches(
        corpus,
        token_ids,
        checkpoint.config.vocab_size,
        batch_tokens=options.batch_tokens,
        question_weight=options.question_weight,
        prompt_weight=options.prompt_weight,
    )
    trainer = Trainer(head, batches, options.train, options.loss, rank=rank, ranks=ranks)
    if is_resumed:
        trainer.restore(saved)
    else:
        _start(head, checkpoint, corpus, options)
    heldout = _heldout(options) if rank == 0 else {}
    if options.only != "evaluate":
        _loop(trainer, corpus, heldout, checkpoint, options)
    if rank:
        return {}
    if options.only != "evaluate":  # before the report, which takes minutes
        options.out.mkdir(parents=True, exist_ok=True)
        trainer.save(saved)
    report = _report(trainer, corpus, heldout)
    if options.only != "evaluate":
        _write(trainer, checkpoint, options, report)
    return report


def _join() -> tuple[int, int]:
    """This process's rank, and how many there are: more than one under torchrun."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not distributed.is_initialized():
        distributed.init_process_group("gloo")
    return int(os.environ.get("RANK", "0")), ranks


def _agree(names: list[str]) -> list[str]:
    """Rank 0's list, in every rank."""
    if not distributed.is_initialized():
        return names
    shared: list[Any] = [names]
    distributed.broadcast_object_list(shared)
    agreed: list[str] = shared[0]
    return agreed


def _choose_ids(checkpoint: Checkpoint, corpus: Corpus, count: int) -> np.ndarray:
    config = checkpoint.config
    always = sorted(config.eos_token_ids)
    return frequent_tokens(corpus.records, min(count, config.vocab_size), config.vocab_size, always)


def _saved_ids(path: Path) -> np.ndarray:
    ids: np.ndarray = torch.load(path, weights_only=True)["token_ids"].numpy()
    return ids


def make_head(checkpoint: Checkpoint, token_ids: np.ndarray, options: Options) -> MTPHead:
    """A head over the target's own embedding and the chosen rows of its LM head."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = checkpoint.config
    embedding = torch.from_numpy(_matrix(checkpoint, "embed"))
    rows = embedding if config.tie_embeddings else torch.from_numpy(_matrix(checkpoint, "head"))
    ids = torch.from_numpy(token_ids)
    head = MTPHead(HeadConfig.of(config), embedding, rows[ids.long()].clone(), ids).to(device)
    compute = options.compute
    if compute == "auto":
        compute = "bfloat16" if _has_fast_bf16(device) else "float32"
    head.compute = {"bfloat16": torch.bfloat16, "float32": torch.float32}[compute]
    return head


def _has_fast_bf16(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.is_bf16_supported()
    try:  # asked of the CPU's flags: without the instruction bfloat16 is slower than float32
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _start(head: MTPHead, checkpoint: Checkpoint, corpus: Corpus, options: Options) -> None:
    """The first weights: the block is the target's last layer, its projection a least-squares guess of the
    hidden state. That is better left alone at first, so by default the block's outputs begin at nothing.
    """
    prefix = f"layers.{checkpoint.config.num_layers - 1}."
    names = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")
    layer = {name: _matrix(checkpoint, prefix + name) for name in names}
    start_from_layer(head, layer, _matrix(checkpoint, "norm"), residual=options.start == "residual")
    if options.start == "identity":
        start_as_sum(head)
        return
    documents = [
        (torch.from_numpy(record.tokens.astype(np.int64)), torch.from_numpy(record.hidden))
        for record in corpus.records[:_START_DOCUMENTS]
    ]
    start_projection(head, documents)


def _matrix(checkpoint: Checkpoint, name: str) -> np.ndarray:
    tensor = checkpoint.tensors[name]
    return np.array(tensor.to_float32(), np.float32).reshape(tensor.shape)


def _heldout(options: Options) -> dict[str, list[Record]]:
    """Held-out records by `kind temperature`, in order of their numbers."""
    sets = {}
    for path in sorted(options.data.glob("heldout-*")):
        _, kind, temperature = path.name.split("-")
        records = sorted(Store(path).read(), key=lambda record: record.index)
        if records:
            sets[f"{kind} {temperature}"] = records[: options.heldout_limit]
    return sets


def _loop(
    trainer: Trainer,
    corpus: Corpus,
    heldout: dict[str, list[Record]],
    checkpoint: Checkpoint,
    options: Options,
) -> None:
    """Steps until the schedule's end, with checkpoints, and a line in the log at each."""
    is_writer = not distributed.is_initialized() or distributed.get_rank() == 0
    bar = _bar(options, 100, "training", "%")
    last = trainer.clock
    first = {name: records[:_FOLLOWED] for name, records in heldout.items()}
    checkpoints, losses = 0, []
    while trainer.progress() < 1.0:
        if trainer.step % _REFRESH_EVERY == 0:
            corpus.refresh(_agree)
        losses.append(trainer.train_step())
        bar.n = round(100 * trainer.progress(), 1)
        means = np.mean(losses[-20:], 0).tolist()
        bar.set_postfix(step=trainer.step, loss=" ".join(f"{mean:.2f}" for mean in means))
        if trainer.clock - last > options.checkpoint_seconds:
            last, checkpoints = trainer.clock, checkpoints + 1
            if not is_writer:
                continue
            line = _report(trainer, corpus, {} if checkpoints % _EVALUATE_EVERY else first)
            line["loss"] = [round(mean, 4) for mean in np.mean(losses, 0).tolist()]
            trainer.history.append(line)
            _write(trainer, checkpoint, options, line)
            losses = []
    bar.close()


def _report(trainer: Trainer, corpus: Corpus, heldout: dict[str, list[Record]]) -> dict[str, Any]:
    """Where the training is and what the averaged head's drafts are worth."""
    steps = trainer.loss.num_steps

    def acceptance() -> dict[str, Acceptance]:
        return {name: measure(trainer.head, records, num_steps=steps) for name, records in heldout.items()}

    found = trainer.averaged(acceptance)
    return {
        "step": trainer.step,
        "tokens_seen": trainer.tokens,
        "data_tokens": sum(len(record.tokens) for record in corpus.records),
        "hours": round(trainer.seconds / 3600, 4),
        "heldout": {name: result.view() for name, result in found.items()},
    }


def _write(trainer: Trainer, checkpoint: Checkpoint, options: Options, report: dict[str, Any]) -> None:
    """The checkpoint, the head as it is now, and the report with the learning curve."""
    options.out.mkdir(parents=True, exist_ok=True)
    trainer.save(options.out / "checkpoint.pt")
    head = trainer.head
    tensors = trainer.averaged(
        lambda: {name: tensor.detach().cpu().numpy().copy() for name, tensor in head.tensors().items()}
    )
    tensors["draft_token_ids"] = head.token_ids.cpu().numpy().astype(np.int32)
    settings = head_settings(
        head,
        checkpoint.config,
        num_model_steps=trainer.loss.num_steps,
        **_marks(checkpoint.path),
    )
    write_head(options.out, settings, tensors)
    text = json.dumps({**report, "curve": trainer.history}, indent=1)
    (options.out / "report.json").write_text(text + "\n")


def _marks(path: str) -> dict[str, str | None]:
    """What tells the target from other files, if it is one file."""
    if not Path(path).is_file():
        return {"target_sha256": None}
    return {"target_sha256": fingerprint(path), "target_fingerprint": quick_fingerprint(path)}


def _bar(options: Options, total: float, name: str, unit: str) -> Any:
    return tqdm(total=total, desc=name, unit=unit, disable=not options.progress, mininterval=1.0)


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"step {report['step']}, {report['tokens_seen']:,} tokens seen of {report['data_tokens']:,} stored, "
        f"{report['hours']:.2f} hours",
        f"{'held out':<12} {'accepted, given those before':<30} tokens per step",
    ]
    for name, result in report["heldout"].items():
        values = " ".join(f"{value:.2f}" for value in result["conditional"])
        lines.append(f"{name:<12} {values:<30} {result['tokens_per_step']:.2f}")
    return "\n".join(lines)


__all__: Sequence[str] = ("Options", "run", "table")
