"""The middle of a text, for models that were trained to fill it in."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.entrypoints.errors import bad_request
from outrider.entrypoints.protocol import CompletionRequest

# Before the prompt, before the suffix, before the middle: Qwen and CodeGemma, StarCoder, DeepSeek.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
InfillMarks = tuple[str, str, str]


def infill_marks(token_bytes: Sequence[bytes]) -> InfillMarks | None:
    """The marks that a vocabulary has as tokens; None: the model cannot fill in."""
    known = {piece for piece in token_bytes if b"fim" in piece}
    return next((marks for marks in _MARKS if all(mark.encode() in known for mark in marks)), None)


def infilled(request: CompletionRequest, marks: InfillMarks | None) -> CompletionRequest:
    """The request with its suffix made part of the prompt; a 400 where that cannot be."""
    if not request.suffix:
        return request
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if marks is None:
        raise bad_request(
            "suffix is not supported by this model: its vocabulary has no marks for filling in", "suffix",
            "unsupported_field",
        )  # fmt: skip
    if request.echo:
        raise bad_request("suffix and echo exclude each other", "suffix")
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise bad_request("suffix needs a prompt that is text", "suffix")
    before, between, after = marks
    texts = [f"{before}{prompt}{between}{request.suffix}{after}" for prompt in prompts]
    return request.model_copy(update={"prompt": texts})
