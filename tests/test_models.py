"""Golden tests: tiny random models of each family, made and run by `transformers`, against ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import save_tokenizer

from outrider.backends import make_backend
from outrider.models.loader import Checkpoint, CheckpointError, load_checkpoint
from outrider.models.names import gguf_name
from outrider.models.registry import build_function, weight_plan

LENGTH = 48  # tokens of the test text
BLOCK_SIZE = 16
VOCAB = 101
# Largest difference of a logit from transformers in float64, logits being of size 1..10. transformers rounds
# the rotary tables to float32 even then; the native kernels compute in float32 throughout.
BOUNDS = {"torch": 2e-5, "native": 2e-4}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 32}),
    "llama-gelu": ("LlamaConfig", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-rope-theta": ("LlamaConfig", _rope("default", rope_theta=500.0)),
    "llama-rope-linear": ("LlamaConfig", _rope("linear", factor=4.0)),
    # transformers lets the base grow with the text; at the full extended context, 48 tokens, it is ours.
    "llama-rope-dynamic": ("LlamaConfig", {**_rope("dynamic", factor=3.0), "max_position_embeddings": 16}),
    "llama-rope-llama3": ("LlamaConfig", _rope("llama3", **_LLAMA3)),
    "llama-rope-yarn": ("LlamaConfig", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "mistral-no-window": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}  # fmt: skip


@dataclass
class Golden:
    """A saved random model, its text, and what transformers in float64 makes of it."""

    path: str
    token_ids: list[int]
    logits: np.ndarray = field(repr=False)  # float64 [LENGTH, VOCAB]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str) -> Golden:
        path = str(tmp_path_factory.mktemp(family))
        model = _random_model(family)
        model.save_pretrained(path)
        save_tokenizer(path)
        token_ids = np.random.default_rng(3).integers(0, VOCAB, LENGTH).tolist()
        with torch.inference_mode():
            logits = model.double()(torch.tensor([token_ids])).logits[0].numpy()
        return Golden(path, token_ids, logits)

    return make


def _random_model(family: str) -> Any:
    class_name, changes = FAMILIES[family]
    config = getattr(transformers, class_name)(**{**_SIZES, **changes})
    torch.set_num_threads(1)  # tiny products: threads only wait for each other
    torch.manual_seed(len(family))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # every part must matter, biases and norms too
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5 * 1.5)
    return model


class Sequence:
    """One request's cache on an executable: feed tokens from any position, get the logits of all of them."""

    def __init__(self, checkpoint: Checkpoint, backend_name: str, **options: Any) -> None:
        backend = make_backend(backend_name, **options)
        config = checkpoint.config
        weights = {
            handle: backend.weight([checkpoint.tensors[name] for name in names], None)
            for handle, names in weight_plan(config).items()
        }
        num_blocks = LENGTH // BLOCK_SIZE + 1
        self.blocks = np.array([[3, 0, 2, 1][:num_blocks]], np.int32)
        self.executable = backend.compile(
            build_function(config),
            config,
            weights,
            max_rows=LENGTH,
            max_logits_rows=LENGTH,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            kv_cache_dtype="f32",
        )

    def feed(self, token_ids: list[int], start: int) -> np.ndarray:
        positions = np.arange(start, start + len(token_ids), dtype=np.int32)
        batch = SimpleNamespace(
            token_ids=np.array(token_ids, np.int32),
            positions=positions,
            slot_mapping=self.blocks[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_start_loc=np.array([0, len(token_ids)], np.int32),
            seq_lens=np.array([start + len(token_ids)], np.int32),
            block_tables=self.blocks,
            logits_indices=np.arange(len(token_ids), dtype=np.int32),
            parents=np.empty(0, np.int32),
        )
        return self.executable.run(batch).logits.copy()

    def in_chunks(self, token_ids: list[int], size: int) -> np.ndarray:
        starts = range(0, len(token_ids), size)
        return np.concatenate([self.feed(token_ids[start : start + size], start) for start in starts])

    def in_windows(self, token_ids: list[int], seed: int) -> np.ndarray:
        """Token by token, each with wrong drafts behind it, some of which turn out right."""
        rng = np.random.default_rng(seed)
        rows: list[np.ndarray] = []
        while len(rows) < len(token_ids):
            start = len(rows)
            num_right = int(rng.integers(1, 4))
            right = token_ids[start : start + num_right]
            room = min(4, len(token_ids) - start - len(right))
            wrong = [(token_ids[start + len(right) + i] + 1 + i) % VOCAB for i in range(room)]
            rows.extend(self.feed(right + wrong, start)[: len(right)])
        return np.array(rows)


# Every size where a step costs little.
CHUNK_SIZES = {"torch": (5, 17), "native": range(1, LENGTH)}
BACKENDS = {"torch": {"dtype": "float64", "num_threads": 1}, "native": {"num_threads": 2}}


def _sequence(golden: Any, family: str, backend: str) -> tuple[Sequence, Golden]:
    expected = golden(family)
    return Sequence(load_checkpoint(expected.path), backend, **BACKENDS[backend]), expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_however_the_text_is_cut(golden: Any, family: str, backend: str) -> None:
    sequence, expected = _sequence(golden, family, backend)
    whole = sequence.feed(expected.token_ids, 0)
    assert 1 < np.abs(expected.logits).max() < 50
    assert np.abs(whole - expected.logits).max() < BOUNDS[backend]
    for size in CHUNK_SIZES[backend]:
        pieces = sequence.in_chunks(expected.token_ids, size)
        assert np.abs(pieces - expected.logits).max() < BOUNDS[backend], f"chunks of {size}"
        assert backend != "native" or np.array_equal(pieces, whole), f"chunks of {size}: other bits"
    for seed in range(3 if backend == "native" else 1):
        drafted = sequence.in_windows(expected.token_ids, seed)
        assert np.abs(drafted - expected.logits).max() < BOUNDS[backend], f"windows of seed {seed}"
        assert backend != "native" or np.array_equal(drafted, whole), f"windows of seed {seed}: other bits"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_text_equals_transformers_or_differs_at_a_tie(golden: Any, family: str) -> None:
    sequence, expected = _sequence(golden, family, "native")
    model = _random_model(family).double()
    token_ids = expected.token_ids[:8]
    logits = sequence.feed(token_ids, 0)[-1]
    while len(token_ids) < LENGTH:
        chosen = int(logits.argmax())
        with torch.inference_mode():
            reference = model(torch.tensor([token_ids])).logits[0, -1].numpy()
        if chosen != reference.argmax():
            best, chosen_logit = reference.max(), reference[chosen]
            assert best - chosen_logit < 2 * BOUNDS["native"], f"token {len(token_ids)} is not a tie"
        token_ids = [*token_ids, chosen]
        logits = sequence.feed([chosen], len(token_ids) - 1)[-1]


class NotedWeights(Mapping[str, str]):
    """Weights of a plan that remember which were asked for."""

    def __init__(self, plan: Mapping[str, list[str]]) -> None:
        self.plan = plan
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        if name not in self.plan:
            raise KeyError(name)
        self.asked.add(name)
        return name

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan)

    def __len__(self) -> int:
        return len(self.plan)


class NoOps:
    """Ops that do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda x, *args, **kwargs: [x] * len(args[0]) if name == "split" else x


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weight_plan_is_exactly_what_the_model_asks_for(golden: Any, family: str) -> None:
    config = load_checkpoint(golden(family).path).config
    weights = NotedWeights(weight_plan(config))
    build_function(config)(NoOps(), config, weights)
    assert weights.asked == set(weights.plan)


def write_gguf(checkpoint: Checkpoint, path: Path, divisors: np.ndarray | None = None) -> str:
    """The checkpoint as a GGUF file, q and k in llama.cpp's row order where that is the architecture's."""
    config = checkpoint.config
    architecture = config.architecture if config.architecture.startswith("qwen") else "llama"
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rope.rotary_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(chr(33 + index) for index in range(90)), "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    for name, tensor in checkpoint.tensors.items():
        values = tensor.to_float32()
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(
            name.rsplit(".", 1)[-1].split("_bias")[0]
        )
        if architecture == "llama" and heads is not None:
            halves = values.reshape(heads, 2, config.head_dim // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "mistral-no-window"]
)
def test_a_gguf_file_gives_the_bits_of_the_directory_it_was_made_from(
    golden: Any, tmp_path: Path, family: str
) -> None:
    expected = golden(family)
    directory = load_checkpoint(expected.path)
    file = load_checkpoint(write_gguf(directory, tmp_path / "model.gguf"))
    assert file.config.eos_token_ids == (2,)
    for name, tensor in directory.tensors.items():
        assert np.array_equal(file.tensors[name].to_float32(), tensor.to_float32()), name
    logits = [Sequence(c, "native", num_threads=2).feed(expected.token_ids, 0) for c in (directory, file)]
    assert np.array_equal(*logits)


def test_frequency_divisors_in_a_gguf_file_are_llama3_scaling(golden: Any, tmp_path: Path) -> None:
    expected = golden("llama-rope-llama3")
    directory = load_checkpoint(expected.path)
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    divisors = plain / np.array(directory.config.rope.inv_freq)
    assert divisors.max() == pytest.approx(4)
    file = load_checkpoint(write_gguf(directory, tmp_path / "model.gguf", divisors))
    logits = Sequence(file, "native", num_threads=2).feed(expected.token_ids, 0)
    assert np.abs(logits - expected.logits).max() < BOUNDS["native"]


@pytest.fixture(scope="module")
def whole_gguf(golden: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return Path(write_gguf(load_checkpoint(golden("llama").path), path, np.ones(8))).read_bytes()


@given(st.data())
def test_a_gguf_file_with_flipped_bytes_loads_or_is_an_error(
    whole_gguf: bytes, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    damaged = bytearray(whole_gguf)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(24, 5000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        checkpoint = load_checkpoint(str(path))
        checkpoint.tokenizer.encode("abc")
        assert all(tensor.shape for tensor in checkpoint.tensors.values())
    except CheckpointError as error:
        assert "damaged.gguf" in str(error)


def test_dummy_weights_are_the_same_for_the_same_seed(golden: Any) -> None:
    path = golden("qwen3").path
    first, again, other = (load_checkpoint(path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    for name in first.tensors:
        assert np.array_equal(first.tensors[name].data, again.tensors[name].data), name
    assert not np.array_equal(first.tensors["embed"].data, other.tensors["embed"].data)
    logits = Sequence(first, "native", num_threads=2).feed([5, 6, 7], 0)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1


def test_dummy_weights_need_no_tokenizer_and_no_weights(tmp_path: Path) -> None:
    config = {**_SIZES, "architectures": ["LlamaForCausalLM"], "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = load_checkpoint(str(tmp_path), load_format="dummy")
    text = "naïve 日本\n"
    assert checkpoint.tokenizer.encode(text) == list(text.encode())
    assert checkpoint.tokenizer.decode(list(text.encode())) == text
    assert len(checkpoint.tokenizer.token_bytes()) == 300
