"""The native kernels' number formats against float32 of the same file, on the built-in model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measure_quality import measure, quality_text
from outrider.models.loader import load_checkpoint

pytestmark = pytest.mark.model


# The whole text takes a minute on two quiet cores.
@pytest.mark.parametrize("num_tokens", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_the_native_path_keeps_the_quality_of_float32(builtin_model: Path, num_tokens: int) -> None:
    checkpoint = load_checkpoint(str(builtin_model))
    token_ids = checkpoint.tokenizer.encode(quality_text())[: num_tokens + 1]
    quality = measure(checkpoint, token_ids)
    assert quality.num_tokens == num_tokens
    assert quality.mean_kl <= 0.01
    assert abs(quality.perplexity_native / quality.perplexity_reference - 1) <= 0.01
    assert quality.perplexity_reference < 50  # the model does understand the text
