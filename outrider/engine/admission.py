"""Which requests the engine takes: everything a request can get wrong is refused here, in one sentence."""

from __future__ import annotations

import math

from outrider.request import AddRequest, SamplingParams

_MAX_SEED = 2**64 - 1
_MAX_COUNT = 2**31 - 1  # the native sampler counts in 32 bits


def check_request(request: AddRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError unless the engine can serve `request` to its end."""
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise ValueError("the prompt is empty; it needs at least one token")
    if num_tokens >= max_model_len:
        raise ValueError(
            f"the prompt has {num_tokens} tokens, but at most {max_model_len - 1} leave room for an answer "
            f"in the context of {max_model_len}; shorten it or raise --max-model-len"
        )
    low, high = min(request.prompt_token_ids), max(request.prompt_token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"prompt token ids must be in 0..{vocab_size - 1}, got {wrong}")
    check_params(request.params, vocab_size)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError that names the field, what came and what is allowed."""
    _in_range("temperature", params.temperature, 0, math.inf)
    _in_range("top_p", params.top_p, 0, 1)
    if params.top_p == 0:
        raise ValueError("top_p must be above 0, got 0; use temperature 0 for greedy decoding")
    _in_range("min_p", params.min_p, 0, 1)
    _in_range("top_k", params.top_k, 0, _MAX_COUNT)
    _in_range("presence_penalty", params.presence_penalty, -2, 2)
    _in_range("frequency_penalty", params.frequency_penalty, -2, 2)
    _in_range("repetition_penalty", params.repetition_penalty, 0, math.inf)
    if params.repetition_penalty == 0:
        raise ValueError("repetition_penalty must be above 0, got 0; 1 switches it off")
    if params.max_tokens is not None:
        _in_range("max_tokens", params.max_tokens, 1, math.inf)
    _in_range("min_tokens", params.min_tokens, 0, _MAX_COUNT)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(
            f"min_tokens must be at most max_tokens ({params.max_tokens}), got {params.min_tokens}"
        )
    if params.seed is not None:
        _in_range("seed", params.seed, 0, _MAX_SEED)
    if params.logprobs is not None:
        _in_range("logprobs", params.logprobs, 0, vocab_size)
    if params.prompt_logprobs is not None:
        _in_range("prompt_logprobs", params.prompt_logprobs, 0, vocab_size)
    if any(not stop for stop in params.stop):
        raise ValueError("stop strings must not be empty")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for value in params.logit_bias.values():
        _in_range("logit_bias", value, -100, 100)
    for word in params.bad_words:
        if not word:
            raise ValueError("bad_words must not hold an empty sequence")
        _check_ids("bad_words", word, vocab_size)
    _check_ids("prediction_token_ids", params.prediction_token_ids, vocab_size)
    if params.speculation is not None and params.speculation.max_draft_tokens is not None:
        _in_range("speculation.max_draft_tokens", params.speculation.max_draft_tokens, 0, math.inf)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or value == math.inf:  # a NaN compares false
        allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{name} must be {allowed}, got {value}")


def _check_ids(name: str, ids: list[int] | dict[int, float], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} must hold token ids in 0..{vocab_size - 1}, got {token_id}")
