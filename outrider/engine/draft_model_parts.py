"""From a configuration to a second model that drafts: loaded, checked against the target, its memory."""

from __future__ import annotations

from dataclasses import replace

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.config_fields import ConfigError
from outrider.engine.draft_runner import CATCH_UP_ROWS, MOST_PENDING, DraftRunner
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.memory import MemoryPlan
from outrider.engine.runner import Runner
from outrider.models.loader import Checkpoint, load_checkpoint

MOST_STEPS = 16
STEPS = 4  # when nobody said how many tokens


def load_draft_model(config: EngineConfig, target: Checkpoint) -> Checkpoint | None:
    """The draft model, if the method wants one; ConfigError unless it speaks the target's token ids."""
    speculative = config.speculative_config
    if speculative.method != "draft_model":
        return None
    assert speculative.model is not None
    checkpoint = load_checkpoint(speculative.model, load_format=_load_format(config), seed=config.seed)
    check_vocabularies(target, checkpoint)
    return checkpoint


def _load_format(config: EngineConfig) -> str:
    return "dummy" if config.load_format == "dummy" else "auto"


def check_vocabularies(target: Checkpoint, draft: Checkpoint) -> None:
    """Raise ConfigError unless equal ids mean equal text in both."""
    advice = "name a model with the target's tokenizer in --speculative-config"
    ours, theirs = _named(target), _named(draft)
    for token_id, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            raise ConfigError(
                f"the draft model {draft.name} has another tokenizer than {target.name}: token {token_id} is "
                f"{other!r} there and {mine!r} here; {advice}"
            )
    if len(ours) != len(theirs) or draft.config.vocab_size > target.config.vocab_size:
        raise ConfigError(
            f"the draft model {draft.name} has {len(theirs)} tokens ({draft.config.vocab_size} padded), "
            f"{target.name} has {len(ours)} ({target.config.vocab_size}); {advice}"
        )


def _named(checkpoint: Checkpoint) -> list[bytes]:
    """The text of every id, without the padding behind the last that has one."""
    table = checkpoint.tokenizer.token_bytes()
    end = len(table)
    while end and not table[end - 1]:
        end -= 1
    return table[:end]


def max_rows(config: EngineConfig) -> int:
    """Tokens that the draft model can be fed in one run."""
    return CATCH_UP_ROWS + min(MOST_PENDING * config.max_num_seqs, config.max_num_batched_tokens)


def compile_config(config: EngineConfig) -> EngineConfig:
    """How the draft model is compiled: as the target, but for its own quantisation and size of step."""
    quantization = config.speculative_config.quantization
    return replace(
        config,
        quantization=quantization,
        max_num_batched_tokens=max_rows(config),
        speculative_config=SpeculativeConfig(method="off"),
    )


def compile_plan(plan: MemoryPlan, draft: Checkpoint) -> MemoryPlan:
    """Its cache has as many blocks as the target's, each of its own size."""
    return replace(plan, max_model_len=min(plan.max_model_len, draft.config.max_position_embeddings))


def make_draft_runner(
    config: EngineConfig, runner: Runner, plan: MemoryPlan, draft: Checkpoint, target: Checkpoint
) -> DraftRunner:
    """The compiled draft model with its cache."""
    return DraftRunner(
        runner,
        KVCacheManager(plan.num_blocks, plan.block_size, config.enable_prefix_caching),
        num_ids=draft.config.vocab_size,
        vocab_size=target.config.vocab_size,
        max_rows=max_rows(config),
        max_model_len=plan.max_model_len,
    )


def num_steps(config: EngineConfig) -> int:
    """The most tokens to draft."""
    return min(config.speculative_config.num_speculative_tokens or STEPS, MOST_STEPS)
