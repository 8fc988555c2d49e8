"""The training loop: optimiser, schedule, averages, checkpoints."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from outrider.training.corpus import Batches
from outrider.training.loss import LossOptions, loss_of
from outrider.training.mtp import MTPHead


@dataclass(frozen=True)
class TrainOptions:
    """How to train. The schedule follows the larger share of `steps` and `hours` that is used up."""

    steps: int | None = None
    hours: float | None = None
    learning_rate: float = 0.005  # of matrices, which Muon turns
    vector_rate: float = 0.001  # of norms, with AdamW
    optimizer: str = "muon"
    weight_decay: float = 0.01
    warmup_steps: int = 30
    decay_share: float = 0.5  # of the training, at its end, in which the rate falls to nothing
    clip: float = 1.0
    average: float = 0.98  # of weights, for evaluation and export
    seed: int = 0


class Trainer:
    """A head in training. `save` and `restore` keep everything that the next step depends on."""

    def __init__(
        self,
        head: MTPHead,
        batches: Batches,
        options: TrainOptions,
        loss: LossOptions,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """One of `ranks` processes of torch.distributed, which share the batches of a step out."""
        self._rank, self._ranks = rank, ranks
        self.head = head
        self.batches = batches
        self.options = options
        self.loss = loss
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.clock = 0.0  # `seconds` before the last step, the same in all ranks
        self.history: list[dict[str, Any]] = []
        self._rng = random.Random(options.seed)
        self._queue: list[list[int]] = []
        self._optimizers = _optimizers(head, options)
        self._average = {name: p.detach().clone() for name, p in head.named_parameters()}

    def progress(self) -> float:
        """The share of the training that is done."""
        shares = [0.0]
        if self.options.steps is not None:
            shares.append(self.step / self.options.steps)
        if self.options.hours is not None:
            shares.append(self.clock / (3600 * self.options.hours))
        return max(shares)

    def _rate(self) -> float:
        """The factor of the learning rates: rises, stays, falls."""
        left = 1.0 - self.progress()
        fall = min(1.0, left / self.options.decay_share) if self.options.decay_share else 1.0
        warmup = self.options.warmup_steps
        if self.options.steps is not None:
            warmup = min(warmup, -(-self.options.steps // 5))
        return min(1.0, (self.step + 1) / warmup) * (1 - math.cos(math.pi * fall)) / 2

    def train_step(self) -> list[float]:
        """One update; the cross-entropy of each draft step."""
        begin = time.perf_counter()
        while len(self._queue) < self._ranks:
            self._queue += self.batches.plan(self._rng)
        mine = self._queue[self._rank]
        del self._queue[: self._ranks]
        batch = self.batches.batch(mine)
        device = self.head.embedding.device
        batch = type(batch)(**{name: value.to(device) for name, value in vars(batch).items()})
        loss, parts = loss_of(self.head, batch, self.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        num_tokens = int((batch.weights > 0).sum())
        if self._ranks > 1:
            num_tokens = self._share(num_tokens)
        self.clock = self.seconds
        nn.utils.clip_grad_norm_(self.head.parameters(), self.options.clip)
        rate = self._rate()
        for optimizer, base in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * rate
            optimizer.step()
            optimizer.zero_grad()
        self._update_average()
        self.step += 1
        self.tokens += num_tokens
        self.seconds += time.perf_counter() - begin
        return parts

    def _share(self, num_tokens: int) -> int:
        """Make every rank's gradients their mean, and take rank 0's clock; the tokens of all ranks."""
        gradients = [p.grad for p in self.head.parameters() if p.grad is not None]
        ours = torch.tensor([num_tokens, self.seconds if self._rank == 0 else 0.0])
        flat = torch.cat([*(g.reshape(-1) / self._ranks for g in gradients), ours.to(gradients[0].device)])
        distributed.all_reduce(flat)
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        total, self.seconds = flat[start:].tolist()
        return round(total)

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(self.options.average, (self.step + 1) / (self.step + 10))
        for name, parameter in self.head.named_parameters():
            self._average[name].lerp_(parameter, 1 - decay)

    @torch.no_grad()
    def averaged(self, use: Callable[[], Any]) -> Any:
        """Call `use` while the head has its averaged weights."""
        own = {name: parameter.detach().clone() for name, parameter in self.head.named_parameters()}
        for name, parameter in self.head.named_parameters():
            parameter.copy_(self._average[name])
        try:
            return use()
        finally:
            for name, parameter in self.head.named_parameters():
                parameter.copy_(own[name])

    def save(self, path: Path) -> None:
        """A checkpoint, written whole or not at all."""
        state = {
            "head": self.head.state_dict(),
            "average": self._average,
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "history": self.history,
            "rng": self._rng.getstate(),
            "queue": self._queue,
            "uses": self.batches.state(),
            "token_ids": self.head.token_ids,
            "options": asdict(self.options),
            "loss": asdict(self.loss),
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True)
        if not torch.equal(state["token_ids"], self.head.token_ids.cpu()):
            raise ValueError(f"{path}: was trained for another draft vocabulary")
        self.head.load_state_dict(state["head"])
        self._average = {n: t.to(self.head.embedding.device) for n, t in state["average"].items()}
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.clock = self.seconds
        self.history, self._queue = state["history"], state["queue"]
        version, internal, gauss = state["rng"]
        self._rng.setstate((version, tuple(internal), gauss))
        self.batches.restore(state["uses"])


def _optimizers(head: MTPHead, options: TrainOptions) -> list[tuple[torch.optim.Optimizer, float]]:
    """Optimisers with their base rates."""
    matrices = [p for p in head.parameters() if p.ndim == 2]
    vectors = [p for p in head.parameters() if p.ndim == 1]
    adamw: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
    vector = torch.optim.AdamW(vectors, lr=options.vector_rate, weight_decay=0.0, **adamw)
    if options.optimizer == "adamw":
        matrix: torch.optim.Optimizer = torch.optim.AdamW(
            matrices, lr=options.learning_rate, weight_decay=options.weight_decay, **adamw
        )
    else:
        matrix = torch.optim.Muon(
            matrices,
            lr=options.learning_rate,
            weight_decay=options.weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        )
    return [(matrix, options.learning_rate), (vector, options.vector_rate)]
