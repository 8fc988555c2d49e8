"""How the output of a request ends, and how its tokens become text.

One state machine takes the tokens singly, so nothing depends on how many a step brought. Stop strings
are looked for in bytes, across any cut into tokens; text is shown in whole characters only, and a
part that may yet turn out to begin a stop string is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from outrider.sampling.grammar import GrammarMatcher

if TYPE_CHECKING:
    from outrider.engine.scheduler import StepResult
    from outrider.engine.state import Request

_new_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class Vocabulary:
    """What the engine knows of the tokenizer."""

    token_bytes: list[bytes]  # the text of every id, in UTF-8 or a piece of it
    special_ids: frozenset[int] = field(default_factory=frozenset)
    eos_ids: frozenset[int] = field(default_factory=frozenset)

    def __len__(self) -> int:
        return len(self.token_bytes)


class OutputStream:
    """The text and the end of one request.

    Order of the rules at a token: stop ids and end of sequence (after `min_tokens` others), stop
    strings (completed by token `min_tokens` or later; the one that is complete first), the end of the
    grammar (where nothing can follow), length.
    """

    __slots__ = (
        "_decoder",
        "_params",
        "_stop_ids",
        "_stops",
        "_tail",
        "_text",
        "_vocabulary",
        "finish_reason",
        "grammar",
        "max_tokens",
        "num_tokens",
        "stop_reason",
    )

    def __init__(self, params: SamplingParams, max_tokens: int, vocabulary: Vocabulary) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.grammar: GrammarMatcher | None = None  # set before the first token
        self._params = params
        self._vocabulary = vocabulary
        self._stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= vocabulary.eos_ids
        self._stops = [(stop, stop.encode()) for stop in params.stop]
        self._tail = b""  # bytes that may begin a stop string
        self._decoder = _new_decoder(errors="replace")  # holds incomplete characters
        self._text = ""  # whole characters not taken yet

    @property
    def num_left(self) -> int:
        """How many more tokens it may get."""
        return self.max_tokens - self.num_tokens

    def append(self, token_id: int) -> bool:
        """Take one token; True when it ends the request."""
        self.num_tokens += 1
        if token_id in self._stop_ids and self.num_tokens > self._params.min_tokens:
            if token_id not in self._vocabulary.eos_ids or self._params.ignore_eos:
                self.stop_reason = token_id
            if self._params.include_stop_str_in_output:
                self._tail += self._bytes_of(token_id)
            self.close(FinishReason.STOP)
        elif self._stops:
            self._append_and_look_for_stops(self._bytes_of(token_id))
        else:
            self._text += self._decoder.decode(self._bytes_of(token_id))
        if self.grammar is not None and self.finish_reason is None and self.grammar.append(token_id):
            self.close(FinishReason.STOP)
        if self.finish_reason is None and self.num_tokens >= self.max_tokens:
            self.close(FinishReason.LENGTH)
        return self.finish_reason is not None

    def close(self, reason: FinishReason) -> None:
        """End the text: what was held back is shown, half a character as U+FFFD."""
        self.finish_reason = reason
        self._text += self._decoder.decode(self._tail, True)
        self._tail = b""

    def take_text(self) -> str:
        """The whole characters that came since the last call."""
        text = self._text
        self._text = ""
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        params = self._params
        is_hidden = params.skip_special_tokens and token_id not in params.shown_special_ids
        if is_hidden and token_id in self._vocabulary.special_ids:
            return b""
        return self._vocabulary.token_bytes[token_id]

    def _append_and_look_for_stops(self, piece: bytes) -> None:
        old_length = len(self._tail)
        tail = self._tail + piece
        if self.num_tokens >= self._params.min_tokens:
            match = self._first_match(tail, old_length)
            if match is not None:
                start, end, self.stop_reason = match
                self._tail = tail[: end if self._params.include_stop_str_in_output else start]
                self.close(FinishReason.STOP)
                return
        num_held = self._num_held_back(tail)
        self._text += self._decoder.decode(tail[: len(tail) - num_held])
        self._tail = tail[len(tail) - num_held :]

    def _first_match(self, tail: bytes, old_length: int) -> tuple[int, int, str] | None:
        """The stop string that is complete first, as if bytes came one by one; the longer one in a tie."""
        best: tuple[int, int, str] | None = None
        for text, stop in self._stops:
            start = tail.find(stop, max(0, old_length - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if best is None or (end, start) < (best[1], best[0]):
                    best = (start, end, text)
        return best

    def _num_held_back(self, tail: bytes) -> int:
        """Length of the longest end of `tail` that begins a stop string."""
        longest = 0
        for _, stop in self._stops:
            start = max(0, len(tail) - len(stop) + 1)
            while (start := tail.find(stop[:1], start)) >= 0:
                if stop.startswith(tail[start:]):
                    longest = max(longest, len(tail) - start)
                    break
                start += 1
        return longest


def step_output(result: StepResult, logprobs: Sequence[TokenLogprobs | None] | None) -> RequestOutput:
    """What one step adds to a request, for its reader. `logprobs` has an entry for each row of logits."""
    request, drafts, path = result.request, result.drafts, result.path
    num_tokens = len(result.token_ids)
    chosen: list[TokenLogprobs] | None = None
    if logprobs is not None and request.params.logprobs is not None:
        rows = [result.logits_row, *(result.logits_row + 1 + node for node in path)][:num_tokens]
        chosen = [entry for row in rows if (entry := logprobs[row]) is not None]
    output = RequestOutput(
        request_id=request.request_id,
        token_ids=result.token_ids,
        text=request.stream.take_text(),
        sources=[drafts.source[node] for node in path] + ["model"] * (num_tokens - len(path)),
        logprobs=chosen,
        prompt_logprobs=request.prompt_scores,
    )
    request.prompt_scores = None  # told once
    return _with_totals(output, request)


def final_output(request: Request) -> RequestOutput:
    """The end of a request that was ended from outside of its text."""
    return _with_totals(RequestOutput(request_id=request.request_id, token_ids=[], text=""), request)


def refusal(request: Request) -> RequestOutput:
    """The end of a request that the engine could not begin."""
    output = RequestOutput(request_id=request.request_id, token_ids=[], text="")
    output.finish_reason, output.error = FinishReason.ERROR, request.error
    return output


def _with_totals(output: RequestOutput, request: Request) -> RequestOutput:
    output.num_prompt_tokens = request.num_prompt_tokens
    output.num_cached_tokens = max(0, request.num_cached_tokens)
    output.num_output_tokens = request.num_output_tokens
    output.seed = request.seed
    if request.is_finished:
        output.text += request.stream.take_text()
        output.finish_reason = request.finish_reason
        output.stop_reason = request.stream.stop_reason
        output.error = request.error
        output.scheduled_time = request.scheduled_time
        output.speculation = request.draft_counts.to_stats(request.num_steps)
    return output
