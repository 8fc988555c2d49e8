"""One plan for memory, made before weights are loaded: they, a step's arrays, and the cache from the rest."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config_fields import ConfigError

# Untouched blocks cost nothing, but touched ones stay for their prefixes: without a bound a small model
# would slowly fill the machine. One full context always fits, whatever it takes.
MOST_AUTO_CACHE_BYTES = 4 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and the cache that follows."""

    available: int
    usable: int  # of these, by memory_utilization
    weights: int
    activations: int
    logits: int
    bytes_per_block: int
    num_blocks: int
    block_size: int
    max_model_len: int
    drafter: int = 0  # weights and activations of a drafting model

    @property
    def cache(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def describe(self) -> str:
        """The plan for people, in one line."""
        drafter = f"drafter {self.drafter / _MIB:.0f}, " if self.drafter else ""
        return (
            f"memory: {self.usable / _MIB:.0f} of {self.available / _MIB:.0f} MiB available may be used: "
            f"weights {self.weights / _MIB:.0f}, activations {self.activations / _MIB:.0f} and logits "
            f"{self.logits / _MIB:.0f}, {drafter}"
            f"cache up to {self.cache / _MIB:.0f} ({self.num_blocks} blocks of "
            f"{self.block_size} tokens); context {self.max_model_len}"
        )


def plan_memory(
    *,
    available: int,
    utilization: float,
    weights: int,
    activations: int,
    logits: int,
    bytes_per_block: int,
    block_size: int,
    max_num_seqs: int,
    model_context: int,
    max_model_len: int | None,
    num_kv_blocks: int | None,
    drafter: int = 0,
) -> MemoryPlan:
    """Blocks for `max_num_seqs` full contexts, or as many as fit; ConfigError when not even one context does.

    Without `max_model_len` the context is the model's, bounded by the cache.
    """
    usable = int(available * utilization)
    left = usable - weights - activations - logits - drafter
    context = max_model_len or model_context
    if context > model_context:
        raise ConfigError(
            f"max_model_len must be at most the model's context of {model_context}, got {context}; "
            "lower --max-model-len"
        )
    blocks_for_one = -(-context // block_size)
    fitting = max(0, left // bytes_per_block)
    if num_kv_blocks is not None:
        num_blocks = num_kv_blocks
    else:
        most = max(MOST_AUTO_CACHE_BYTES // bytes_per_block, blocks_for_one)
        num_blocks = min(fitting, most, max_num_seqs * blocks_for_one)
    if num_blocks > fitting:
        raise ConfigError(
            f"{num_blocks} cache blocks need {num_blocks * bytes_per_block / _MIB:.0f} MiB, but only "
            f"{max(left, 0) / _MIB:.0f} MiB are left; lower --num-kv-blocks or raise --memory-utilization"
        )
    if num_blocks < blocks_for_one and max_model_len is not None:
        raise ConfigError(
            f"a context of {context} tokens needs {blocks_for_one} cache blocks "
            f"({blocks_for_one * bytes_per_block / _MIB:.0f} MiB), but there are {num_blocks}; lower "
            "--max-model-len, or raise --num-kv-blocks or --memory-utilization"
        )
    context = min(context, num_blocks * block_size)
    if context < 2:
        raise ConfigError(
            f"the model needs {(usable - left) / _MIB:.0f} MiB without its cache, but only "
            f"{usable / _MIB:.0f} of {available / _MIB:.0f} MiB may be used; free memory, choose a smaller "
            "model or raise --memory-utilization"
        )
    return MemoryPlan(
        available,
        usable,
        weights,
        activations,
        logits,
        bytes_per_block,
        num_blocks,
        block_size,
        context,
        drafter,
    )
