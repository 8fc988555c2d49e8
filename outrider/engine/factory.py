"""From a configuration to an engine: the only place that knows all the parts."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from outrider.backends import make_backend
from outrider.config import EngineConfig
from outrider.engine.calibrate import StepTimer, calibrate
from outrider.engine.draft_model_parts import (
    compile_config,
    compile_plan,
    load_draft_model,
    make_draft_runner,
)
from outrider.engine.draft_model_parts import max_rows as draft_model_rows
from outrider.engine.draft_model_parts import num_steps as draft_model_steps
from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.engine.grammars import Grammars
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.machine import available_memory, physical_cores
from outrider.engine.memory import MemoryPlan, plan_memory
from outrider.engine.mtp_parts import bytes_per_token, compile_draft_head, find_mtp, fixed_bytes, num_steps
from outrider.engine.output import Vocabulary
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Scheduler
from outrider.models.config import ModelConfig
from outrider.models.loader import Checkpoint, load_checkpoint
from outrider.models.mtp import MTPHead
from outrider.models.registry import build_function, weight_plan
from outrider.models.tensors import RawTensor
from outrider.sampling.grammar import GrammarCompiler
from outrider.sampling.sampler import Sampler
from outrider.spec_decode.controller import Controller
from outrider.spec_decode.cost import StepCost
from outrider.spec_decode.draft_model import DraftModelProposer
from outrider.spec_decode.memory_file import MemoryFile
from outrider.spec_decode.mtp import MTPProposer
from outrider.spec_decode.phrases import PhraseProposer, shipped_phrases, vocabulary_name
from outrider.spec_decode.proposer import MOST_DRAFT_TOKENS, NoProposer, Parts, make_proposer

logger = logging.getLogger(__name__)

_CACHE_TYPES = {"auto": ("f16", 2), "float16": ("f16", 2), "bfloat16": ("bf16", 2), "float32": ("f32", 4)}
_WEIGHT_FORMATS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_LOGITS_ROWS = 256  # in a step, unless more requests than that run
_OUTER = ("embed", "head")


def load(config: EngineConfig) -> Checkpoint:
    """The checkpoint that `config` names, tokenizer included."""
    return load_checkpoint(
        config.model,
        load_format=config.load_format,
        revision=config.revision,
        tokenizer=config.tokenizer,
        seed=config.seed,
    )


def build_engine(config: EngineConfig, checkpoint: Checkpoint | None = None) -> Engine:
    """An engine that is ready for requests; what prevents one is in the exception, for the user."""
    checkpoint = checkpoint or load(config)
    max_num_logits = min(max(config.max_num_seqs, _LOGITS_ROWS), config.max_num_batched_tokens)
    head = find_mtp(config, checkpoint)
    draft = load_draft_model(config, checkpoint)
    plan = _plan_memory(config, checkpoint, max_num_logits, head, draft)
    logger.info("%s", plan.describe())
    runner = _compile(config, checkpoint, plan, max_num_logits, head)
    scheduler = Scheduler(
        KVCacheManager(plan.num_blocks, plan.block_size, config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_logits=max_num_logits,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )
    sampler = Sampler()
    draft_model = _draft_model(config, checkpoint, draft, plan)
    parts = _parts(config, checkpoint, head, runner, scheduler, draft_model)
    return Engine(
        scheduler=scheduler,
        runner=runner,
        sampler=sampler,
        drafting=_drafting(config, checkpoint, plan, runner, sampler, parts),
        vocabulary=vocabulary_of(checkpoint),
        max_model_len=plan.max_model_len,
        seed=config.seed,
        accept_policy=config.speculative_config.accept_policy,
        grammars=Grammars(_grammar_compiler(checkpoint)),
    )


def vocabulary_of(checkpoint: Checkpoint) -> Vocabulary:
    """What the engine needs of a checkpoint's tokenizer."""
    tokenizer = checkpoint.tokenizer
    eos_ids = frozenset(tokenizer.eos_token_ids) | frozenset(checkpoint.config.eos_token_ids)
    return Vocabulary(tokenizer.token_bytes(), tokenizer.special_ids, eos_ids)


def _grammar_compiler(checkpoint: Checkpoint) -> GrammarCompiler:
    tokenizer, vocabulary = checkpoint.tokenizer, vocabulary_of(checkpoint)
    return GrammarCompiler(
        vocabulary.token_bytes,
        vocabulary.special_ids,
        vocabulary.eos_ids,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def _plan_memory(
    config: EngineConfig,
    checkpoint: Checkpoint,
    max_num_logits: int,
    head: MTPHead | None,
    draft: Checkpoint | None,
) -> MemoryPlan:
    model = checkpoint.config
    _, cache_bytes = _CACHE_TYPES[config.kv_cache_dtype]
    per_token = _cache_bytes_per_token(model, cache_bytes)
    drafter = 0
    if head is not None:
        per_token += bytes_per_token(head, cache_bytes)
        drafter = fixed_bytes(head, config)
    if draft is not None:
        per_token += _cache_bytes_per_token(draft.config, cache_bytes)
        drafter = _size_on_disk(draft.path) + 4 * draft.config.vocab_size * config.max_num_seqs
        drafter += _activations(draft.config, draft_model_rows(config))
    plan = plan_memory(
        available=available_memory(),
        utilization=config.memory_utilization,
        weights=_size_on_disk(checkpoint.path),
        activations=_activations(model, config.max_num_batched_tokens),
        logits=4 * model.vocab_size * max_num_logits,
        bytes_per_block=per_token * config.block_size,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        model_context=model.max_position_embeddings,
        max_model_len=config.max_model_len,
        num_kv_blocks=config.num_kv_blocks,
        drafter=drafter,
    )
    if not config.enable_chunked_prefill and plan.max_model_len > config.max_num_batched_tokens:
        raise ValueError(
            f"without chunked prefill a prompt must fit into one step: the context is {plan.max_model_len} "
            f"tokens, max_num_batched_tokens {config.max_num_batched_tokens}; raise that with "
            "--max-num-batched-tokens, lower --max-model-len or leave chunked prefill on"
        )
    return plan


def _cache_bytes_per_token(model: ModelConfig, cache_bytes: int) -> int:
    return 2 * cache_bytes * model.num_layers * model.num_kv_heads * model.head_dim


def _activations(model: ModelConfig, max_rows: int) -> int:
    widest = 4 * model.hidden_size + 3 * model.intermediate_size
    widest += 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return 4 * widest * max_rows


def _compile(
    config: EngineConfig, checkpoint: Checkpoint, plan: MemoryPlan, max_num_logits: int, head: MTPHead | None
) -> Runner:
    model = checkpoint.config
    name = "native" if config.backend == "auto" else config.backend
    backend = make_backend(name, num_threads=_num_threads(config))
    weights = {
        handle: backend.weight(
            [_tensor(name, checkpoint, config) for name in names], _quantization_of(handle, config)
        )
        for handle, names in weight_plan(model).items()
    }
    kv_cache_dtype = _CACHE_TYPES[config.kv_cache_dtype][0]
    executable = backend.compile(
        build_function(model),
        model,
        weights,
        max_rows=config.max_num_batched_tokens,
        max_logits_rows=max_num_logits,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=plan.max_model_len,
        hidden=head.config.hidden_source if head is not None else None,
    )
    if head is None:
        return Runner(executable)
    draft_head = compile_draft_head(config, backend, head, checkpoint, weights, plan, kv_cache_dtype)
    return Runner(executable, draft_head)


def _draft_model(
    config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None, plan: MemoryPlan
) -> DraftModelProposer | None:
    """The proposer around a second model."""
    if draft is None:
        return None
    plan = compile_plan(plan, draft)
    runner = _compile(compile_config(config), draft, plan, config.max_num_seqs, None)
    return DraftModelProposer(
        make_draft_runner(config, runner, plan, draft, checkpoint), draft_model_steps(config)
    )


def _parts(
    config: EngineConfig,
    checkpoint: Checkpoint,
    head: MTPHead | None,
    runner: Runner,
    scheduler: Scheduler,
    draft_model: DraftModelProposer | None,
) -> Parts:
    """What the sources of drafts are made from."""

    def vocabulary() -> str:
        return vocabulary_name(checkpoint.tokenizer.token_bytes())

    def phrases(branches: bool) -> PhraseProposer | None:
        table = shipped_phrases(vocabulary())
        return None if table is None else PhraseProposer(table, branches=branches)

    def mtp() -> MTPProposer:
        assert head is not None and runner.draft_head is not None
        return MTPProposer(
            runner.draft_head,
            block_size=scheduler.kv_cache.block_size,
            num_model_steps=num_steps(head, config),
            look_ahead=scheduler.look_ahead,
            branches=config.speculative_config.tree != "off"
            and config.speculative_config.mtp_strategy == "default",
        )

    return Parts(
        mtp=mtp if runner.draft_head is not None else None,
        draft_model=None if draft_model is None else lambda: draft_model,
        phrases=phrases,
        memory_file=lambda path: MemoryFile(path, vocabulary(), checkpoint.config.vocab_size),
        branches=True,
        vocab_size=checkpoint.config.vocab_size,
    )


def _tensor(name: str, checkpoint: Checkpoint, config: EngineConfig) -> RawTensor:
    tensor = checkpoint.tensors[name]
    return tensor if config.dtype == "auto" else tensor.as_float(_WEIGHT_FORMATS[config.dtype])


def _quantization_of(handle: str, config: EngineConfig) -> str | None:
    chosen = config.quantization
    if isinstance(chosen, dict):
        chosen = chosen.get("lm_head" if handle in _OUTER else "dense")
    return None if chosen in (None, "none") else chosen


def _drafting(
    config: EngineConfig,
    checkpoint: Checkpoint,
    plan: MemoryPlan,
    runner: Runner,
    sampler: Sampler,
    parts: Parts,
) -> Drafting:
    speculative = config.speculative_config
    proposer = make_proposer(speculative, parts)
    controller = plain_step = None
    if speculative.adaptive and not isinstance(proposer, NoProposer):
        key: dict[str, str | int] = {
            "model": os.path.abspath(checkpoint.path),
            "size": _size_on_disk(checkpoint.path),
            "quantization": str(config.quantization),
            "dtype": config.dtype,
            "backend": config.backend,
            "kv_cache_dtype": config.kv_cache_dtype,
            "block_size": plan.block_size,
            "num_threads": _num_threads(config),
        }
        calibration = calibrate(
            StepTimer(runner, sampler, plan.block_size),
            key,
            max_rows=min(config.max_num_batched_tokens, _LOGITS_ROWS),
            max_context=plan.max_model_len,
        )
        cost = StepCost(calibration)
        controller = Controller(cost, max_model_steps=getattr(proposer, "max_model_steps", 0))

        plain_step = cost.plain_step
        runner.seconds = 0.0
    return Drafting(
        proposer,
        method=speculative.method,
        max_draft_tokens=speculative.num_speculative_tokens or MOST_DRAFT_TOKENS,
        vocab_size=checkpoint.config.vocab_size,
        controller=controller,
        plain_step=plain_step,
    )


def _num_threads(config: EngineConfig) -> int:
    return config.num_threads or physical_cores()


def _size_on_disk(path: str) -> int:
    """Bytes of a checkpoint's weight files."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
