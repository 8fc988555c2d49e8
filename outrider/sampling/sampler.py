"""From rows of logits to one token each, natively.

The noise of a token is a pure function of (request seed, absolute position, token id), and a row is
evaluated as if the drafted tokens before it had been emitted. So what a row draws depends on nothing
else: not on other rows, threads, or whether its prefix was drafted or final.

In this order: repetition penalty (prompt and output), frequency and presence penalty (output), logit bias,
the min_tokens mask, bad words (across prompt, output and drafts), the grammar's mask, temperature, top-k,
top-p, min-p, and the argmax of what is left plus noise. Equal values go to the lower token id, everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import outrider._native as _native
from outrider.request import SamplingParams, TokenLogprobs


class SamplingRows(Protocol):
    """What is to be drawn: row r belongs to `states[row_state[r]]`.

    Its token will stand at absolute position `positions[r]`, after the drafted tokens
    `prefix_ids[prefix_start[r]:prefix_start[r + 1]]`, and must be one of those whose bit is set in
    `masks[row_mask[r]]` (-1, or no masks at all: any).
    """

    @property
    def states(self) -> list[Any]: ...
    @property
    def row_state(self) -> NDArray[np.int32]: ...
    @property
    def positions(self) -> NDArray[np.int64]: ...
    @property
    def prefix_start(self) -> NDArray[np.int32]: ...
    @property
    def prefix_ids(self) -> NDArray[np.int32]: ...
    @property
    def masks(self) -> NDArray[np.uint32] | None: ...
    @property
    def row_mask(self) -> NDArray[np.int32] | None: ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry for each row of logits.

    A token is -1 where the row holds no distribution: a NaN, +inf, or every token masked.
    `logprobs` is None when no request asked; else None at the rows of requests that did not, and where the
    raw row holds no distribution.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


class Sampler:
    """Draws tokens. It keeps nothing: what a request needs is in its state."""

    def make_state(
        self, params: SamplingParams, prompt_ids: Sequence[int], eos_ids: Sequence[int], seed: int
    ) -> _native.SamplerState:
        """The state of one request; its owner calls `append` on it with each emitted token.

        Until `min_tokens` tokens are out, the tokens that would end the request are masked: `stop_token_ids`,
        and `eos_ids` unless `ignore_eos`. `seed` is taken modulo 2**64.
        """
        ending = list(params.stop_token_ids) if params.ignore_eos else [*params.stop_token_ids, *eos_ids]
        return _native.SamplerState(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias_ids=list(params.logit_bias),
            logit_bias_values=list(params.logit_bias.values()),
            min_tokens=params.min_tokens,
            masked_until_min_tokens=ending if params.min_tokens > 0 else [],
            bad_words=params.bad_words,
            seed=seed % 2**64,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_token_ids=list(prompt_ids),
        )

    def sample(self, logits: NDArray[np.float32], sampling: SamplingRows) -> Sampled:
        """A token for every row of `logits` [rows, vocab], which are only read."""
        token_ids, arrays = _native.sample(
            logits,
            sampling.states,
            sampling.row_state,
            sampling.positions,
            sampling.prefix_start,
            sampling.prefix_ids,
            sampling.masks,
            sampling.row_mask,
        )
        tokens: list[int] = token_ids.tolist()
        return Sampled(tokens, None if arrays is None else _row_logprobs(tokens, sampling, arrays))


def _row_logprobs(
    tokens: list[int], sampling: SamplingRows, arrays: tuple[NDArray[Any], ...]
) -> list[TokenLogprobs | None]:
    chosen, ranks, starts, top_ids, top_logprobs = (array.tolist() for array in arrays)
    asked = [state.num_logprobs >= 0 for state in sampling.states]
    rows: list[TokenLogprobs | None] = []
    for r, (token, state) in enumerate(zip(tokens, sampling.row_state.tolist(), strict=True)):
        top = slice(starts[r], starts[r + 1])
        # No rank: a mask hid what kept the raw row from being a distribution.
        if token >= 0 and asked[state] and ranks[r] > 0:
            rows.append(TokenLogprobs(chosen[r], ranks[r], top_ids[top], top_logprobs[top]))
        else:
            rows.append(None)
    return rows
