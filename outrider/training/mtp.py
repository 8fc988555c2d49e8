"""The draft module in torch: what inference does step by step, for all positions of a batch at once.

Slot j holds the module fed with (embedding of t_j, h_(j-1)) and predicts t_(j+1). Pass 1 has the target's
own hidden states. Pass k at slot j is the k-th step of a draft that began at slot j-k+1: it is fed the state
that pass k-1 left at slot j-1, and sees the keys of pass 1 up to slot j-k+1, then one of each later pass, the
last its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.config import ModelConfig

_BLOCK = "model.mtp_block.0."


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head: those of a layer of its target."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    inv_freq: tuple[float, ...]
    hidden_source: str = "pre_norm"

    @classmethod
    def of(cls, model: ModelConfig, hidden_source: str = "pre_norm") -> HeadConfig:
        """For a target; ValueError if its layers have what a head cannot have."""
        if model.rope.layout != "half" or model.rope.rotary_dim != model.head_dim:
            raise ValueError("a head can be trained for targets whose RoPE turns whole heads in halves")
        if model.rope.attention_factor != 1.0 or model.hidden_act != "silu":
            raise ValueError("a head can be trained for targets with plain RoPE and SiLU")
        return cls(
            model.hidden_size,
            model.intermediate_size,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            model.rms_eps,
            tuple(model.rope.inv_freq),
            hidden_source,
        )


class MTPHead(nn.Module):
    """One decoder layer over (token embedding, hidden state), with a final norm of its own."""

    embedding: Tensor
    lm_head: Tensor
    token_ids: Tensor
    inv_freq: Tensor
    embed_proj: nn.Parameter
    hidden_proj: nn.Parameter
    q: nn.Parameter
    k: nn.Parameter
    v: nn.Parameter
    o: nn.Parameter
    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    emb_norm: nn.Parameter
    hidden_norm: nn.Parameter
    attn_norm: nn.Parameter
    mlp_norm: nn.Parameter
    norm: nn.Parameter

    def __init__(self, config: HeadConfig, embedding: Tensor, lm_head: Tensor, token_ids: Tensor) -> None:
        """`embedding` [vocab, H] and `lm_head` [V', H], the target's rows `token_ids`, stay as they are."""
        super().__init__()
        self.config = config
        self.compute = torch.float32  # what matrix products are done in; sums and norms are in float32
        width, inner = config.hidden_size, config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        matrices = {
            "embed_proj": (width, width), "hidden_proj": (width, width),
            "q": (q_width, width), "k": (kv_width, width), "v": (kv_width, width), "o": (width, q_width),
            "gate": (inner, width), "up": (inner, width), "down": (width, inner),
        }  # fmt: skip
        for name, shape in matrices.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * shape[1] ** -0.5))
        for name in ("emb_norm", "hidden_norm", "attn_norm", "mlp_norm", "norm"):
            self.register_parameter(name, nn.Parameter(torch.ones(width)))
        for name, tensor in (("embedding", embedding), ("lm_head", lm_head), ("token_ids", token_ids)):
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("inv_freq", torch.tensor(config.inv_freq), persistent=False)

    def _norm(self, x: Tensor, weight: str) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), getattr(self, weight), self.config.rms_eps)
        return normed.to(self.compute)

    def _linear(self, x: Tensor, weight: str) -> Tensor:
        return F.linear(x, getattr(self, weight).to(self.compute))

    def _heads(self, x: Tensor, count: int, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, L, heads * D] as [B, heads, L, D], turned if there is a rotation."""
        x = x.view(*x.shape[:2], count, -1).transpose(1, 2)
        if rotation is None:
            return x
        cos, sin = rotation
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(self.compute)

    def passes(
        self, tokens: Tensor, hidden: Tensor, count: int, needed: Tensor | None = None
    ) -> list[Tensor]:
        """The module's states [B, L, H], before the final norm, of passes 1 .. count.

        `tokens` [B, L]; `hidden` [B, L, H] is the target's at each token. A padded end does no harm: nothing
        before it sees it. Pass k means nothing at the first k-1 slots. States that nobody needs, by the mask
        `needed` [B, L], are not worked out in full; those must have their keys alone.
        """
        embedded = self._linear(self._norm(self.embedding[tokens], "emb_norm"), "embed_proj").float()
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.inv_freq
        rotation = (angles.cos(), angles.sin())
        cache: list[tuple[Tensor, Tensor]] = []
        states: list[Tensor] = []
        previous = hidden
        for _ in range(count):
            previous = F.pad(previous[:, :-1], (0, 0, 1, 0))  # slot j is fed the state of slot j-1
            x = embedded + self._linear(self._norm(previous, "hidden_norm"), "hidden_proj")
            x = x + self._attend(self._norm(x, "attn_norm"), rotation, cache)
            x = x + self._mlp(self._norm(x, "mlp_norm"), needed)
            states.append(x)
            previous = x
        return states

    def _mlp(self, normed: Tensor, needed: Tensor | None) -> Tensor:
        rows = normed if needed is None else normed[needed]
        out = self._linear(F.silu(self._linear(rows, "gate")) * self._linear(rows, "up"), "down")
        return out if needed is None else torch.zeros_like(normed).index_put((needed,), out)

    def _attend(
        self, normed: Tensor, rotation: tuple[Tensor, Tensor], cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attention of the next pass, whose keys and values join `cache`.

        It is causal attention over the keys of pass 1, put right on the few diagonals where the keys are of
        a later pass.
        """
        config = self.config
        groups = config.num_kv_heads
        q = self._heads(self._linear(normed, "q"), config.num_heads, rotation)
        k = self._heads(self._linear(normed, "k"), groups, rotation)
        v = self._heads(self._linear(normed, "v"), groups, None)
        cache.append((k, v))
        batch, heads, length, dim = q.shape
        grouped = q.reshape(batch, groups, -1, dim)  # query heads of a group, one after the other
        first_k, first_v = cache[0]
        scores = (grouped @ first_k.transpose(2, 3)).view(batch, heads, length, length).float()
        scores = scores.masked_fill(_future(length, q.device), -torch.inf)
        last = len(cache) - 1
        for index in range(1, last + 1):
            behind = last - index  # a key of this pass stands so many slots before the query
            better = (cache[index][0] - first_k)[:, :, : length - behind].repeat_interleave(
                heads // groups, 1
            )
            change = (q[:, :, behind:] * better).sum(-1, dtype=torch.float32)
            scores.diagonal(-behind, 2, 3).add_(change)
        weights = (scores * dim**-0.5).softmax(-1).to(v.dtype)
        out = (weights.reshape(batch, groups, -1, length) @ first_v).view(batch, heads, length, dim)
        for index in range(1, last + 1):
            behind = last - index
            better = (cache[index][1] - first_v)[:, :, : length - behind].repeat_interleave(
                heads // groups, 1
            )
            share = weights.diagonal(-behind, 2, 3)[..., None]
            out = out + F.pad(share * better, (0, 0, behind, 0))
        return self._linear(out.transpose(1, 2).reshape(batch, length, -1), "o")

    def logits(self, states: Tensor) -> Tensor:
        """Over the draft vocabulary, of any rows of states."""
        return F.linear(self._norm(states, "norm"), self.lm_head.to(self.compute)).float()

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by their names there."""
        result = {
            "model.mtp_emb_norm.0.weight": self.emb_norm,
            "model.mtp_hidden_norm.0.weight": self.hidden_norm,
            "model.mtp_linear_proj.0.weight": torch.cat([self.embed_proj, self.hidden_proj], 1),
            "model.mtp_norm.weight": self.norm,
            _BLOCK + "input_layernorm.weight": self.attn_norm,
            _BLOCK + "post_attention_layernorm.weight": self.mlp_norm,
        }
        result |= {f"{_BLOCK}self_attn.{name}_proj.weight": getattr(self, name) for name in "qkvo"}
        result |= {f"{_BLOCK}mlp.{name}_proj.weight": getattr(self, name) for name in ("gate", "up", "down")}
        return result

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights of a checkpoint."""
        for name, mine in self.tensors().items():
            if name == "model.mtp_linear_proj.0.weight":
                halves = tensors[name].float().chunk(2, 1)
                self.embed_proj.copy_(halves[0])
                self.hidden_proj.copy_(halves[1])
            elif name in tensors:
                mine.copy_(tensors[name])


def _future(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


@torch.no_grad()
def start_from_layer(
    head: MTPHead, layer: Mapping[str, np.ndarray], final_norm: np.ndarray, *, residual: bool = False
) -> None:
    """Start the block from a layer of the target. `residual`: its outputs begin at nothing."""
    for name in ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"):
        getattr(head, name).copy_(torch.from_numpy(np.asarray(layer[name], np.float32)))
    if residual:
        head.o.zero_()
        head.down.zero_()
    head.norm.copy_(torch.from_numpy(final_norm))
    head.hidden_norm.copy_(torch.from_numpy(final_norm))


@torch.no_grad()
def start_as_sum(head: MTPHead) -> None:
    """Start the projection as the sum of its two inputs."""
    width = head.config.hidden_size
    head.embed_proj.copy_(torch.eye(width))
    head.hidden_proj.copy_(torch.eye(width))


@torch.no_grad()
def start_projection(head: MTPHead, documents: Sequence[tuple[Tensor, Tensor]], ridge: float = 1e-3) -> float:
    """Start the projection where it best guesses h_j from (t_j, h_(j-1)) by least squares.

    `documents` are (tokens, hidden states). Returns the share of the variance that the guess explains.
    """
    width = head.config.hidden_size
    gram = torch.zeros(2 * width, 2 * width, dtype=torch.float64)
    cross = torch.zeros(2 * width, width, dtype=torch.float64)
    square = total = 0.0
    for tokens, hidden in documents:
        hidden = hidden.float()
        embedded = head._norm(head.embedding[tokens[1 : len(hidden)]], "emb_norm")
        x = torch.cat([embedded, head._norm(hidden[:-1], "hidden_norm")], 1).double()
        y = hidden[1:].double()
        gram += x.T @ x
        cross += x.T @ y
        square += float((y * y).sum())
        total += len(x)
    gram += ridge * gram.diagonal().mean() * torch.eye(2 * width, dtype=torch.float64)
    solution = torch.linalg.solve(gram, cross)
    explained = float((solution * cross).sum())
    head.embed_proj.copy_(solution[:width].T.float())
    head.hidden_proj.copy_(solution[width:].T.float())
    return explained / square if total else 0.0


def head_settings(head: MTPHead, model: ModelConfig, **more: Any) -> dict[str, Any]:
    """The head's config.json."""
    config = head.config
    base = config.inv_freq[1] ** (-config.head_dim / 2) if len(config.inv_freq) > 1 else 10000.0
    return {
        "architectures": ["OutriderMTP"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": float(f"{base:.5g}"),  # float32 says no more
        "hidden_source": config.hidden_source,
        "target_model_type": model.architecture,
        "draft_vocab_size": len(head.token_ids),
        **more,
    }
