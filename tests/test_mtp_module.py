"""The draft module: against torch, fed in any pieces, natively and step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import outrider._native as _native
import pytest
from mtp_heads import module_names, save_head
from native_models import random_tensors, tiny_config

from outrider.backends import make_backend
from outrider.backends.ops import RopeSpec
from outrider.models.config import ModelConfig
from outrider.models.mtp import compile_feeder, compile_module, module_shapes, module_weights
from outrider.models.mtp_loader import load_head
from outrider.spec_decode.draft_head import SteppedDraftHead, make_draft_head

NUM_BLOCKS, BLOCK = 12, 16
VOCAB, WIDTH = 50, 64
IDS = np.sort(np.random.default_rng(1).permutation(VOCAB)[:40]).astype(np.int32)
GREEDY = _native.SamplerState(temperature=0.0)
TABLE = [7, 2, 9, 4]
TOKENS = np.random.default_rng(2).integers(0, VOCAB, 37).astype(np.int32)
HIDDEN = np.random.default_rng(3).standard_normal((60, WIDTH)).astype(np.float32)


def target(**changes: Any) -> ModelConfig:
    rope = RopeSpec(tuple(1e4 ** (-i / 8) for i in range(8)), 16)
    return tiny_config(rope=rope, tie_embeddings=True, **changes)


def random_head(folder: Path, config: ModelConfig, ids: np.ndarray | None = IDS, seed: int = 5) -> Path:
    rng = np.random.default_rng(seed)
    empty = save_head(folder, {"model.mtp_norm.weight": np.ones(config.hidden_size)})
    shapes = {"norm": (config.hidden_size,)}
    head_config = _config_of(empty, config)
    for name, shape in module_shapes(head_config).items():
        shapes[name.removeprefix("layers.0.")] = shape
    values = {
        name: 1 + 0.3 * rng.standard_normal(shape)
        if name.endswith("norm")
        else rng.standard_normal(shape) * 1.5 * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    tensors = {module_names()[name]: value for name, value in values.items()}
    return save_head(folder, tensors, ids, hidden_source="pre_norm", num_model_steps=3, rope_theta=1e4)


def _config_of(folder: Path, config: ModelConfig) -> Any:
    from outrider.models.mtp import MTPConfig

    return MTPConfig(config.__class__(**{**config.__dict__, "num_layers": 1, "sliding_window": (None,)}))


def make(
    folder: Path,
    config: ModelConfig,
    backend: str = "native",
    stepped: bool = False,
    quantization: str | None = None,
) -> Any:
    """A draft head for random weights of a target and the module in `folder`."""
    options: dict[str, Any] = {"dtype": "float64"} if backend == "torch" else {}
    made = make_backend(backend, num_threads=2, **options)
    head = load_head(str(folder), config)
    tensors = random_tensors(config)
    handles = {name: made.weight([tensors[name]], None) for name in ("embed", "norm")}
    limits: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK}
    executable = compile_module(
        made, head, module_weights(made, head, tensors, handles, quantization),
        max_rows=64, max_logits_rows=8, kv_cache_dtype="f32", **limits,
    )  # fmt: skip
    feeder = compile_feeder(
        executable, head, module_weights(made, head, tensors, handles, quantization),
        max_rows=64, max_position=NUM_BLOCKS * BLOCK,
    )  # fmt: skip
    if stepped:
        ids = np.arange(VOCAB, dtype=np.int32) if head.draft_token_ids is None else head.draft_token_ids
        return SteppedDraftHead(executable, WIDTH, NUM_BLOCKS, BLOCK, 64, ids, VOCAB)
    return make_draft_head(
        executable,
        width=WIDTH,
        max_rows=64,
        token_ids=head.draft_token_ids,
        vocab_size=VOCAB,
        feeder=feeder,
        **limits,
    )


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def slots(first: int, end: int, table: Sequence[int] = TABLE) -> np.ndarray:
    return ints(*(table[p // BLOCK] * BLOCK + p % BLOCK for p in range(first, end)))


def keep(head: Any, end: int, table: Sequence[int] = TABLE) -> None:
    head.keep(HIDDEN[:end], slots(0, end, table))


def feed(head: Any, first: int, end: int, steps: int, state: Any = GREEDY, tokens: Any = TOKENS) -> Any:
    drafted, chances = head.draft(
        tokens[first:end],
        ints(0, end - first),
        ints(first),
        np.array([TABLE], np.int32),
        ints(steps),
        [state],
    )
    return drafted[0, 0].tolist(), chances[0, 0].tolist()


@pytest.mark.parametrize("seed", [1, 2])
def test_recursion_is_what_training_trains(tmp_path: Path, seed: int) -> None:
    """The module that the trainer optimises, run over all positions at once, gives the same drafts."""
    torch = pytest.importorskip("torch")
    training = pytest.importorskip("outrider.training.mtp")
    config = target()
    folder = random_head(tmp_path, config, seed=seed)
    tensors = random_tensors(config)
    embed = torch.from_numpy(tensors["embed"].to_float32().copy())
    theirs = training.MTPHead(
        training.HeadConfig.of(config), embed, embed[IDS.tolist()], torch.from_numpy(IDS.astype(np.int64))
    )
    files = {name: torch.from_numpy(t.to_float32().copy()) for name, t in _stored(folder).items()}
    theirs.load_tensors(files)

    head = make(folder, config)
    keep(head, 37)
    drafted, chances = feed(head, 0, 37, 4)
    tokens = torch.from_numpy(np.append(TOKENS, drafted[:3]).astype(np.int64))[None]
    kept = torch.from_numpy(HIDDEN[:40]).to(torch.bfloat16).float()[None]
    with torch.inference_mode():
        states = theirs.passes(tokens, kept, 4)
        for depth, state in enumerate(states):
            shares = theirs.logits(state[0, 36 + depth]).softmax(-1).numpy()
            assert IDS[shares.argmax()] == drafted[depth]
            assert chances[depth] == pytest.approx(shares.max(), rel=2e-3)


def _stored(folder: Path) -> Any:
    from outrider.models.safetensors import open_directory

    return {n: f.tensor(n) for n, f in open_directory(str(folder)).items() if n != "draft_token_ids"}


@pytest.mark.parametrize("ids", [None, IDS])
def test_native_and_torch_draft_alike(tmp_path: Path, ids: np.ndarray | None) -> None:
    pytest.importorskip("torch")
    config = target()
    folder = random_head(tmp_path, config, ids)
    states = [GREEDY, _native.SamplerState(temperature=0.8, seed=4, prompt_token_ids=TOKENS.tolist())]
    results = []
    for backend in ("native", "torch"):
        head = make(folder, config, backend)
        keep(head, 37)
        results.append([feed(head, 0, 37, 5, state) for state in states])
    for native, reference in zip(*results, strict=True):
        assert native[0] == reference[0]
        np.testing.assert_allclose(native[1], reference[1], rtol=2e-3)


PIECES = {
    "one chunk": [37], "chunks": [10, 25, 36, 37], "token by token": list(range(1, 38)),
    "last alone": [36, 37],
}  # fmt: skip


@pytest.mark.parametrize("stepped", [False, True])
def test_it_may_be_fed_in_any_pieces(tmp_path: Path, stepped: bool) -> None:
    config = target()
    folder = random_head(tmp_path, config)
    results = []
    for name, ends in PIECES.items():
        head = make(folder, config, stepped=stepped)
        keep(head, 37)
        for first, end in zip([0, *ends], ends, strict=False):
            # Drafts on the way write behind the final tokens; they leave nothing that lasts.
            result = feed(head, first, end, 3 if name != "chunks" or end == 37 else 0)
        results.append(result)
    assert all(result == results[0] for result in results)


def test_requests_do_not_see_each_other(tmp_path: Path) -> None:
    """A batch of four at different places equals each alone, and the native round equals the stepped one."""
    config = target()
    folder = random_head(tmp_path, config)
    tables = [[7, 2, 9], [1, 3, 0], [5, 0, 0], [11, 10, 6]]
    spans, steps = [(0, 33), (20, 35), (3, 4), (0, 7)], [3, 5, 1, 0]
    states = [
        GREEDY,
        _native.SamplerState(temperature=1.3, top_p=0.9, presence_penalty=0.8, seed=1),
        _native.SamplerState(temperature=0.7, top_k=5, seed=2),
        None,
    ]
    heads = [make(folder, config), make(folder, config, stepped=True)]
    batches = []
    for head in heads:
        for table in tables:
            head.keep(HIDDEN[:40], slots(0, 40, [*table, 8]))
        fed = [head.draft(TOKENS[:a], ints(0, a), ints(0), np.array([t], np.int32), ints(0), [None])
               for (a, _), t in zip(spans, tables, strict=True) if a]  # fmt: skip
        assert all((drafted == -1).all() for drafted, _ in fed)
        tokens = np.concatenate([TOKENS[a:b] for a, b in spans])
        loc = np.cumsum([0, *(b - a for a, b in spans)]).astype(np.int32)
        drafted, chances = head.draft(
            tokens, loc, ints(*(a for a, _ in spans)), np.array(tables, np.int32), ints(*steps), states
        )
        batches.append((drafted.tolist(), chances.tolist()))
        for i, ((a, b), table) in enumerate(zip(spans, tables, strict=True)):
            alone, chance = head.draft(
                TOKENS[a:b], ints(0, b - a), ints(a), np.array([table], np.int32), ints(steps[i]), [states[i]]
            )
            width = alone.shape[2]
            assert alone[:, 0].tolist() == drafted[:, i, :width].tolist()
            assert chance[:, 0].tolist() == chances[:, i, :width].tolist()
    assert batches[0] == batches[1]
    for choice in batches[0][0]:
        assert [sum(token >= 0 for token in tokens) for tokens in choice] == steps


def test_blocks_are_fed_until_they_begin_anew(tmp_path: Path) -> None:
    config = target()
    folder = random_head(tmp_path, config)
    for head in (make(folder, config), make(folder, config, stepped=True)):
        table = np.array(TABLE, np.int32)
        keep(head, 37)
        assert head.count_fed(table, 3) == 0
        feed(head, 0, 31, 4)
        assert head.count_fed(table, 3) == 1
        feed(head, 31, 37, 0)
        assert head.count_fed(table, 3) == head.count_fed(table, 2) == 2
        head.keep(HIDDEN[:3], slots(29, 32))  # tokens behind the first of a block leave it as it is
        assert head.count_fed(table, 3) == 2
        head.keep(HIDDEN[:1], slots(16, 17))
        assert head.count_fed(table, 3) == 1


def test_moved_slots_take_their_hidden_states_along(tmp_path: Path) -> None:
    config = target()
    folder = random_head(tmp_path, config)
    for stepped in (False, True):
        straight, moved = (make(folder, config, stepped=stepped) for _ in range(2))
        keep(straight, 37)
        keep(moved, 30)
        moved.keep(HIDDEN[30:37], slots(32, 39))
        moved.move_slots(slots(32, 39), slots(30, 37))
        assert feed(straight, 0, 37, 3) == feed(moved, 0, 37, 3)


def test_what_is_out_of_range_is_refused(tmp_path: Path) -> None:
    config = target()
    head = make(random_head(tmp_path, config), config)
    table = np.array([TABLE], np.int32)
    bad: list[tuple[str, tuple[Any, ...]]] = [
        ("block table is too short", (TOKENS[:5], ints(0, 5), ints(60), table, ints(1), [GREEDY])),
        ("block out of range", (TOKENS[:5], ints(0, 5), ints(0), table + 99, ints(1), [GREEDY])),
        ("needs tokens", (TOKENS[:5], ints(0, 0), ints(0), table, ints(1), [GREEDY])),
        ("sampler state", (TOKENS[:5], ints(0, 5), ints(0), table, ints(1), [None])),
        ("token_ids", (TOKENS[:5] + 50, ints(0, 5), ints(0), table, ints(1), [GREEDY])),
        ("one start", (TOKENS[:5], ints(0, 5), ints(0, 0), table, ints(1), [GREEDY])),
    ]
    for message, arguments in bad:
        with pytest.raises(ValueError, match=message):
            head.draft(*arguments)
    with pytest.raises(ValueError, match="slot out of range"):
        head.keep(HIDDEN[:1], ints(NUM_BLOCKS * BLOCK))
    with pytest.raises(ValueError, match="row of the head's width"):
        head.keep(HIDDEN[:2], ints(0))


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 3.0])
def test_drafts_are_drawn_with_the_samplers_noise(temperature: float) -> None:
    """Over a vocabulary that knows all tokens a draft is the sampler's own token, but for rare lucky ones."""
    rng = np.random.default_rng(0)
    vocabulary = _native.DraftVocabulary(list(range(700)), 700)
    some = _native.DraftVocabulary(list(range(0, 700, 3)), 700)
    agreed = 0
    for i in range(300):
        logits = (3 * rng.standard_normal(700)).astype(np.float32)
        state = _native.SamplerState(temperature=temperature, top_p=0.95 if i % 2 else 1.0, seed=i)
        drawn, _ = _native.sample(logits[None], [state], ints(0), np.array([i]), ints(0, 0), ints())
        draft, chance, *_ = _native.draft_row(logits, vocabulary, state, [], i)
        agreed += draft == drawn[0]
        assert 0 < chance <= 1
        masked = np.full(700, -np.inf, np.float32)
        masked[::3] = logits[::3]
        drawn, _ = _native.sample(masked[None], [state], ints(0), np.array([i]), ints(0, 0), ints())
        draft, *_ = _native.draft_row(np.ascontiguousarray(logits[::3]), some, state, [], i)
        agreed += draft == drawn[0]
    assert agreed >= 594 if temperature else agreed == 600


def test_penalties_and_masks_apply_to_drafts() -> None:
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    vocabulary = _native.DraftVocabulary([4, 6, 8], 10)
    plain = _native.SamplerState(temperature=0.0)
    assert _native.draft_row(logits, vocabulary, plain, [], 0)[0] == 4
    penalised = _native.SamplerState(temperature=0.0, presence_penalty=1.5)
    assert _native.draft_row(logits, vocabulary, penalised, [], 0)[0] == 4
    assert _native.draft_row(logits, vocabulary, penalised, [4], 0)[0] == 6
    biased = _native.SamplerState(temperature=0.0, logit_bias_ids=[8], logit_bias_values=[9.0])
    assert _native.draft_row(logits, vocabulary, biased, [], 0)[0] == 8
    assert _native.draft_row(logits * np.nan, vocabulary, plain, [], 0)[0] == -1


def test_probabilities_are_those_of_the_temperature() -> None:
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    vocabulary = _native.DraftVocabulary([1, 2, 3], 4)
    for temperature in (0.0, 1.0, 0.5):
        state = _native.SamplerState(temperature=temperature, seed=1)
        token, chance, *_ = _native.draft_row(logits, vocabulary, state, [], 0)
        shares = np.exp(logits / (temperature or 1.0))
        assert chance == pytest.approx(shares[token - 1] / shares.sum(), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.5])
def test_the_second_choice_is_what_is_drawn_without_the_first(temperature: float) -> None:
    rng = np.random.default_rng(0)
    vocabulary = _native.DraftVocabulary(list(range(0, 700, 2)), 700)
    agreed = 0
    for i in range(200):
        logits = (3 * rng.standard_normal(350)).astype(np.float32)
        state = _native.SamplerState(temperature=temperature, seed=i)
        first, _, second, chance = _native.draft_row(logits, vocabulary, state, [], i)
        shares = np.exp((logits - logits.max()) / (temperature or 1.0))
        assert chance == pytest.approx(shares[second // 2] / shares.sum(), rel=1e-3, abs=1e-6)
        logits[first // 2] = -np.inf
        agreed += second == _native.draft_row(logits, vocabulary, state, [], i)[0]
    assert agreed >= 196 if temperature else agreed == 200
    alone = np.array([1.0, -np.inf], np.float32)
    two = _native.DraftVocabulary([3, 4], 10)
    state = _native.SamplerState(temperature=temperature, seed=1)
    assert _native.draft_row(alone, two, state, [], 0)[0] == 3
    if temperature:  # masked, so it cannot be drawn at all
        assert _native.draft_row(alone, two, state, [], 0)[2] == -1
