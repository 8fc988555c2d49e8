"""The one mutable record of a request inside the engine.

Only the engine's thread touches it. The scheduler moves its progress, the cache manager its blocks;
its tokens change through one method, `append`, which takes them singly and ends at the first stop,
whatever made the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.engine.draft_counts import DraftCounts
from outrider.request import FinishReason, SamplingParams, TokenLogprobs
from outrider.spec_decode.proposer import NO_DRAFTS

if TYPE_CHECKING:
    from outrider.engine.output import OutputStream
    from outrider.sampling.grammar import GrammarMatcher

NOT_A_NUMBER = "the model's logits are not numbers here; the request cannot go on"
NOTHING_ALLOWED = (
    "no token is allowed here: the grammar and other bounds of the request (bad_words, min_tokens, "
    "ignore_eos) leave none, or the model's logits are not numbers"
)
_NO_SCORE = TokenLogprobs(0.0, 0, [], [])


class Request:
    """A request from admission to its last token.

    `token_ids` is the prompt followed by the output and holds final tokens only; drafts are kept apart
    in `drafts` until a step has verified them. `num_computed_tokens` counts the tokens whose keys and
    values are in the cache; for a request that is generating it is `num_tokens - 1` between steps.
    """

    __slots__ = (
        "arrival_time",
        "block_digests",
        "block_table",
        "cache_salt",
        "draft_counts",
        "drafts",
        "error",
        "finish_reason",
        "first_token_time",
        "last_token_time",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_steps",
        "params",
        "priority",
        "prompt_scores",
        "rank",
        "request_id",
        "sampling_state",
        "scheduled_time",
        "seed",
        "stream",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stream: OutputStream,
        sampling_state: Any,
        *,
        seed: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        arrival_time: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.stream = stream
        self.sampling_state = sampling_state
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival_time = arrival_time
        self.scheduled_time = 0.0
        self.first_token_time = 0.0
        self.last_token_time = 0.0

        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.drafts = NO_DRAFTS
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1  # -1 until it is admitted for the first time
        self.rank = (0, 0)  # its place in the scheduler's order, set there

        self.block_table = array("i")
        self.block_digests: list[bytes] = []
        self.num_published_blocks = 0

        # Log-probabilities of the prompt's tokens but the first; None: not asked for, or told already.
        self.prompt_scores: list[TokenLogprobs] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_scores = [_NO_SCORE] * (self.num_prompt_tokens - 1)

        self.num_steps = 0  # that emitted tokens
        self.draft_counts = DraftCounts()
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def grammar(self) -> GrammarMatcher | None:
        return self.stream.grammar

    @property
    def is_scored(self) -> bool:
        """Whether the logits of its next tokens are needed, because they belong to the prompt."""
        return self.prompt_scores is not None and self.num_computed_tokens < len(self.prompt_scores)

    @property
    def is_caught_up(self) -> bool:
        """Whether only its last token (and drafts) are left to compute."""
        return self.num_computed_tokens == len(self.token_ids) - 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_ids: Sequence[int]) -> list[int]:
        """Take sampled tokens one by one; returns those kept, up to the one that ended the request.

        A negative id is the sampler's word for logits that are not numbers, or none of which is allowed: it
        ends the request with an error, after the tokens before it.
        """
        kept: list[int] = []
        for token_id in token_ids:
            if token_id < 0:
                grammar = self.stream.grammar
                reason = NOT_A_NUMBER if grammar is None else grammar.error or NOTHING_ALLOWED
                self.finish(FinishReason.ERROR, reason)
                break
            kept.append(token_id)
            if self.stream.append(token_id):
                self.finish_reason = self.stream.finish_reason
                break
        self.token_ids += kept
        self.sampling_state.append(kept)
        return kept

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End it from outside of its text: cancelled, or impossible to go on with."""
        self.finish_reason = reason
        self.error = error
        self.stream.close(reason)
