"""Reading draft heads: every naming gives the same tensors, and what does not fit is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_heads import BLOCK, module_names, save_chain_model, save_head, save_safetensors

from outrider.config import EngineConfig
from outrider.engine.factory import build_engine
from outrider.engine.mtp_parts import bytes_per_token, num_steps
from outrider.models import mtp_loader
from outrider.models.loader import load_checkpoint
from outrider.models.mtp import MTPHead
from outrider.models.mtp_loader import find_head, fingerprint, load_head, quick_fingerprint
from outrider.models.safetensors import open_directory
from outrider.models.tensors import CheckpointError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_chain_model(tmp_path / "model", noise=1.0)


def own(model: Path) -> MTPHead:
    head = load_head(str(model / "mtp"), load_checkpoint(str(model)).config)
    assert head.draft_token_ids is not None and len(head.draft_token_ids) == 90
    return head


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a head in our format, by short name."""
    files = open_directory(str(folder))
    return {
        short: files[name].tensor(name).to_float32()
        for short, name in module_names().items()
        if name in files
    }


def same(head: MTPHead, expected: MTPHead) -> bool:
    return head.tensors.keys() == expected.tensors.keys() and all(
        np.array_equal(tensor.to_float32(), expected.tensors[name].to_float32())
        for name, tensor in head.tensors.items()
    )


def rewritten(model: Path, tensors: dict[str, np.ndarray], **settings: Any) -> MTPHead:
    """A head of a checkpoint with other names, in `model/other`."""
    folder = model / "other"
    folder.mkdir()
    save_safetensors(folder / "model.safetensors", {n: v.astype(np.float16) for n, v in tensors.items()})
    (folder / "config.json").write_text(json.dumps({"architectures": ["Other"], **settings}))
    return load_head(str(folder), load_checkpoint(str(model)).config)


def test_ernie_pt_names(model: Path) -> None:
    values = arrays(model / "mtp")
    head = rewritten(model, {module_names()[short]: value for short, value in values.items()})
    assert same(head, own(model)) and head.draft_token_ids is None
    assert head.config.hidden_source == "pre_norm" and head.config.num_model_steps is None


@pytest.mark.parametrize("is_turned", [False, True])
def test_fused_paddle_tensors(model: Path, is_turned: bool) -> None:
    """[in, out] is told by shape; square matrices go as the others of their layer do."""
    values = arrays(model / "mtp")
    qkv = np.concatenate([values.pop(name) for name in "qkv"])
    gate_up = np.concatenate([values.pop("gate"), values.pop("up")])
    names = {short: name.replace("model.", "ernie.", 1) for short, name in module_names().items()}
    block = BLOCK.replace("model.", "ernie.", 1)
    tensors = {names[short]: value for short, value in values.items()}
    tensors |= {f"{block}self_attn.qkv_proj.weight": qkv, f"{block}mlp.up_gate_proj.weight": gate_up}
    if is_turned:
        tensors = {name: value.T for name, value in tensors.items()}
    assert same(rewritten(model, tensors), own(model))


def deepseek(values: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    prefix = f"model.layers.{layer}."
    special = {"emb_norm": "enorm", "hidden_norm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm"}
    names = {short: name.replace(BLOCK, prefix) for short, name in module_names().items()}
    names |= {short: f"{prefix}{name}.weight" for short, name in special.items()}
    return {names[short]: value for short, value in values.items()}


def test_deepseek_names_among_the_targets_tensors(model: Path) -> None:
    expected = own(model)
    values = arrays(model / "mtp")
    files = open_directory(str(model))
    target = {name: file.tensor(name).to_float32() for name, file in files.items()}
    for file in (model / "mtp").iterdir():
        file.unlink()
    (model / "mtp").rmdir()
    checkpoint = load_checkpoint(str(model))
    assert find_head(checkpoint.config, checkpoint.path) is None
    more = deepseek(values, 1)
    more["model.layers.1.shared_head.norm.weight"] = np.full(96, 0.5)
    more["model.layers.1.shared_head.head.weight"] = 2 * target["lm_head.weight"]
    more["model.layers.1.embed_tokens.weight"] = target["model.embed_tokens.weight"]
    save_safetensors(
        model / "model.safetensors", {n: v.astype(np.float32) for n, v in (target | more).items()}
    )
    checkpoint = load_checkpoint(str(model))
    head = find_head(checkpoint.config, checkpoint.path)
    assert head is not None and head.config.has_norm and head.config.has_head
    assert all(
        np.array_equal(head.tensors[n].to_float32(), t.to_float32()) for n, t in expected.tensors.items()
    )
    engine = build_engine(
        EngineConfig.from_dict({"model": str(model), "speculative_config": {"method": "mtp"}})
    )
    assert engine.runner.draft_head is not None


def without(name: str) -> Any:
    return lambda tensors, settings: tensors.pop(name)


def changed(name: str, value: np.ndarray) -> Any:
    return lambda tensors, settings: tensors.update({name: value})


def setting(**values: Any) -> Any:
    return lambda tensors, settings: settings.update(values)


PROJ, DOWN = "model.mtp_linear_proj.0.weight", BLOCK + "mlp.down_proj.weight"
BROKEN = {
    "missing": (without(PROJ), r"tensor 'model.mtp_linear_proj.0.weight' is missing \(shape \(96, 192\)\)"),
    "missing in the layer": (without(DOWN), r"tensor 'model.mtp_block.0.mlp.down_proj.weight' is missing"),
    "misshapen": (changed(PROJ, np.ones((96, 96))), r"safetensors: tensor 'model.mtp_linear_proj.0.weight' "
                  r"has shape \(96, 96\), the draft head needs \(96, 192\)"),
    "no head at all": (lambda tensors, settings: tensors.clear(), "holds no draft head"),
    "experts": (changed(BLOCK + "mlp.experts.0.up_proj.weight", np.ones((2, 2))), "mixture of experts"),
    "another width": (setting(hidden_size=128), "the head is for models of width 128, this one has 96"),
    "a wrong size": (setting(intermediate_size="many"), "intermediate_size: must be a positive integer"),
    "a wrong source": (setting(hidden_source="middle"), "hidden_source: must be one of pre_norm, post_norm"),
    "heads": (setting(num_key_value_heads=3), "must be a multiple"),
    "theta": (setting(rope_theta=-1), "config.json: rope_theta"),
    "ids too large": (changed("draft_token_ids", np.array([1, 90], np.int32)), "must list token ids"),
    "ids twice": (changed("draft_token_ids", np.array([1, 1], np.int64)), "must ascend, each id once"),
    "ids of floats": (changed("draft_token_ids", np.ones(2, np.float32)), "dtype F32; supported: I32, I64"),
    "ids that are too few": (setting(draft_vocab_size=91), "90 ids, but draft_vocab_size is 91"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_what_does_not_fit_is_named(model: Path, kind: str) -> None:
    change, message = BROKEN[kind]
    tensors = {module_names()[short]: value for short, value in arrays(model / "mtp").items()}
    tensors = {name: value.astype(np.float16) for name, value in tensors.items()}
    tensors["draft_token_ids"] = np.arange(90, dtype=np.int32)
    settings: dict[str, Any] = {"architectures": ["OutriderMTP"]}
    change(tensors, settings)
    folder = model / "broken"
    folder.mkdir()
    tensors = {n: v.astype(np.float16) if v.dtype == np.float64 else v for n, v in tensors.items()}
    save_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=re.escape(str(folder)) + ".*" + message):
        load_head(str(folder), load_checkpoint(str(model)).config)


def test_a_head_is_found_by_name_beside_the_model_or_in_the_package(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_checkpoint(str(model)).config
    beside = find_head(target, str(model))
    assert beside is not None and beside.path == str(model / "mtp")
    with pytest.raises(CheckpointError, match="there is no such directory"):
        find_head(target, str(model), str(tmp_path / "nowhere"))
    values = {module_names()[short]: value for short, value in arrays(model / "mtp").items()}
    named = save_head(tmp_path / "named", values, hidden_source="post_norm")
    head = find_head(target, str(model), str(named))
    assert head is not None and head.config.hidden_source == "post_norm"
    head = find_head(target, str(model), str(named), "pre_norm")
    assert head is not None and head.config.hidden_source == "pre_norm"

    # A file's own head is in the package's assets, and is known by what the file holds.
    file = tmp_path / "target.gguf"
    file.write_bytes(b"weights" * 400_000)
    assets = tmp_path / "package" / "assets"
    monkeypatch.setattr(mtp_loader.resources, "files", lambda package: tmp_path / "package")
    assert find_head(target, str(file)) is None
    for name, key, mark in (
        ("a", "target_sha256", "0" * 64), ("b", "target_sha256", fingerprint(str(file))),
        ("c", "target_fingerprint", quick_fingerprint(str(file))),
    ):  # fmt: skip
        save_head(assets / name, values, **{key: mark})
        own = find_head(target, str(file))
        assert own is None if name == "a" else own is not None and own.path == str(assets / "b")
    file.write_bytes(b"others!" * 400_000)
    assert find_head(target, str(file)) is None


def test_steps_are_as_configured_else_as_trained(model: Path) -> None:
    head = own(model)

    def steps(**speculative: Any) -> int:
        values = {"model": str(model), "speculative_config": {"method": "mtp", **speculative}}
        return num_steps(head, EngineConfig.from_dict(values))

    assert steps() == 3
    assert steps(num_model_steps=5) == 5
    assert steps(num_speculative_tokens=2) == 2


def test_mtp_without_a_head_says_so(model: Path) -> None:
    for file in (model / "mtp").iterdir():
        file.unlink()
    (model / "mtp").rmdir()
    config = EngineConfig.from_dict({"model": str(model), "speculative_config": {"method": "mtp"}})
    with pytest.raises(ValueError, match="method 'mtp' needs a head, and none was found"):
        build_engine(config)
    auto = EngineConfig.from_dict({"model": str(model), "speculative_config": {"method": "auto"}})
    assert build_engine(auto).runner.draft_head is None


def test_the_memory_plan_knows_the_head(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert bytes_per_token(own(model), cache_bytes=2) == 2 * 2 * 48 + 2 * 96
    for method in ("off", "mtp"):
        caplog.clear()
        with caplog.at_level("INFO", "outrider"):
            build_engine(
                EngineConfig.from_dict({"model": str(model), "speculative_config": {"method": method}})
            )
        plan = next(record.getMessage() for record in caplog.records if "memory:" in record.getMessage())
        assert ("drafter" in plan) == (method == "mtp")
