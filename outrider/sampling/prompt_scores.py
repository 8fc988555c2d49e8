"""Log-probabilities of tokens that were given, not drawn: those of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.request import TokenLogprobs


def score_tokens(
    logits: NDArray[np.float32], token_ids: Sequence[int], num_best: Sequence[int]
) -> list[TokenLogprobs]:
    """For each row of `logits` [rows, vocab] the score of the token that follows, and the best so many.

    As for drawn tokens: of the raw distribution; equal logits stand in the order of their ids. A row that
    is no distribution scores NaN.
    """
    scores: list[TokenLogprobs] = []
    for row, token_id, count in zip(logits, token_ids, num_best, strict=True):
        highest = float(row.max())
        total = float(np.log(np.exp(row - np.float32(highest), dtype=np.float64).sum())) + highest
        own = row[token_id]
        rank = 1 + int((row > own).sum()) + int((row[:token_id] == own).sum())
        count = min(count, len(row))
        best: list[int] = []
        if count:
            bound = np.partition(row, -count)[-count]
            best = sorted(np.flatnonzero(row >= bound).tolist(), key=lambda i: (-row[i], i))[:count]
        scores.append(TokenLogprobs(float(own) - total, rank, best, [float(row[i]) - total for i in best]))
    return scores
