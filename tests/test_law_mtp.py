"""The law on the real model with a draft head: the package's own, or one cut from the model's last layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_heads import head_like_last_layer, save_head
from test_law_model import Reference, answers, check_variant, events, reference

from outrider.llm import LLM
from outrider.models.loader import load_checkpoint
from outrider.models.mtp_loader import find_head

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def sample(builtin_model: Path) -> Iterator[Reference]:
    yield reference(num_prompts=5, max_tokens=24)


@pytest.fixture(scope="module")
def mtp(builtin_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The options of a drafter that always drafts three tokens."""
    options: dict[str, Any] = {"method": "mtp", "adaptive": False, "num_speculative_tokens": 3}
    checkpoint = load_checkpoint()
    own = find_head(checkpoint.config, checkpoint.path)
    if own is None:
        folder = tmp_path_factory.mktemp("head")
        tensors = head_like_last_layer(checkpoint.tensors, checkpoint.config.num_layers)
        options["model"] = str(save_head(folder, tensors, np.arange(8192), num_model_steps=3))
    return options


POOLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a batch of 8": ({"max_num_seqs": 8}, ("rejected",)),
    "one at a time, one thread": ({"max_num_seqs": 1, "num_threads": 1}, ("rejected",)),
    "chunks of 16": ({"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 16}, ("rejected",)),
    "preemptions": (
        {"num_kv_blocks": 16, "block_size": 16, "max_model_len": 256},
        ("preemptions", "rejected"),
    ),
}


@pytest.mark.parametrize("pool", POOLS)
def test_the_same_tokens(sample: Reference, mtp: dict[str, Any], pool: str) -> None:
    options, must_happen = POOLS[pool]
    check_variant(sample, options | {"speculative_config": mtp}, must_happen)


DRAFTERS: dict[str, dict[str, Any]] = {
    "the controller decides": {"adaptive": True, "num_speculative_tokens": None},
    "with_ngram": {"mtp_strategy": "with_ngram", "num_model_steps": 2, "num_speculative_tokens": 8},
    "wint4, eight steps": {"quantization": "wint4", "num_model_steps": 8, "num_speculative_tokens": 8},
    "the other hidden states": {"hidden_source": "post_norm"},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_same_tokens_from_any_drafter(sample: Reference, mtp: dict[str, Any], drafter: str) -> None:
    check_variant(sample, {"max_num_seqs": 8, "speculative_config": mtp | DRAFTERS[drafter]}, ())


def test_wrong_hidden_states_change_nothing_but_acceptance(sample: Reference, mtp: dict[str, Any]) -> None:
    accepted = []
    for is_wrong in (False, True):
        with LLM(speculative_config=mtp, num_threads=2, max_model_len=1024, max_num_seqs=8) as llm:
            runner = llm.engine.runner
            head = runner.draft_head
            assert head is not None
            if is_wrong:
                runner.draft_head = None  # from now on nothing is kept: the head reads what memory held
                zeros = np.zeros((llm.engine.scheduler.capacity, 576), np.float32)
                head.keep(zeros, np.arange(len(zeros), dtype=np.int32))
            given = llm.chat(sample.work.prompts, sample.work.params)
            assert answers(given) == answers(sample.completions)
            accepted.append(events(llm)["accepted"])
    assert (
        accepted[1] < accepted[0] or accepted[0] < 10
    )  # a head that was never trained is as bad with either
