"""Training of draft heads: the data, the module against plain inference, the loop, the command."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_models import random_tensors, tiny_config

from outrider import _native
from outrider.entrypoints import cli
from outrider.models.loader import Checkpoint
from outrider.models.tokenizer_gguf import byte_tokenizer
from outrider.training.data import Generator, Record, Store, generate
from outrider.training.prompts import ANSWER, GIVEN, KINDS, PromptSource

torch = pytest.importorskip("torch")

from outrider.training import loss, pipeline  # noqa: E402
from outrider.training.corpus import Batches, Corpus, frequent_tokens, make_batch  # noqa: E402
from outrider.training.evaluate import measure  # noqa: E402
from outrider.training.export import write_head  # noqa: E402
from outrider.training.loss import LossOptions, loss_of  # noqa: E402
from outrider.training.mtp import HeadConfig, MTPHead  # noqa: E402
from outrider.training.trainer import Trainer, TrainOptions  # noqa: E402

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}>"
SOURCE: dict[str, Any] = {"max_answer": 24}


def tiny_target(seed: int = 0) -> Checkpoint:
    config = tiny_config(vocab_size=256, tie_embeddings=True, eos_token_ids=(ord("]"),))
    tokenizer = byte_tokenizer(256)
    tokenizer.attach(256, config.eos_token_ids, None)
    tokenizer.chat_template = TEMPLATE
    return Checkpoint(config, random_tensors(config, seed), tokenizer, "tiny", "/nowhere")


def records_of(store: Store) -> list[Record]:
    return sorted(store.read(), key=lambda record: record.index)


def assert_equal(one: Record, other: Record) -> None:
    for name, value in vars(one).items():
        np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)


@pytest.fixture(scope="module")
def target() -> Checkpoint:
    return tiny_target()


@pytest.fixture(scope="module")
def data(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("data"))
    source = PromptSource(target.tokenizer, kinds=("magpie", "chat"), **SOURCE)
    generate(Generator(target, places=8, max_tokens=256), source, store, num_tokens=3000, shard_tokens=500)
    return store


def test_scripts_depend_on_seed_and_number_only(target: Checkpoint) -> None:
    one, same = (PromptSource(target.tokenizer, seed=3) for _ in range(2))
    other = PromptSource(target.tokenizer, seed=4)
    scripts = [one.script(index) for index in range(60)]
    assert [same.script(index) for index in reversed(range(60))] == scripts[::-1]
    assert all(other.script(script.index) != script for script in scripts)
    assert {script.kind for script in scripts} == set(KINDS)


def test_heldout_prompts_are_never_trained_on(target: Checkpoint) -> None:
    train, heldout = (PromptSource(target.tokenizer, heldout=flag) for flag in (False, True))
    assert not set(train._texts) & set(heldout._texts)
    assert not set(train._functions) & set(heldout._functions)
    assert not set(train._lists["s"]) & set(heldout._lists["s"])


def test_data_does_not_depend_on_batches_or_interruptions(
    target: Checkpoint, data: Store, tmp_path: Path
) -> None:
    source = PromptSource(target.tokenizer, kinds=("magpie", "chat"), **SOURCE)
    store = Store(tmp_path, worker=1)
    for num_tokens in (700, 3000):  # stopped, and gone on with
        generator = Generator(target, places=3, max_rows=16, max_tokens=256)
        generate(generator, source, store, num_tokens=num_tokens, shard_tokens=400)
    mine = {record.index: record for record in records_of(store)}
    shared = [record for record in records_of(data) if record.index in mine]
    assert len(shared) > 10
    for record in shared:
        assert_equal(record, mine[record.index])


def test_workers_share_the_numbers_out(target: Checkpoint, tmp_path: Path) -> None:
    source = PromptSource(target.tokenizer, kinds=("chat",), **SOURCE)
    for worker in range(2):
        generator = Generator(target, places=4, max_tokens=256)
        generate(generator, source, Store(tmp_path, worker), num_tokens=300, worker=worker, num_workers=2)
    indices = [record.index for record in Store(tmp_path).read()]
    assert len(indices) == len(set(indices)) and {index % 2 for index in indices} == {0, 1}


def test_rows_are_what_the_target_computes(target: Checkpoint, data: Store) -> None:
    generator = Generator(target, places=1, max_rows=256, max_tokens=256)
    for record in records_of(data)[:5]:
        assert len(record.hidden) == len(record.tokens) - 1 == len(record.top_ids)
        from outrider.training.data import _Live, top_of
        from outrider.training.prompts import Script, Turn

        tokens = record.tokens[:-1].tolist()
        script = Script(0, "chat", (Turn(tuple(tokens)), Turn(None, ANSWER, 0.0, 1)), 0)
        live = _Live(script, 0)
        generator._next_turn(live)
        output = generator._executable.run(generator._batch([(live, len(tokens))]))
        np.testing.assert_array_equal(np.asarray(output.hidden).astype(np.float16), record.hidden)
        np.testing.assert_array_equal(top_of(output.logits)[0], record.top_ids)


def test_drawn_tokens_are_the_best_of_distribution_and_noise(data: Store) -> None:
    checked = 0
    for record in records_of(data):
        for slot in np.flatnonzero(record.roles[1:] != GIVEN).tolist():
            kept = record.top_ids[slot] >= 0
            ids, values = record.top_ids[slot][kept], record.top_logprobs[slot][kept].astype(np.float64)
            temperature = float(record.temperatures[slot + 1])
            if temperature > 0:
                noise = np.asarray(_native.gumbel_noise(record.seed, slot + 1, ids))
                values = values / temperature + noise
                if record.tokens[slot + 1] not in ids or np.diff(np.sort(values)[-2:])[0] < 0.05:
                    continue  # outside what is kept, or decided by the rounding of what is
            checked += 1
            assert ids[values.argmax()] == record.tokens[slot + 1]
    assert checked > 500


def tiny_head(target: Checkpoint, seed: int = 0, count: int = 200) -> MTPHead:
    torch.manual_seed(seed)
    embedding = torch.from_numpy(pipeline._matrix(target, "embed"))
    ids = torch.arange(0, count, dtype=torch.int32)
    return MTPHead(HeadConfig.of(target.config), embedding, embedding[:count].clone(), ids)


def step_by_step(head: MTPHead, tokens: Any, hidden: Any, start: int, count: int) -> list[Any]:
    """Inference as an engine does it: one slot after the other, keys kept, drafts on top."""
    config, cos_sin = head.config, lambda j: (torch.cos(j * head.inv_freq), torch.sin(j * head.inv_freq))
    keys: list[Any] = []
    values: list[Any] = []

    def feed(token: Any, previous: Any, slot: int) -> Any:
        def turned(x: Any, heads: int) -> Any:
            a, b = x.view(heads, -1).chunk(2, -1)
            cos, sin = cos_sin(slot)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        norm = torch.nn.functional.rms_norm
        width = (config.hidden_size,)
        pair = [(head.embedding[token], head.emb_norm), (previous, head.hidden_norm)]
        both = torch.cat([norm(x, width, w, config.rms_eps) for x, w in pair])
        x = torch.cat([head.embed_proj, head.hidden_proj], 1) @ both
        normed = norm(x, width, head.attn_norm, config.rms_eps)
        keys.append(turned(head.k @ normed, config.num_kv_heads))
        values.append((head.v @ normed).view(config.num_kv_heads, -1))
        q = turned(head.q @ normed, config.num_heads)
        groups = config.num_heads // config.num_kv_heads
        out = []
        for h in range(config.num_heads):
            k, v = (torch.stack([entry[h // groups] for entry in cache]) for cache in (keys, values))
            out.append(torch.softmax(k @ q[h] * config.head_dim**-0.5, 0) @ v)
        x = x + head.o @ torch.cat(out)
        normed = norm(x, width, head.mlp_norm, config.rms_eps)
        return x + head.down @ (torch.nn.functional.silu(head.gate @ normed) * (head.up @ normed))

    for slot in range(start + 1):
        state = feed(tokens[slot], hidden[slot - 1] if slot else torch.zeros_like(hidden[0]), slot)
    states = [state]
    for slot in range(start + 1, start + count):
        states.append(feed(tokens[slot], states[-1], slot))
    return states


@torch.no_grad()
def test_passes_equal_inference_step_by_step(target: Checkpoint) -> None:
    head = tiny_head(target)
    tokens = torch.randint(0, 256, (2, 14))
    hidden = torch.randn(2, 14, target.config.hidden_size)
    states = head.passes(tokens, hidden, 4)
    for row in range(2):
        for start in range(14 - 4):
            reference = step_by_step(head, tokens[row], hidden[row], start, 4)
            for k, expected in enumerate(reference):
                torch.testing.assert_close(states[k][row, start + k], expected, rtol=1e-4, atol=1e-4)


def test_slots_that_do_not_count_change_no_gradient(
    target: Checkpoint, data: Store, monkeypatch: Any
) -> None:
    head = tiny_head(target)
    slot_of = np.append(np.where(np.arange(256) < 200, np.arange(256), -1), -1).astype(np.int32)
    batch = make_batch(records_of(data)[:4], slot_of, np.array([0, 0.5, 1.0], np.float32), 256)
    found = []
    for use_all in (False, True):
        if use_all:
            monkeypatch.setattr(loss, "needed_slots", lambda batch, steps: None)
        head.zero_grad()
        total, _ = loss_of(head, batch, LossOptions())
        total.backward()
        found.append([parameter.grad.clone() for parameter in head.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def make_trainer(target: Checkpoint, data: Store, **options: Any) -> Trainer:
    corpus = Corpus(data)
    corpus.refresh()
    head = tiny_head(target)
    ids = head.token_ids.numpy()
    batches = Batches(corpus, ids, 256, batch_tokens=256, question_weight=0.5)
    return Trainer(head, batches, TrainOptions(**{"steps": 40, "warmup_steps": 3, **options}), LossOptions())


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_loss_falls(target: Checkpoint, data: Store, optimizer: str) -> None:
    trainer = make_trainer(target, data, optimizer=optimizer, learning_rate=0.01)
    losses = [sum(trainer.train_step()) for _ in range(40)]
    assert trainer.progress() == 1.0
    assert np.mean(losses[-8:]) < 0.93 * np.mean(losses[:4])


def test_going_on_equals_not_having_stopped(target: Checkpoint, data: Store, tmp_path: Path) -> None:
    whole, first = (make_trainer(target, data) for _ in range(2))
    for _ in range(12):
        whole.train_step()
    for _ in range(5):
        first.train_step()
    first.save(tmp_path / "checkpoint.pt")
    second = make_trainer(target, data)
    second.restore(tmp_path / "checkpoint.pt")
    for _ in range(7):
        second.train_step()
    for name, parameter in whole.head.named_parameters():
        assert torch.equal(parameter, dict(second.head.named_parameters())[name]), name
        assert torch.equal(whole._average[name], second._average[name]), name
    assert (whole.step, whole.tokens) == (second.step, second.tokens)


def test_every_document_is_used_before_one_is_used_twice(target: Checkpoint, data: Store) -> None:
    batches = make_trainer(target, data).batches
    rng = random.Random(0)
    used: list[int] = []
    while len(used) < len(batches.corpus.records):
        used += [number for batch in batches.plan(rng) for number in batch]
    assert set(used) == set(range(len(batches.corpus.records)))


def test_acceptance_counts_only_what_could_be_reached(target: Checkpoint, data: Store) -> None:
    records = records_of(data)[:12]
    result = measure(tiny_head(target, count=256), records, num_steps=3)
    answers = sum(int((record.roles[1:] == ANSWER).sum()) for record in records)
    assert result.drafted[0] == answers
    for k in range(1, 3):
        assert result.drafted[k] <= result.accepted[k - 1]
    assert result.tokens_per_step == 1 + sum(result.accepted) / answers


def test_a_perfect_head_is_always_accepted(target: Checkpoint, data: Store, monkeypatch: Any) -> None:
    """Shared noise: a head with the target's own distribution draws the target's tokens."""
    generator = Generator(target, places=1, max_rows=256, max_tokens=256)
    head = tiny_head(target, count=256)
    norm = torch.from_numpy(pipeline._matrix(target, "norm"))
    monkeypatch.setattr(head, "passes", lambda tokens, hidden, count: [hidden] * count)
    with torch.no_grad():
        head.norm.copy_(norm)
    result = measure(head, records_of(data)[:12], num_steps=1)
    assert result.conditional[0] > 0.98  # float16 decides a few
    del generator


def test_the_draft_vocabulary_is_what_the_target_expects(data: Store) -> None:
    ids = frequent_tokens(records_of(data), 20, 256, always=[255])
    assert len(ids) == 20 and 255 in ids and list(ids) == sorted(ids)


def test_rows_outside_the_draft_vocabulary_teach_nothing(target: Checkpoint, data: Store) -> None:
    head = tiny_head(target)
    none = np.full(257, -1, np.int32)
    batch = make_batch(records_of(data)[:4], none, np.array([0, 0.5, 1.0], np.float32), 256)
    loss, parts = loss_of(head, batch, LossOptions())
    assert float(loss.detach()) == 0 and parts == [0, 0, 0]


def test_a_head_on_disk_is_the_head(target: Checkpoint, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    head = tiny_head(target)
    tensors = {name: tensor.detach().numpy() for name, tensor in head.tensors().items()}
    tensors["draft_token_ids"] = head.token_ids.numpy()
    write_head(tmp_path, {"hidden_size": 64}, tensors)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert found["draft_token_ids"].dtype == torch.int32
    other = tiny_head(target, seed=1)
    other.load_tensors(found)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(dict(other.named_parameters())[name], parameter, rtol=1e-3, atol=1e-4)


def test_the_whole_command(target: Checkpoint, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(pipeline, "load_checkpoint", lambda name: replace(target))
    monkeypatch.setattr(pipeline, "_HELDOUT_ANSWER", 16)
    common = ["train-mtp", "--model", "tiny", "--out", str(tmp_path), "--tokens", "600", "--vocab", "128"]
    common += ["--heldout-tokens", "100", "--batch-tokens", "512", "--places", "4", "--no-progress"]
    assert cli.main([*common, "--steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert "held out" in shown and "chat 0.7" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["step"] == 4
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["OutriderMTP"] and config["rope_theta"] == 10000.0
    assert cli.main([*common, "--steps", "6", "--resume", "--only", "train"]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["step"] == 6
    assert cli.main([*common, "--only", "evaluate"]) == 0


def test_without_torch_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    for name in [name for name in sys.modules if name.startswith("outrider.training.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delattr("outrider.training.pipeline", raising=False)
    assert cli.main(["train-mtp", "--out", str(tmp_path / "head")]) == 1
    assert "pip install 'outrider[train]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "0"], "--tokens must be above 0"),
        (["--data-files", "/no/such"], "there is no file /no/such"),
        (["--sharpen", "0"], "--sharpen must be above 0"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, flags: list[str], message: str, capsys: Any) -> None:
    assert cli.main(["train-mtp", "--out", str(tmp_path / "head"), *flags]) == 2
    assert message in capsys.readouterr().err


def _train_in_rank(rank: int, folder: str, data: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    trainer = make_trainer(tiny_target(), Store(data), steps=4)
    trainer._rank, trainer._ranks = rank, 2
    for _ in range(4):
        trainer.train_step()
    torch.save([trainer.head.state_dict(), trainer.tokens], f"{folder}/rank{rank}.pt")


@pytest.mark.slow
def test_ranks_stay_equal(data: Store, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train_in_rank, (str(tmp_path), str(data.path)), nprocs=2)
    (one, tokens), (other, others) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert tokens == others > 0
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
