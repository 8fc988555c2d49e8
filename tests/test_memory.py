"""The memory plan: what fits is used, what does not is refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config_fields import ConfigError
from outrider.engine.machine import available_memory, physical_cores
from outrider.engine.memory import MOST_AUTO_CACHE_BYTES, MemoryPlan, plan_memory

GIB = 1 << 30


def plan(**changes: Any) -> MemoryPlan:
    values: dict[str, Any] = {
        "available": 8 * GIB, "utilization": 0.5, "weights": GIB, "activations": GIB // 4, "logits": GIB // 4,
        "bytes_per_block": 1 << 20, "block_size": 32, "max_num_seqs": 8, "model_context": 4096,
        "max_model_len": None, "num_kv_blocks": None,
    }  # fmt: skip
    return plan_memory(**(values | changes))


def test_every_request_gets_its_whole_context_when_that_fits() -> None:
    assert plan().num_blocks == 8 * 4096 // 32
    assert plan().max_model_len == 4096


def test_otherwise_the_cache_takes_what_is_left() -> None:
    tight = plan(max_num_seqs=64)
    assert tight.num_blocks == (4 * GIB - GIB - GIB // 2) >> 20
    assert tight.cache + tight.weights + tight.activations + tight.logits <= tight.usable


def test_the_automatic_cache_is_bounded_but_always_holds_one_context() -> None:
    assert plan(available=1000 * GIB, max_num_seqs=1024).cache == MOST_AUTO_CACHE_BYTES
    assert plan(available=1000 * GIB, model_context=1 << 20).num_blocks == (1 << 20) // 32


def test_the_context_is_bounded_by_memory_unless_it_was_asked_for() -> None:
    small = {"available": 4 * GIB, "model_context": 1 << 20}
    assert plan(**small).max_model_len == plan(**small).num_blocks * 32 < 1 << 20
    with pytest.raises(ConfigError, match="a context of 1000000 tokens needs 31250 cache blocks"):
        plan(**small, max_model_len=1_000_000)


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="without its cache, but only 512 of 1024 MiB may be used"):
        plan(available=GIB)
    with pytest.raises(ConfigError, match="5000 cache blocks need 5000 MiB, but only 2560 MiB are left"):
        plan(num_kv_blocks=5000)
    with pytest.raises(ConfigError, match="at most the model's context of 4096"):
        plan(max_model_len=5000)


def test_a_fixed_number_of_blocks_is_taken_as_it_is() -> None:
    assert plan(num_kv_blocks=10).num_blocks == 10
    assert plan(num_kv_blocks=10).max_model_len == 320


def test_the_plan_names_every_part() -> None:
    text = plan().describe()
    for part in ("weights 1024", "activations 256", "logits 256", "1024 blocks of 32 tokens", "context 4096"):
        assert part in text


def test_the_machine_has_memory_and_cores() -> None:
    assert available_memory() > 1 << 20
    assert physical_cores() >= 1
