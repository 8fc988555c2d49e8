"""The native backend: threads, memory, what it refuses, and processes that fork or end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import outrider._native as _native
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_models import (
    BLOCK_SIZE,
    CONFIGS,
    NUM_BLOCKS,
    TRAFFIC,
    StepArrays,
    compile_model,
    outputs,
    random_tensors,
    step,
)

from outrider.backends import make_backend
from outrider.backends.memory import assign_storage
from outrider.backends.native import NativeBackend
from outrider.backends.recording import Graph, RecordingOps
from outrider.models.llama import build
from outrider.models.registry import weight_plan
from outrider.models.tensors import RawTensor


@pytest.mark.parametrize("quantization", [None, "wint8", "wint4"])
def test_results_do_not_depend_on_threads(quantization: str | None) -> None:
    executable = compile_model(CONFIGS["llama"], quantization=quantization)
    before = _native.num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 2, 3, 1, 2):
            _native.set_num_threads(threads)
            results.append(outputs(executable))
    finally:
        _native.set_num_threads(before)
    assert all(result == results[0] for result in results)


@given(cuts=st.lists(st.integers(1, 40), max_size=6), table=st.permutations(range(8)))
@settings(max_examples=20)
def test_a_row_does_not_depend_on_how_its_context_was_computed(cuts: list[int], table: list[int]) -> None:
    executable, ids = SHARED["executable"], [(7 * i) % 50 for i in range(41)]
    bounds = sorted({0, 41, *cuts})
    logits = np.concatenate([
        executable.run(step((ids[a:b], list(table), a))).logits.copy() for a, b in pairwise(bounds)
    ])  # fmt: skip
    assert logits.tobytes() == SHARED["expected"]


@pytest.fixture(scope="module", autouse=True)
def _shared() -> None:
    SHARED["executable"] = executable = compile_model(CONFIGS["llama"], quantization="wint4")
    whole = step(([(7 * i) % 50 for i in range(41)], [0, 1, 2], 0))
    SHARED["expected"] = executable.run(whole).logits.tobytes()


SHARED: dict[str, Any] = {}


@pytest.mark.parametrize("fusion", [False, True])
def test_hidden_states_of_all_rows_come_before_or_after_the_final_norm(fusion: bool) -> None:
    config = CONFIGS["llama"]
    plain = outputs(compile_model(config))
    norm = random_tensors(config)["norm"].to_float32()
    runs = {}
    for hidden in ("pre_norm", "post_norm"):
        executable = compile_model(config, hidden=hidden, fusion=fusion)
        assert outputs(executable) == plain
        runs[hidden] = [executable.run(batch).hidden.copy() for batch in TRAFFIC]
        assert [len(rows) for rows in runs[hidden]] == [len(batch.token_ids) for batch in TRAFFIC]
    for before, after in zip(runs["pre_norm"], runs["post_norm"], strict=True):
        x = before.astype(np.float64)
        expected = x / np.sqrt((x**2).mean(1, keepdims=True) + config.rms_eps) * norm
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)


def test_live_values_never_share_memory() -> None:
    config = CONFIGS["qk_norm, gelu, window"]
    backend = NativeBackend()
    tensors = random_tensors(config)
    weights = {h: backend.weight([tensors[n] for n in ns], None) for h, ns in weight_plan(config).items()}
    ops = RecordingOps(lambda weight: weight.shape)
    graph = Graph([], [build(ops, config, weights)])
    graph.nodes = ops.nodes
    storage = assign_storage(graph, 8, 4)
    last = {view.value: i for i, node in enumerate(graph.nodes) for view in node.inputs}
    last.update({view.value: len(graph.nodes) for view in graph.outputs})
    for i, node in enumerate(graph.nodes):
        assert storage.sizes[storage.places[node.out]] >= node.out.width * (4 if node.out.gathered else 8)
        for earlier in graph.nodes[:i]:
            if last[earlier.out] >= i:
                assert storage.places[earlier.out] != storage.places[node.out]
    assert len(storage.sizes) < 8  # 33 values


def corrupted(**changes: Any) -> StepArrays:
    batch = step(([1, 2, 3], [3, 1], 0), ([4], [5], 2))
    batch.parents = np.array([-1, 0, 1, -1], np.int32)
    for name, (index, value) in changes.items():
        array = getattr(batch, name).copy()
        array[index] = value
        setattr(batch, name, array)
    return batch


BAD_BATCHES = {
    "token_ids": corrupted(token_ids=(1, 50)),
    "token_ids negative": corrupted(token_ids=(0, -1)),
    "positions": corrupted(positions=(1, -1)),
    "positions past": corrupted(positions=(3, 3)),
    "slot_mapping": corrupted(slot_mapping=(2, NUM_BLOCKS * BLOCK_SIZE)),
    "slot_mapping negative": corrupted(slot_mapping=(2, -1)),
    "seq_lens": corrupted(seq_lens=(0, 1000)),
    "seq_lens negative": corrupted(seq_lens=(1, -5)),
    "block_tables": corrupted(block_tables=((0, 0), NUM_BLOCKS)),
    "block_tables negative": corrupted(block_tables=((1, 0), -1)),
    "query_start_loc": corrupted(query_start_loc=(1, 5)),
    "query_start_loc end": corrupted(query_start_loc=(2, 3)),
    "query_start_loc start": corrupted(query_start_loc=(0, 1)),
    "logits_indices": corrupted(logits_indices=(0, 4)),
    "parents past": corrupted(parents=(1, 1)),
    "parents of another request": corrupted(parents=(3, 2)),
    "parents of another position": corrupted(parents=(2, 0)),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_batch_out_of_range_is_refused_and_changes_nothing(name: str) -> None:
    executable = compile_model(CONFIGS["llama"])
    good = corrupted()
    expected = executable.run(good).logits.tobytes()
    with pytest.raises(ValueError, match=name.split()[0]):
        executable.run(BAD_BATCHES[name])
    assert executable.run(good).logits.tobytes() == expected


def test_sizes_and_types_of_arrays_are_checked() -> None:
    executable = compile_model(CONFIGS["llama"])
    good = corrupted()
    with pytest.raises(ValueError, match=r"65 tokens.*1 to 64"):
        executable.run(step(([1] * 65, list(range(5)), 0), logits=[0]))
    with pytest.raises(ValueError, match="positions has 3 entries, expected 4"):
        executable.run(replace(good, positions=good.positions[:3]))
    with pytest.raises(ValueError, match="parents has 3 entries, expected 4"):
        executable.run(replace(good, parents=good.parents[:3]))
    with pytest.raises(ValueError, match="block_tables has 1 entries, expected 2"):
        executable.run(replace(good, block_tables=good.block_tables[:1]))
    with pytest.raises(TypeError):
        executable.run(replace(good, token_ids=good.token_ids.astype(np.int64)))
    with pytest.raises(TypeError):
        executable.run(replace(good, token_ids=np.repeat(good.token_ids, 2)[::2]))
    with pytest.raises(ValueError, match=r"positions\[0\]"):
        compile_model(CONFIGS["llama"], max_model_len=20).run(step(([1], [0, 1], 20)))


def test_a_step_without_logits_still_fills_the_cache() -> None:
    executable = compile_model(CONFIGS["llama"])
    whole = executable.run(step(([5, 6, 7, 8], [2], 0), logits=[3])).logits.tobytes()
    assert executable.run(step(([5, 6, 7], [4], 0), logits=[])).logits.shape == (0, 50)
    assert executable.run(step(([8], [4], 3))).logits.tobytes() == whole


def test_results_are_views_that_outlive_their_executable() -> None:
    executable = compile_model(CONFIGS["llama"])
    logits = executable.run(TRAFFIC[0]).logits
    expected = logits.copy()
    del executable
    assert logits.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_in_floats_agrees_with_float64(name: str) -> None:
    from outrider.backends.torch_backend import TorchBackend  # slow to import, and not for the scripts below

    native = compile_model(CONFIGS[name], kv_cache_dtype="f32")
    oracle = compile_model(CONFIGS[name], kv_cache_dtype="f32", backend=TorchBackend(dtype="float64"))
    for batch in TRAFFIC:
        expected = oracle.run_exact(batch)
        error = native.run(batch).logits - expected
        assert (error**2).sum() <= 1e-10 * (expected**2).sum()


def run_script(script: str) -> str:
    """The output of a Python process that has this module at hand; its threads are its own."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + dedent(script)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_forked_child_has_threads_of_its_own() -> None:
    script = """
        import hashlib, os
        from native_models import CONFIGS, compile_model, outputs
        executable = compile_model(CONFIGS["llama"])
        outputs(executable)
        child = os.fork()
        print(hashlib.sha256(b"".join(outputs(executable))).hexdigest(), flush=True)
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    """
    first, second = run_script(script).split()
    assert first == second


def test_a_process_may_end_while_a_thread_runs_a_step() -> None:
    script = """
        import threading
        from native_models import CONFIGS, TRAFFIC, compile_model, outputs
        executable = compile_model(CONFIGS["llama"])
        started = threading.Event()
        def forever():
            while True:
                outputs(executable)
                started.set()
        threading.Thread(target=forever, daemon=True).start()
        started.wait()
        print("over")
    """
    assert run_script(script) == "over\n"


def test_options_are_named_when_they_are_wrong() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of native, torch, got 'cuda'"):
        make_backend("cuda")
    with pytest.raises(ValueError, match=r"quantization must be one of wint4, wint8, got 'int3'"):
        NativeBackend().weight([], "int3")
    with pytest.raises(ValueError, match=r"hidden must be pre_norm or post_norm, got 'all'"):
        compile_model(CONFIGS["llama"], hidden="all")
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of f16, bf16, f32, got 'int8'"):
        compile_model(CONFIGS["llama"], kv_cache_dtype="int8")
    with pytest.raises(ValueError, match=r"num_threads must be between 1 and 256, got 0"):
        _native.set_num_threads(0)


def test_wint4_keeps_embeddings_in_8_bits_and_leaves_quantised_tensors_alone() -> None:
    config = CONFIGS["llama"]
    tensors = random_tensors(config)
    backend = NativeBackend()
    kinds = {
        name: backend.weight([tensors[name]], "wint4").pack()[0].kind
        for name in ("embed", "head", "layers.0.q")
    }
    assert kinds == {"embed": "int8", "head": "int8", "layers.0.q": "int4"}
    q8 = RawTensor("layers.0.q", (2, 32), "q8_0", np.zeros(2 * 34, np.uint8), "made up")
    assert backend.weight([q8], "wint4").pack()[0].kind == "int8"
