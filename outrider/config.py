"""What is configured: the frozen dataclasses every command, YAML file and keyword fills.

One rule decides each value: typed flag > YAML > default. Nothing is ignored in silence: an unknown
key, a key the chosen method lacks, a wrong type or an impossible combination is a `ConfigError` that
says what came, what is allowed and where to change it. This module imports nothing but its helper
`config_fields`; everything may import it.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config_fields import ConfigError, build, canonical, changed, nearest, normalise, option, shown

DEFAULT_MODEL = "smollm2-135m"

# FastDeploy keys that have no meaning here, and what to do instead.
FASTDEPLOY_KEYS = {
    "engine_worker_queue_port": "the engine is reached through a private socket, so leave it out",
    "cache_queue_port": "the cache lives in the engine process, so leave it out",
    "pd_comm_port": "use kv_transfer",
    "rdma_comm_ports": "use kv_transfer",
    "cache_transfer_protocol": "use kv_transfer",
    "kv_cache_ratio": "prefill and decode share one pool of blocks, so use memory_utilization",
    "metrics_port": "/metrics is served beside the API, so use port",
    "workers": "one API process serves all connections, so use max_concurrency",
}

DTYPE_NAMES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made and how many are verified. It never changes a token."""

    method: str = option(
        "auto", "source of drafts", choices=("auto", "mtp", "ngram", "suffix", "draft_model", "naive", "off"),
        rename={"ngram_match": "ngram"},
    )  # fmt: skip
    num_speculative_tokens: int | None = option(None, "most draft tokens a request and step", low=1, high=32)
    num_model_steps: int | None = option(None, "recursive MTP steps (default: as trained)", low=1, high=8)
    mtp_strategy: str = option(
        "default", "MTP alone, or with an n-gram tail", choices=("default", "with_ngram")
    )
    hidden_source: str | None = option(
        None, "hidden states that the MTP head reads: before or after the final norm (default: as it says)",
        choices=("pre_norm", "post_norm"),
    )  # fmt: skip
    model: str | None = option(None, "MTP head (default: the model's own) or draft model")
    quantization: str | None = option(
        None, "quantisation of the drafter's matrices (default: wint8)", choices=("wint4", "wint8", "none")
    )
    prompt_lookup_max: int = option(5, "longest matched n-gram", low=1, high=64, aliases=("max_ngram_size",))
    prompt_lookup_min: int = option(2, "shortest matched n-gram", low=1, high=64, aliases=("min_ngram_size",))
    suffix_decoding_max_tree_depth: int = option(64, "depth of the suffix trees", low=2, high=1024)
    suffix_decoding_max_cached_requests: int = option(
        10000, "past outputs kept; -1: as many as the memory for them (128 MiB) holds", low=-1
    )
    suffix_decoding_max_spec_factor: float = option(1.0, "most draft tokens for each matched token", above=0)
    suffix_decoding_min_token_prob: float = option(
        0.1, "a draft ends where its tokens get less likely than this", low=0, high=1
    )
    draft_memory: str = option(
        "tenant", "whose past outputs a request's drafts may come from",
        choices=("request", "tenant", "global"),
    )  # fmt: skip
    draft_memory_file: str | None = option(None, "where past outputs survive a restart")
    adaptive: bool = option(True, "false: always verify exactly what was proposed")
    tree: int | str = option(
        "auto", "drafts may branch: auto, off, or the most nodes", choices=("auto", "off"), low=1, high=256
    )
    accept_policy: str = option(
        "normal", "for debugging and timing only", choices=("normal", "accept_all", "reject_all")
    )
    verify_strategy: str = option(
        "target_match", "a draft is kept only where the model draws the same token",
        choices=("target_match",), rename={"2": "target_match"},
        note="topp and greedy keep tokens the model would not have drawn, which changes the output",
    )  # fmt: skip

    KEYS_BY_METHOD: typing.ClassVar[dict[str, frozenset[str]]] = {
        "naive": frozenset({"verify_strategy"}),
        "off": frozenset({"verify_strategy"}),
        "mtp": frozenset(
            {
                "num_speculative_tokens",
                "num_model_steps",
                "mtp_strategy",
                "hidden_source",
                "model",
                "quantization",
            }
            | {
                "prompt_lookup_max",
                "prompt_lookup_min",
                "adaptive",
                "tree",
                "accept_policy",
                "verify_strategy",
            }
        ),
        "draft_model": frozenset(
            {"num_speculative_tokens", "model", "quantization", "adaptive", "tree"}
            | {"accept_policy", "verify_strategy"}
        ),
        "suffix": frozenset(
            {
                "num_speculative_tokens",
                "suffix_decoding_max_tree_depth",
                "suffix_decoding_max_cached_requests",
            }
            | {"suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob", "draft_memory"}
            | {"draft_memory_file", "adaptive", "tree", "accept_policy", "verify_strategy"}
        ),
        "ngram": frozenset(
            {"num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "adaptive", "tree"}
            | {"accept_policy", "verify_strategy"}
        ),
    }

    def __post_init__(self) -> None:
        normalise(self)
        self.check_keys(changed(self))
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min must be at most prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}; change either in --speculative-config"
            )
        if self.method == "draft_model" and self.model is None:
            raise ConfigError(
                "method 'draft_model' needs model, a smaller model with the same tokenizer; add it to "
                "--speculative-config"
            )
        if self.draft_memory_file is not None and self.draft_memory == "request":
            raise ConfigError(
                "draft_memory 'request' keeps no past outputs, so it has no use for draft_memory_file; "
                "change either in --speculative-config"
            )
        if (self.num_model_steps or 0) > (self.num_speculative_tokens or 32):
            raise ConfigError(
                f"num_model_steps must be at most num_speculative_tokens ({self.num_speculative_tokens}), "
                f"got {self.num_model_steps}; change either in --speculative-config"
            )

    def check_keys(self, keys: Iterable[str]) -> None:
        """Refuse keys that the chosen method does not have."""
        allowed = self.KEYS_BY_METHOD.get(self.method)
        for key in keys:
            if allowed is not None and key != "method" and key not in allowed:
                raise ConfigError(
                    f"method {self.method!r} has no key {key!r}, only {', '.join(sorted(allowed))}; "
                    "remove it from --speculative-config or choose another method"
                )


@dataclass(frozen=True)
class EngineConfig:
    """Model, memory, batching and speculation: everything the engine is built from."""

    model: str = option(DEFAULT_MODEL, "directory, .gguf file, hub id or built-in name")
    served_model_name: str | None = option(None, "name in the API (default: the model's)")
    tokenizer: str | None = option(None, "directory or tokenizer.json (default: the model's)")
    revision: str | None = option(None, "hub revision")
    chat_template: str | None = option(None, "Jinja chat template: a file or the text (default: the model's)")
    device: str = option("auto", "where to run", choices=("auto", "cpu"), later=("cuda",))
    backend: str = option("auto", "implementation of the ops", choices=("auto", "native", "torch"))
    dtype: str = option(
        "auto", "type of unquantised weights", choices=("auto", "float32", "float16", "bfloat16"),
        rename=DTYPE_NAMES,
    )  # fmt: skip
    kv_cache_dtype: str = option(
        "auto", "type of cached keys and values (auto: float16)",
        choices=("auto", "float16", "bfloat16", "float32"), later=("int8", "fp8"), rename=DTYPE_NAMES,
    )  # fmt: skip
    quantization: str | dict[str, str] | None = option(  # noqa: RUF009
        None, "wint4, wint8, or a mapping of dense, moe, kv_cache, lm_head to one of them"
    )
    load_format: str = option(
        "auto", "how weights are stored; dummy: random ones", choices=("auto", "safetensors", "gguf", "dummy")
    )
    max_model_len: int | None = option(None, "longest prompt + output (default: the model's)", low=16)
    max_num_seqs: int = option(64, "requests that run at once", low=1, high=1024)
    max_num_batched_tokens: int = option(2048, "token budget of a step", low=1)
    block_size: int = option(32, "tokens a cache block holds", choices=(16, 32, 64, 128))
    num_kv_blocks: int | None = option(
        None, "cache blocks (default: from memory)", low=1, aliases=("num_gpu_blocks_override",)
    )
    memory_utilization: float = option(
        0.85, "share of memory to use", above=0, high=1, aliases=("gpu_memory_utilization",)
    )
    enable_prefix_caching: bool = option(True, "reuse cached prefixes of earlier requests")
    enable_chunked_prefill: bool = option(True, "mix chunks of prompts with decoding")
    num_threads: int | None = option(None, "compute threads (default: physical cores)", low=1, high=256)
    tensor_parallel_size: int = option(1, "devices a model is split over", low=1, later=())
    data_parallel_size: int = option(1, "replicas", low=1, later=())
    seed: int = option(0, "engine seed; requests without a seed draw theirs from it", low=0, high=2**63 - 1)
    speculative_config: SpeculativeConfig = option(  # noqa: RUF009 (a field, not a shared default)
        SpeculativeConfig(), "speculation, as JSON or a mapping"
    )
    allow_debug_policies: bool = option(False, "permit accept_policy other than normal (wrong output)")
    plas_attention_config: dict[str, Any] | None = option(None, "sparse attention", later=())  # noqa: RUF009
    splitwise_role: str = option("mixed", "part in prefill/decode separation", later=("prefill", "decode"))
    scheduler_name: str = option("local", "request scheduler", later=("global", "splitwise"))
    scheduler_topic: str = option("default", "namespace of a shared scheduler", later=())
    scheduler_host: str = option("127.0.0.1", "host of a shared scheduler", later=())
    scheduler_port: int = option(6379, "port of a shared scheduler", low=1, high=65535, later=())
    scheduler_db: int = option(0, "database of a shared scheduler", low=0, later=())
    scheduler_password: str | None = option(None, "password of a shared scheduler", later=(), secret=True)
    scheduler_ttl: int = option(900, "seconds a shared request lives", low=1, later=())
    kv_transfer: str = option("auto", "how prefill hands its cache to decode", later=())

    def __post_init__(self) -> None:
        normalise(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), got "
                f"{self.max_num_batched_tokens}; raise --max-num-batched-tokens or lower --max-num-seqs"
            )
        if not self.enable_chunked_prefill and (self.max_model_len or 0) > self.max_num_batched_tokens:
            raise ConfigError(
                "without chunked prefill a prompt must fit into one step, but max_model_len is "
                f"{self.max_model_len} and max_num_batched_tokens {self.max_num_batched_tokens}; "
                "raise --max-num-batched-tokens or remove --no-enable-chunked-prefill"
            )
        if self.speculative_config.accept_policy != "normal" and not self.allow_debug_policies:
            raise ConfigError(
                f"accept_policy {self.speculative_config.accept_policy!r} gives wrong output and is for "
                "debugging and timing only; add --allow-debug-policies to use it, or remove it from "
                "--speculative-config"
            )
        _check_quantization(self.quantization)

    @property
    def model_name(self) -> str:
        """The name clients use for the model."""
        return self.served_model_name or self.model

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """From keywords or a parsed mapping, as strictly as from a file."""
        return build(cls, values)


@dataclass(frozen=True)
class ServerConfig:
    """What the HTTP server adds to the engine: address, keys and limits."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on (0: any free one)", low=0, high=65535)
    api_key: tuple[str, ...] = option((), "accepted API key; repeatable", secret=True)
    max_waiting_time: float = option(-1.0, "seconds a request may wait for its first token (-1: no limit)")
    max_concurrency: int = option(2048, "requests held at once", low=1)
    max_queue_size: int = option(4096, "requests that may wait", low=1)
    request_timeout: float | None = option(None, "seconds a request may take", above=0)
    max_body_bytes: int = option(8 << 20, "largest request body", low=1024)
    max_n: int = option(64, "most choices of a request", low=1)
    max_logprobs: int = option(20, "most alternatives logprobs may ask for", low=0, high=1024)
    tool_call_parser: str = option(
        "auto", "format of tool calls in answers (auto: told by the chat template)",
        choices=(
            "auto", "hermes", "llama3_json", "mistral", "deepseek_v3", "glm45", "qwen3_coder", "ernie45",
        ),
    )  # fmt: skip
    reasoning_parser: str = option(
        "auto", "format of thoughts in answers (auto: told by the chat template)",
        choices=("auto", "none", "think", "ernie45", "mistral"),
    )  # fmt: skip
    shutdown_timeout: float = option(
        30.0, "seconds running requests get after SIGTERM", low=0, aliases=("timeout_graceful_shutdown",)
    )
    log_level: str = option("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "lines for people, or JSON objects", choices=("text", "json"))
    log_requests: bool = option(True, "log a line for every request when it ends; never any of its text")
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector that gets traces, as http://127.0.0.1:4318/v1/traces; needs extra otel"
    )

    def __post_init__(self) -> None:
        normalise(self)
        if any(not key or not key.isprintable() or key != key.strip() for key in self.api_key):
            raise ConfigError(
                "an API key must be printable text without surrounding blanks; change --api-key"
            )


QUANTIZED_PARTS = ("dense", "moe", "kv_cache", "lm_head")


def _check_quantization(value: str | dict[str, str] | None) -> None:
    parts = value if isinstance(value, dict) else {"dense": value}
    for part, name in parts.items():
        if part not in QUANTIZED_PARTS:
            raise ConfigError(
                f"quantization has no part {part!r}{nearest(part, QUANTIZED_PARTS)}; change --quantization"
            )
        allowed = ("none",) if part == "kv_cache" else ("wint4", "wint8", "none")
        if (name or "none") not in allowed:
            raise ConfigError(
                f"quantization of {part} must be one of {', '.join(allowed)} in this version, got {name!r}; "
                "change --quantization"
            )


@dataclass(frozen=True)
class Configuration:
    """The effective plan of a command: engine, server, and where each value came from."""

    engine: EngineConfig
    server: ServerConfig
    origins: dict[str, str]  # field -> flag, file name, environment; absent: default
    warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line a value, `name = value (origin)`; secrets are hidden."""
        lines = []
        for config in (self.engine, self.server):
            for field in dataclasses.fields(config):
                if field.metadata["later"] == ():  # not in this version: it can only have its default
                    continue
                value = shown(getattr(config, field.name), field)
                lines.append(f"{field.name} = {value} ({self.origins.get(field.name, 'default')})")
        return "\n".join(lines)


def load(flags: Mapping[str, Any], config_file: str | Path | None = None) -> Configuration:
    """The configuration from typed flags over a YAML file over the environment over defaults."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    warnings: list[str] = []
    keys = os.environ.get("OUTRIDER_API_KEY", "")
    if keys:
        values["api_key"] = [key.strip() for key in keys.split(",") if key.strip()]
        origins["api_key"] = "OUTRIDER_API_KEY"
    file_values = read_yaml(config_file) if config_file else {}
    for origin, source in ((str(config_file), file_values), ("flag", flags)):
        given: set[str] = set()
        for raw, value in source.items():
            name = _field_name(raw, origin)
            if name in FASTDEPLOY_KEYS:
                warnings.append(f"{name} ({origin}) has no effect here: {FASTDEPLOY_KEYS[name]}")
                continue
            if name in given:
                raise ConfigError(f"{name} is given twice in {origin} (once as {raw!r}); remove one of them")
            given.add(name)
            values[name], origins[name] = value, origin
    engine, server = (_build_from(cls, values, origins) for cls in (EngineConfig, ServerConfig))
    return Configuration(engine, server, origins, tuple(warnings))


def _field_name(raw: Any, origin: str) -> str:
    for cls in (EngineConfig, ServerConfig):
        name = canonical(cls, raw)
        if name in FASTDEPLOY_KEYS or any(name == field.name for field in dataclasses.fields(cls)):
            return name
    known = [f.name for cls in (EngineConfig, ServerConfig) for f in dataclasses.fields(cls)]
    for spec in dataclasses.fields(SpeculativeConfig):
        if canonical(SpeculativeConfig, raw) == spec.name:
            raise ConfigError(
                f"unknown configuration key {raw!r} in {origin}: it belongs into speculative_config, "
                f'as in speculative_config: {{"{spec.name}": ...}}'
            )
    raise ConfigError(f"unknown configuration key {raw!r} in {origin}{nearest(str(raw), known)}")


def _build_from(cls: Any, values: Mapping[str, Any], origins: Mapping[str, str]) -> Any:
    mine = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
    try:
        return build(cls, mine)
    except ConfigError as error:
        origin = origins.get(error.field, "flag")
        raise ConfigError(str(error) if origin == "flag" else f"{origin}: {error}") from None


def read_chat_template(value: str) -> str:
    """The text of a chat template that is configured as text or as the path of a file."""
    if "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {value}: {error}; change --chat-template") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping; refuses what is no mapping or names a key twice. An empty file is an empty one."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigError(f"{path}:{node.start_mark.line + 1}: {key} is given twice")
            return super().construct_mapping(node, deep)

    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.load(text, Loader)
    except OSError as error:
        raise ConfigError(
            f"cannot read configuration file {path}: {error.strerror}; change --config"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); change --config") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content or {}, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, got {type(content).__name__}")
    return content or {}
