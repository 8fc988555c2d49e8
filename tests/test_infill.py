"""`suffix`: part of the prompt where the vocabulary has marks for it, else refused."""

from __future__ import annotations

import pytest

from outrider.entrypoints.errors import ApiError
from outrider.entrypoints.infill import infill_marks, infilled
from outrider.entrypoints.protocol import CompletionRequest

QWEN = [b"a", b"<|fim_prefix|>", b"<|fim_suffix|>", b"<|fim_middle|>"]


def test_the_marks_of_the_vocabulary_frame_prompt_and_suffix() -> None:
    request = CompletionRequest(prompt=["def f(", "x"], suffix="return x")
    assert infilled(request, infill_marks(QWEN)).prompt == [
        "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>",
        "<|fim_prefix|>x<|fim_suffix|>return x<|fim_middle|>",
    ]
    deepseek = ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]
    assert infill_marks([mark.encode() for mark in deepseek]) == tuple(deepseek)
    plain = CompletionRequest(prompt="x", suffix="")
    assert infilled(plain, None) is plain


@pytest.mark.parametrize(
    ("vocabulary", "fields", "reason"),
    [(QWEN[:3], {"prompt": "a"}, "no marks"), (QWEN, {"prompt": [1, 2]}, "text"), (QWEN, {}, "text"),
     (QWEN, {"prompt": "a", "echo": True}, "echo")],
)  # fmt: skip
def test_a_suffix_that_cannot_be_is_refused(vocabulary: list[bytes], fields: dict, reason: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ApiError, match=reason) as caught:
        infilled(CompletionRequest(suffix="b", **fields), infill_marks(vocabulary))
    assert caught.value.param == "suffix"
