"""From a configuration to a module that drafts: which one, the memory it takes, the compiled whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.backends import Backend
from outrider.backends.ops import Weight
from outrider.config import EngineConfig
from outrider.engine.memory import MemoryPlan
from outrider.models.loader import Checkpoint
from outrider.models.mtp import MTPHead, compile_feeder, compile_module, module_weights
from outrider.models.mtp_loader import find_head
from outrider.spec_decode.draft_head import DraftHead, make_draft_head
from outrider.spec_decode.mtp import CATCH_UP_ROWS, MOST_PENDING

_BF16 = 2
STEPS = 3  # of a head that does not say for how many it was trained
_METHODS = ("mtp", "auto")


def find_mtp(config: EngineConfig, checkpoint: Checkpoint) -> MTPHead | None:
    """The head to draft with, if the method wants one and there is one."""
    speculative = config.speculative_config
    if speculative.method not in _METHODS:
        return None
    return find_head(checkpoint.config, checkpoint.path, speculative.model, speculative.hidden_source)


def max_rows(config: EngineConfig) -> int:
    """Tokens that the module can be fed in one round."""
    return CATCH_UP_ROWS + min(MOST_PENDING * config.max_num_seqs, config.max_num_batched_tokens)


def fixed_bytes(head: MTPHead, config: EngineConfig) -> int:
    """Weights and activations."""
    layer = head.config.layer
    num_logits = layer.vocab_size if head.draft_token_ids is None else len(head.draft_token_ids)
    rows = 4 * (4 * layer.hidden_size + 3 * layer.intermediate_size) * max_rows(config)
    return head.nbytes + num_logits * (2 * layer.hidden_size + 4 * config.max_num_seqs) + rows


def bytes_per_token(head: MTPHead, cache_bytes: int) -> int:
    """Its layer of the cache, and the hidden state that is kept of every token."""
    layer = head.config.layer
    return 2 * cache_bytes * layer.num_kv_heads * layer.head_dim + _BF16 * layer.hidden_size


def num_steps(head: MTPHead, config: EngineConfig) -> int:
    """The most recursive steps to draft with."""
    speculative = config.speculative_config
    steps = speculative.num_model_steps or head.config.num_model_steps or STEPS
    return min(steps, speculative.num_speculative_tokens or steps)


def compile_draft_head(
    config: EngineConfig,
    backend: Backend,
    head: MTPHead,
    checkpoint: Checkpoint,
    target_weights: Mapping[str, Weight],
    plan: MemoryPlan,
    kv_cache_dtype: str,
) -> DraftHead:
    """The module with its cache. `target_weights` are the target's handles, already compiled."""
    quantization: str | None = config.speculative_config.quantization
    if quantization is None and config.backend != "torch":
        quantization = "wint8"
    weights = module_weights(
        backend, head, checkpoint.tensors, target_weights, None if quantization == "none" else quantization
    )
    limits: dict[str, Any] = {"num_blocks": plan.num_blocks, "block_size": plan.block_size}
    executable = compile_module(
        backend,
        head,
        weights,
        max_rows=max_rows(config),
        max_logits_rows=config.max_num_seqs,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=plan.max_model_len,
        **limits,
    )
    return make_draft_head(
        executable,
        width=head.config.layer.hidden_size,
        max_rows=max_rows(config),
        token_ids=head.draft_token_ids,
        vocab_size=checkpoint.config.vocab_size,
        feeder=compile_feeder(
            executable,
            head,
            weights,
            max_rows=max_rows(config),
            max_position=min(plan.max_model_len, plan.num_blocks * plan.block_size),
        ),
        **limits,
    )
