"""Loading a checkpoint: resolve its name, read its config, find and check its tensors, make its tokenizer.

Nothing is copied here that need not be; tensors are read when the backend asks for each.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.models.config import ModelConfig, config_from_gguf, config_from_hf
from outrider.models.gguf import GGUFFile
from outrider.models.names import draft_head_tensors, gguf_name, hf_name
from outrider.models.registry import tensor_shapes
from outrider.models.resolve import DEFAULT_MODEL, resolve_model
from outrider.models.safetensors import open_directory, read_json
from outrider.models.tensors import CheckpointError, RawTensor, TensorEntry, TensorMap
from outrider.models.tokenizer import Tokenizer
from outrider.models.tokenizer_gguf import byte_tokenizer, tokenizer_from_gguf
from outrider.models.tokenizer_json import tokenizer_from_directory

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "CheckpointError",
    "RawTensor",
    "load_checkpoint",
    "load_tokenizer",
    "resolve_model",
]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass
class Checkpoint:
    """A model that can be built: every tensor of `weight_plan(config)` is there and has its shape."""

    config: ModelConfig
    tensors: Mapping[str, RawTensor]  # by canonical name; read at each access
    tokenizer: Tokenizer
    name: str  # as the user called it
    path: str  # the directory or file


def load_checkpoint(
    model: str = DEFAULT_MODEL,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
) -> Checkpoint:
    """The checkpoint that `model` names (see `resolve_model`).

    `load_format` safetensors or gguf insist on that kind; dummy takes the config alone and draws random
    weights from `seed`. `tokenizer` names where to take the tokenizer from instead. Whatever is wrong is
    a `CheckpointError` that names the file and what in it.
    """
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
    path = resolve_model(model, revision=revision)
    kind = "gguf" if path.endswith(".gguf") else "safetensors"
    if load_format not in ("auto", "dummy", kind):
        raise CheckpointError(f"{path}: is a {kind} checkpoint, but load_format is {load_format}")
    dummy_seed = seed if load_format == "dummy" else None
    config, tensors, own_tokenizer = (_load_gguf if kind == "gguf" else _load_directory)(path, dummy_seed)
    chosen = load_tokenizer(tokenizer) if tokenizer is not None else own_tokenizer(config)
    chosen.attach(config.vocab_size, config.eos_token_ids, config.bos_token_id)
    return Checkpoint(config=config, tensors=tensors, tokenizer=chosen, name=model, path=path)


def load_tokenizer(name: str, *, revision: str | None = None, load_format: str = "auto") -> Tokenizer:
    """The tokenizer of a model directory (only its tokenizer files are needed), .gguf file or hub id.

    With `load_format` dummy a directory that has none gets ids that are bytes, as in `load_checkpoint`.
    """
    path = os.path.expanduser(name)
    if not os.path.isfile(os.path.join(path, "tokenizer.json")):
        path = resolve_model(name, revision=revision)
    if path.endswith(".gguf"):
        file = GGUFFile(path)
        embed = file.tensors.get(gguf_name("embed"))
        return _sized(tokenizer_from_gguf(file.metadata, path), embed.shape[0] if embed else None)
    config_path = os.path.join(path, "config.json")
    vocab_size = read_json(config_path).get("vocab_size") if os.path.isfile(config_path) else None
    return _sized(_directory_tokenizer(path, vocab_size, load_format == "dummy"), vocab_size)


def _directory_tokenizer(path: str, vocab_size: int | None, is_dummy: bool) -> Tokenizer:
    if is_dummy and not os.path.isfile(os.path.join(path, "tokenizer.json")):
        return byte_tokenizer(vocab_size or 0)
    return tokenizer_from_directory(path)


def _sized(tokenizer: Tokenizer, vocab_size: int | None) -> Tokenizer:
    """For a model of that many ids, where it is known."""
    if isinstance(vocab_size, int) and vocab_size > 0:
        tokenizer.attach(vocab_size, (), None)
    return tokenizer


_Loaded = tuple[ModelConfig, TensorMap, Callable[[ModelConfig], Tokenizer]]


def _load_directory(path: str, dummy_seed: int | None) -> _Loaded:
    config_path = os.path.join(path, "config.json")
    generation_path = os.path.join(path, "generation_config.json")
    generation = read_json(generation_path) if os.path.isfile(generation_path) else None
    config = config_from_hf(read_json(config_path), config_path, generation)

    def own_tokenizer(config: ModelConfig) -> Tokenizer:
        return _directory_tokenizer(path, config.vocab_size, dummy_seed is not None)

    if dummy_seed is not None:
        return config, _random_tensors(config, dummy_seed, config_path), own_tokenizer
    files = open_directory(path)
    found = {name: (file.tensors[name].shape, file.path) for name, file in files.items()}
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    ignored |= {name for name in found if name.endswith(".rotary_emb.inv_freq")}  # computed, not learned
    ignored |= draft_head_tensors(found, config.num_layers)  # `mtp_loader` reads them
    entries = _entries(config, found, hf_name, lambda name: files[name].tensor(name), ignored, path)
    return config, TensorMap(entries), own_tokenizer


def _load_gguf(path: str, dummy_seed: int | None) -> _Loaded:
    file = GGUFFile(path)
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{path}: is one part of a split file; join the parts first (gguf-split --merge)"
        )
    embed = file.tensors.get(gguf_name("embed"))
    if "general.architecture" in file.metadata and embed is None:
        raise CheckpointError(f"{path}: tensor {gguf_name('embed')!r} is missing")
    rope_freqs = (
        file.tensor("rope_freqs.weight").to_float32() if "rope_freqs.weight" in file.tensors else None
    )
    vocab_size = embed.shape[0] if embed else 0
    config = config_from_gguf(file.metadata, path, vocab_size, file.tensors, rope_freqs)

    def own_tokenizer(config: ModelConfig) -> Tokenizer:
        return tokenizer_from_gguf(file.metadata, path)

    if dummy_seed is not None:
        return config, _random_tensors(config, dummy_seed, path), own_tokenizer
    found = {name: (info.shape, path) for name, info in file.tensors.items()}
    entries = _entries(config, found, gguf_name, file.tensor, {"rope_freqs.weight"}, path)
    if config.architecture == "llama":
        entries = {name: _half_split(entry, name, config) for name, entry in entries.items()}
    return config, TensorMap(entries), own_tokenizer


def _half_split(entry: TensorEntry, canonical: str, config: ModelConfig) -> TensorEntry:
    """Rows of q and k from llama.cpp's order (rotated pairs side by side) to pairs half a head apart."""
    heads = {
        "q": config.num_heads,
        "q_bias": config.num_heads,
        "k": config.num_kv_heads,
        "k_bias": config.num_kv_heads,
    }
    num_heads = heads.get(canonical.rsplit(".", 1)[-1])
    if num_heads is None:
        return entry
    rotary, head_dim = config.rope.rotary_dim, config.head_dim
    within = np.r_[0:rotary:2, 1:rotary:2, rotary:head_dim]
    order = (np.arange(num_heads)[:, None] * head_dim + within).reshape(-1)
    return dataclasses.replace(entry, read=lambda: entry.read().select_rows(order))


def _entries(
    config: ModelConfig,
    found: Mapping[str, tuple[tuple[int, ...], str]],  # the file's name -> (shape, file)
    source_name: Callable[[str], str],
    read: Callable[[str], RawTensor],
    ignored: set[str],
    path: str,
) -> dict[str, TensorEntry]:
    """All tensors of the config, by canonical name; missing, misshapen and surplus ones are errors."""
    entries: dict[str, TensorEntry] = {}
    expected = tensor_shapes(config)
    sources = {source_name(canonical): canonical for canonical in expected}
    for name, canonical in sources.items():
        if name not in found:
            raise CheckpointError(f"{path}: tensor {name!r} is missing (shape {expected[canonical]})")
        shape, file = found[name]
        if shape != expected[canonical]:
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {shape}, the config asks for {expected[canonical]}"
            )
        entries[canonical] = TensorEntry(shape, file, name, _reader(read, name, canonical))
    surplus = sorted(set(found) - set(sources) - ignored)
    if surplus:
        raise CheckpointError(
            f"{found[surplus[0]][1]}: tensor {surplus[0]!r} has no place in a {config.architecture} model of "
            f"this config ({len(surplus)} such tensors)"
        )
    return entries


def _reader(read: Callable[[str], RawTensor], name: str, canonical: str) -> Callable[[], RawTensor]:
    return lambda: dataclasses.replace(read(name), name=canonical)


def _random_tensors(config: ModelConfig, seed: int, file: str) -> TensorMap:
    """fp16 weights of the usual size, the same for the same seed; norms are ones."""

    def make(name: str, shape: tuple[int, ...]) -> RawTensor:
        values: Any
        if name.endswith("norm"):
            values = np.ones(shape, np.float32)
        else:
            generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
            values = generator.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        data = values.astype("<f2").reshape(-1).view(np.uint8)
        return RawTensor(name, shape, "f16", data, file)

    return TensorMap(
        {
            name: TensorEntry(shape, file, name, lambda name=name, shape=shape: make(name, shape))  # type: ignore[misc]
            for name, shape in tensor_shapes(config).items()
        }
    )
