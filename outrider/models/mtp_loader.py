"""Finding and reading MTP modules: our own format, and those of ERNIE, DeepSeek and GLM checkpoints.

A module lies in a directory of its own (config.json, model.safetensors) or among the tensors of its target.
Where its description leaves something open it is as in the target. What does not fit is a `CheckpointError`
that names the file and the tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.models.config import ModelConfig
from outrider.models.mtp import HIDDEN_SOURCES, MTPConfig, MTPHead, module_shapes
from outrider.models.names import hf_layer_names
from outrider.models.quantize import encode_float
from outrider.models.rope import rope_spec
from outrider.models.safetensors import SafetensorsFile, open_directory, read_json
from outrider.models.tensors import CheckpointError, RawTensor

ARCHITECTURE = "OutriderMTP"
_ASSETS = "assets"  # folder of the package with heads for built-in models
_CHUNK = 1 << 20


@dataclass(frozen=True)
class _Names:
    """What a checkpoint calls the parts of a module."""

    whole: Mapping[str, str]  # canonical -> name
    layer: str  # prefix of the decoder layer's tensors

    def of(self, canonical: str) -> str:
        if canonical in self.whole:
            return self.whole[canonical]
        return self.layer + hf_layer_names()[canonical.removeprefix("layers.0.")]


def _ernie_names(prefix: str) -> _Names:
    return _Names(
        {
            "emb_norm": f"{prefix}.mtp_emb_norm.0.weight",
            "hidden_norm": f"{prefix}.mtp_hidden_norm.0.weight",
            "proj": f"{prefix}.mtp_linear_proj.0.weight",
            "norm": f"{prefix}.mtp_norm.weight",
            "head": f"{prefix}.mtp_head.weight",
        },
        f"{prefix}.mtp_block.0.",
    )


def _deepseek_names(layer: int) -> _Names:
    prefix = f"model.layers.{layer}."
    return _Names(
        {
            "emb_norm": prefix + "enorm.weight",
            "hidden_norm": prefix + "hnorm.weight",
            "proj": prefix + "eh_proj.weight",
            "norm": prefix + "shared_head.norm.weight",
            "head": prefix + "shared_head.head.weight",
        },
        prefix,
    )


def _names_in(found: Mapping[str, Any]) -> _Names | None:
    """How these tensors are called, if a module is among them."""
    for prefix in ("model", "ernie"):
        if any(name.startswith(f"{prefix}.mtp_") for name in found):
            return _ernie_names(prefix)
    layers = [
        int(m[1]) for name in found if (m := re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name))
    ]
    return _deepseek_names(min(layers)) if layers else None


def find_head(
    target: ModelConfig, target_path: str, named: str | None = None, hidden_source: str | None = None
) -> MTPHead | None:
    """The module of a model: the one that is `named`, or `mtp` beside the model's files, or one among its
    tensors, or the package's own for this very file. `hidden_source` overrides what the module says."""
    if named is not None:
        path = os.path.expanduser(named)
        if not os.path.isdir(path):
            raise CheckpointError(
                f"{named}: there is no such directory; name a draft head's directory with `model`"
            )
        return load_head(path, target, hidden_source)
    folder = target_path if os.path.isdir(target_path) else os.path.dirname(target_path)
    beside = os.path.join(folder, "mtp")
    if os.path.isfile(os.path.join(beside, "config.json")) and _is_for(beside, target_path):
        return load_head(beside, target, hidden_source)
    if os.path.isdir(target_path):
        try:
            files = open_directory(target_path)
        except CheckpointError:  # random weights need no files
            files = {}
        settings = read_json(os.path.join(target_path, "config.json"))
        return _read(files, settings, target_path, target, hidden_source) if _names_in(files) else None
    own = _own_head(target_path)
    return load_head(own, target, hidden_source) if own else None


def load_head(path: str, target: ModelConfig, hidden_source: str | None = None) -> MTPHead:
    """The module in a directory."""
    return _read(
        open_directory(path), read_json(os.path.join(path, "config.json")), path, target, hidden_source
    )


def fingerprint(path: str) -> str:
    """SHA-256 of a file, as `target_sha256` in a head's config.json."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()


def quick_fingerprint(path: str) -> str:
    """Of a file's size, beginning, end and 62 places between: `target_fingerprint` in a head's config.json.
    Tells the files that people have from one another without reading all of a large one."""
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for i in range(64):
            file.seek((size - (_CHUNK >> 4)) * i // 63 if size > _CHUNK else 0)
            digest.update(file.read(_CHUNK >> 4 if size > _CHUNK else _CHUNK))
    return digest.hexdigest()


def _is_for(folder: str, target_path: str) -> bool:
    """Whether a head that names its target's file means this one. Heads that name none are for any."""
    settings = read_json(os.path.join(folder, "config.json"))
    if not os.path.isfile(target_path):
        return True
    if settings.get("target_fingerprint"):
        return bool(settings["target_fingerprint"] == quick_fingerprint(target_path))
    return settings.get("target_sha256") in (None, "") or settings["target_sha256"] == fingerprint(
        target_path
    )


def _own_head(target_path: str) -> str | None:
    """The package's head for this file."""
    assets = resources.files("outrider") / _ASSETS
    if not assets.is_dir():
        return None
    for folder in sorted(assets.iterdir(), key=lambda entry: entry.name):
        config = folder / "config.json"
        if config.is_file():
            settings = read_json(str(config))
            is_marked = settings.get("target_sha256") or settings.get("target_fingerprint")
            if (
                settings.get("architectures") == [ARCHITECTURE]
                and is_marked
                and _is_for(str(folder), target_path)
            ):
                return str(folder)
    return None


def _read(
    files: Mapping[str, SafetensorsFile],
    settings: Mapping[str, Any],
    path: str,
    target: ModelConfig,
    hidden_source: str | None,
) -> MTPHead:
    names = _names_in(files)
    if names is None:
        raise CheckpointError(f"{path}: holds no draft head (tensors model.mtp_* or model.layers.N.eh_proj)")
    reader = _Reader(files, names, path)
    config = _config(settings, path, target, reader, hidden_source)
    tensors = {name: reader.tensor(name, shape, config) for name, shape in module_shapes(config).items()}
    return MTPHead(config, tensors, path, _draft_token_ids(files, settings, path, target))


def _config(
    settings: Mapping[str, Any], path: str, target: ModelConfig, reader: _Reader, hidden_source: str | None
) -> MTPConfig:
    is_own = settings.get("architectures") == [ARCHITECTURE]
    file = os.path.join(path, "config.json")

    def size(key: str, default: int) -> int:
        value = settings.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise CheckpointError(f"{file}: {key}: must be a positive integer, got {value!r}")
        return value

    width = size("hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise CheckpointError(
            f"{file}: hidden_size: the head is for models of width {width}, this one has {target.hidden_size}"
        )
    if any(name.startswith(reader.names.layer + "mlp.experts.") for name in reader.files):
        raise CheckpointError(f"{path}: draft heads with a mixture of experts are not supported")
    source = hidden_source or settings.get("hidden_source") or "pre_norm"
    if source not in HIDDEN_SOURCES:
        raise CheckpointError(
            f"{file}: hidden_source: must be one of {', '.join(HIDDEN_SOURCES)}, got {source!r}"
        )
    layer = dataclasses.replace(
        target,
        num_layers=1,
        num_heads=size("num_attention_heads", target.num_heads),
        num_kv_heads=size("num_key_value_heads", target.num_kv_heads),
        head_dim=size("head_dim", target.head_dim),
        intermediate_size=size("intermediate_size", target.intermediate_size),
        attention_bias=reader.has("layers.0.q_bias"),
        attention_out_bias=reader.has("layers.0.o_bias"),
        qk_norm=reader.has("layers.0.q_norm"),
        rms_eps=float(settings.get("rms_norm_eps", target.rms_eps)),
        sliding_window=(None,),
    )
    if layer.num_heads % layer.num_kv_heads:
        raise CheckpointError(f"{file}: num_attention_heads must be a multiple of num_key_value_heads")
    if is_own and settings.get("rope_theta") is not None:
        try:
            spec = rope_spec(settings["rope_theta"], layer.head_dim, {}, target.max_position_embeddings, file)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: rope_theta: {error}") from error
        layer = dataclasses.replace(layer, rope=spec)
    elif layer.head_dim != target.head_dim:
        raise CheckpointError(
            f"{file}: head_dim: {layer.head_dim}, but the model's RoPE is for {target.head_dim}"
        )
    steps = settings.get("num_model_steps") if is_own else None
    return MTPConfig(layer, source, steps, reader.has("norm"), reader.has("head"))


def _draft_token_ids(
    files: Mapping[str, SafetensorsFile], settings: Mapping[str, Any], path: str, target: ModelConfig
) -> NDArray[np.int32] | None:
    name = "draft_token_ids"
    if name not in files:
        return None
    ids = files[name].integers(name)
    where = f"{files[name].path}: tensor {name!r}"
    if ids.ndim != 1 or not len(ids) or not 0 <= ids.min() <= ids.max() < target.vocab_size:
        raise CheckpointError(f"{where}: must list token ids below {target.vocab_size}")
    if (np.diff(ids) <= 0).any():
        raise CheckpointError(f"{where}: must ascend, each id once")
    if settings.get("draft_vocab_size", len(ids)) != len(ids):
        raise CheckpointError(
            f"{where}: {len(ids)} ids, but draft_vocab_size is {settings['draft_vocab_size']}"
        )
    return ids.astype(np.int32)


class _Reader:
    """The tensors of a module by canonical name, taken apart and turned where the checkpoint needs it."""

    def __init__(self, files: Mapping[str, SafetensorsFile], names: _Names, path: str) -> None:
        self.files = files
        self.names = names
        self._path = path

    def has(self, canonical: str) -> bool:
        return self.names.of(canonical) in self.files or self._fused(canonical) is not None

    def tensor(self, canonical: str, shape: tuple[int, ...], config: MTPConfig) -> RawTensor:
        """Of this shape; a matrix may be stored the other way round."""
        name = self.names.of(canonical)
        fused = None if name in self.files else self._fused(canonical)
        if fused is not None:
            return self._part(canonical, fused, shape, config)
        if name not in self.files:
            raise CheckpointError(f"{self._path}: tensor {name!r} is missing (shape {shape})")
        return self._turned(name, canonical, shape, config)

    def _fused(self, canonical: str) -> str | None:
        """The tensor that holds this one together with others: q, k, v, or gate, up."""
        part = canonical.removeprefix("layers.0.")
        name = {"q": "self_attn.qkv_proj", "gate": "mlp.up_gate_proj"}.get(
            _GROUPS.get(part.split("_")[0], "")
        )
        if name is None or part.endswith("norm"):
            return None
        name = f"{self.names.layer}{name}.{'bias' if part.endswith('bias') else 'weight'}"
        return name if name in self.files else None

    def _part(self, canonical: str, name: str, shape: tuple[int, ...], config: MTPConfig) -> RawTensor:
        part = canonical.removeprefix("layers.0.").split("_")[0]
        members = [member for member, group in _GROUPS.items() if group == _GROUPS[part]]
        suffix = "_bias" if canonical.endswith("_bias") else ""
        heights = [module_shapes(config)[f"layers.0.{member}{suffix}"][0] for member in members]
        whole = self._turned(name, canonical, (sum(heights), *shape[1:]), config)
        first = sum(heights[: members.index(part)])
        return whole.select_rows(np.arange(first, first + shape[0]))

    def _turned(self, name: str, canonical: str, shape: tuple[int, ...], config: MTPConfig) -> RawTensor:
        file = self.files[name]
        tensor = dataclasses.replace(file.tensor(name), name=canonical)
        if tensor.shape == shape and not (
            len(shape) == 2 and shape[0] == shape[1] and self._is_turned(config)
        ):
            return tensor
        if tensor.shape != shape[::-1]:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} has shape {tensor.shape}, the draft head needs {shape}"
            )
        values = np.ascontiguousarray(tensor.to_float32().T)
        return RawTensor(canonical, shape, tensor.format, encode_float(tensor.format, values), tensor.file)

    def _is_turned(self, config: MTPConfig) -> bool:
        """Whether the layer's matrices are [in, out]: told by one that is not square."""
        width, mlp = config.layer.hidden_size, config.layer.intermediate_size
        down = self.files.get(self.names.of("layers.0.down"))
        return (
            down is not None
            and width != mlp
            and down.tensors[self.names.of("layers.0.down")].shape == (mlp, width)
        )


_GROUPS = {
    "q": "q",
    "k": "q",
    "v": "q",
    "gate": "gate",
    "up": "gate",
}  # member -> first of its group, in order
