"""What the trainer minimises."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.training.corpus import Batch
from outrider.training.mtp import MTPHead


@dataclass(frozen=True)
class LossOptions:
    """`num_steps` draft steps, step k weighing beta**(k-1); `sharpen` divides the target's log-probabilities
    (below 1: nearer to greedy); `hidden_weight` of the distance between normed hidden states."""

    num_steps: int = 3
    beta: float = 0.6
    sharpen: float = 1.0
    hidden_weight: float = 0.0
    least_mass: float = 0.2  # rows whose distribution lies outside the draft vocabulary teach nothing


def target_distribution(batch: Batch, options: LossOptions) -> tuple[Tensor, Tensor]:
    """(draft ids with -1 as 0, probabilities over them), and rows without enough mass are all zero."""
    outside = batch.top_ids < 0
    raw = batch.top_logprobs.masked_fill(outside, -torch.inf)
    mass = raw.exp().sum(-1, keepdim=True)
    sharp = (raw / options.sharpen).nan_to_num(nan=-torch.inf)
    probabilities = torch.where(mass > options.least_mass, sharp.softmax(-1).nan_to_num(0.0), 0.0)
    return batch.top_ids.clamp(min=0), probabilities


def needed_slots(batch: Batch, num_steps: int) -> Tensor:
    """Slots whose states count for the loss, or feed those of the next passes that do."""
    counts = batch.weights > 0
    needed = counts.clone()
    for behind in range(1, num_steps):
        needed[:, :-behind] |= counts[:, behind:]
    return needed


def loss_of(head: MTPHead, batch: Batch, options: LossOptions) -> tuple[Tensor, list[float]]:
    """The mean loss of a batch, and the cross-entropy of each step."""
    ids, probabilities = target_distribution(batch, options)
    states = head.passes(
        batch.tokens, batch.hidden, options.num_steps, needed_slots(batch, options.num_steps)
    )
    total = torch.zeros((), device=batch.hidden.device)
    parts = []
    for k, state in enumerate(states):
        weights = batch.weights.clone()
        weights[:, :k] = 0.0
        weights *= probabilities.sum(-1) > 0
        rows = weights > 0
        weight = weights[rows]
        scale = weight.sum().clamp(min=1.0)
        logits = head.logits(state[rows])
        picked = logits.gather(1, ids[rows]) - logits.logsumexp(1, keepdim=True)
        entropy = -(probabilities[rows] * picked).sum(1)
        term = (weight * entropy).sum() / scale
        parts.append(float(term.detach()))
        if options.hidden_weight:
            term = term + options.hidden_weight * _distance(state[rows], batch.hidden[rows], weight) / scale
        total = total + options.beta**k * term
    return total, parts


def _distance(state: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    width = (state.shape[1],)
    ours, theirs = F.rms_norm(state, width), F.rms_norm(hidden, width)
    return (weight * F.smooth_l1_loss(ours, theirs, reduction="none").mean(1)).sum()
