"""What is asked and what is answered: the types that cross between the layers and processes.

This module imports nothing of Outrider; everything may import it. All wire types are msgspec
structs, so that no pickle ever crosses a process border.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class FinishReason(str, enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string, or the end of its grammar
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # cancelled
    ERROR = "error"  # the engine could not go on with it


class SpeculationParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Per-request override of speculation. It never changes the tokens."""

    method: str | None = None  # None: as configured; "off": none
    max_draft_tokens: int | None = None


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the text of an answer must look like. Made by the class methods."""

    kind: str  # json_schema, regex, choice, grammar or structural_tag
    text: str  # JSON, but for regex and grammar
    lenient: bool = False  # keywords of a schema that are not supported are ignored instead of refused

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool | str, *, lenient: bool = False) -> GrammarSpec:
        """JSON that satisfies `schema` (or its text)."""
        return cls("json_schema", schema if isinstance(schema, str) else _as_json(schema), lenient)

    @classmethod
    def json_object(cls) -> GrammarSpec:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text that `pattern` matches from its beginning to its end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> GrammarSpec:
        """One of these texts."""
        return cls("choice", _as_json(list(choices)))

    @classmethod
    def grammar(cls, text: str) -> GrammarSpec:
        """Text of a context-free grammar, in Lark's or GBNF's notation."""
        return cls("grammar", text)

    @classmethod
    def structural_tag(cls, structures: Sequence[Mapping[str, Any]], triggers: Sequence[str]) -> GrammarSpec:
        """Free text, in which each of `triggers` begins one of `structures`: its `begin` (which starts with
        the trigger), JSON that satisfies its `schema`, its `end`."""
        return cls("structural_tag", _as_json({"structures": list(structures), "triggers": list(triggers)}))


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn. Greedy is temperature 0.

    Out-of-range values are refused by `validate`, with the field's name, what came and what is allowed.
    """

    max_tokens: int | None = None  # None: up to the context limit
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    bad_words: list[list[int]] = []  # token-id sequences that must not be completed
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: list[int] = []  # special tokens that are shown although others are skipped
    seed: int | None = None  # None: drawn at admission and reported
    prompt_logprobs: int | None = None  # the same of the prompt, which is then not taken from the cache
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best, of the raw logits
    speculation: SpeculationParams | None = None
    grammar: GrammarSpec | None = None  # what the text must look like
    prediction_token_ids: list[int] = []  # what the output is expected to be; drafts, never more


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """A request on its way to the engine. One sequence: n > 1 is n of these."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float  # seconds, time.monotonic() of the sender (same machine)
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # prefix-cache and draft-memory namespace


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]  # empty: all


class GetStats(msgspec.Struct, frozen=True, tag="stats"):
    call_id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    drain: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural) of the model's raw distribution at one emitted position."""

    logprob: float
    rank: int  # 1 is the most likely
    top_token_ids: list[int]
    top_logprobs: list[float]


class SpeculationStats(msgspec.Struct):
    """What speculation did for one request."""

    steps: int = 0  # forward passes that emitted tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    by_source: dict[str, list[int]] = {}  # source -> [drafted, accepted]
    per_position: list[list[int]] = []  # position in the draft -> [drafted, accepted]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per step: 1 + accepted / steps."""
        return 1 + self.accepted_tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


class RequestOutput(msgspec.Struct, tag="output"):
    """An increment of one request: what one step added."""

    request_id: str
    token_ids: list[int]
    text: str  # whole characters only; stop strings already cut
    sources: list[str] = []  # per token: "model", or the draft source that carried it
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or string that ended it
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # so far
    seed: int = 0
    scheduled_time: float = 0.0  # when its first step began (time.monotonic); on the last increment
    speculation: SpeculationStats | None = None  # on the last increment
    prompt_logprobs: list[TokenLogprobs] | None = None  # on the first increment, if asked for


class StatsReply(msgspec.Struct, tag="stats_reply"):
    call_id: int
    stats: dict[str, Any]


class StepOutputs(msgspec.Struct, tag="step"):
    """All increments of one engine step."""

    outputs: list[RequestOutput]


ToEngine = AddRequest | AbortRequests | GetStats | Shutdown
FromEngine = StepOutputs | StatsReply
