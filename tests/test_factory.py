"""From a configuration to an engine: every option reaches the part that it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.backends import make_backend
from outrider.config import EngineConfig
from outrider.engine import factory
from outrider.engine.factory import build_engine, load
from outrider.models.quantize import dequantize, encode_float
from outrider.models.tensors import RawTensor

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return str(tmp_path)


def config(model: str, **options: object) -> EngineConfig:
    return EngineConfig.from_dict(
        {"model": model, "load_format": "dummy", "num_kv_blocks": 8, "max_num_seqs": 2, "num_threads": 1}
        | {"speculative_config": {"method": "off"}}
        | options
    )


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_floats_are_rounded_to_the_nearest(fmt: str) -> None:
    torch = pytest.importorskip("torch")
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32) * np.float32(1e-3)
    expected = torch.from_numpy(values).to(kinds[fmt]).float().numpy()
    assert np.array_equal(dequantize(fmt, encode_float(fmt, values)), expected)


def test_only_float_matrices_change_their_type() -> None:
    vector = RawTensor("norm", (4,), "f32", np.zeros(16, np.uint8), "file")
    quantised = RawTensor("q", (1, 32), "q8_0", np.zeros(34, np.uint8), "file")
    assert vector.as_float("f16") is vector and quantised.as_float("f16") is quantised


@pytest.mark.parametrize(("dtype", "fmt"), [("float32", "f32"), ("bfloat16", "bf16"), ("float16", "f16")])
def test_dtype_decides_how_unquantised_weights_are_held(
    model: str, dtype: str, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = set()

    def make_watched_backend(*args: Any, **keywords: Any) -> Any:
        backend = make_backend(*args, **keywords)
        pack = backend.weight

        def weight(tensors: list[RawTensor], quantization: str | None) -> Any:
            given.update(t.format for t in tensors if len(t.shape) == 2)
            return pack(tensors, quantization)

        backend.weight = weight
        return backend

    monkeypatch.setattr(factory, "make_backend", make_watched_backend)
    build_engine(config(model, dtype=dtype))
    assert given == {fmt}


def test_a_checkpoint_can_be_given_instead_of_loaded(model: str) -> None:
    settings = config(model)
    assert build_engine(settings, load(settings)).max_model_len == 128
