"""From a wire request to what the engine takes: token ids and sampling parameters.

Everything that can be wrong with a request that parsed is found here, before any of it reaches the
engine, so a bad request never costs another request anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from outrider.entrypoints.answer_parts import offered_tools, parsing_for
from outrider.entrypoints.conversation import check_tools, render, template_has_tools, template_text
from outrider.entrypoints.errors import ApiError, bad_request
from outrider.entrypoints.infill import infill_marks, infilled
from outrider.entrypoints.parsers.choose import choose_formats
from outrider.entrypoints.parsers.message import Parsing
from outrider.entrypoints.protocol import (
    MAX_STOP_STRINGS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Speculation,
    TokenizeRequest,
)
from outrider.entrypoints.structured import grammar_of
from outrider.request import SamplingParams, SpeculationParams

# Texts longer than this are tokenised in a thread, so that other streams do not wait for them.
LONG_TEXT = 8192


class Tokenizer(Protocol):
    """What the server needs of `outrider.models.tokenizer.Tokenizer`."""

    chat_template: Any
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...
    def token_bytes(self) -> list[bytes]: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str: ...


@dataclass(frozen=True)
class Limits:
    """What bounds a request."""

    model_name: str
    max_model_len: int
    vocab_size: int
    max_n: int
    max_logprobs: int


@dataclass(frozen=True)
class Prepared:
    """A request the engine can take: prompts times n sequences, prompt-major."""

    prompts: list[list[int]]
    params: list[SamplingParams]  # one a sequence
    n: int
    seed: int
    texts: list[str] | None = None  # the prompts as text, where the answer repeats them
    model: str = ""
    parsing: Parsing | None = None  # how answers are taken apart; None: they are content


class Preparer:
    """Checks requests against the limits and turns them into token ids and parameters."""

    def __init__(
        self, tokenizer: Tokenizer, limits: Limits, seed: int,
        *, tool_call_parser: str = "auto", reasoning_parser: str = "auto",
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.formats = choose_formats(
            template_text(tokenizer.chat_template), tools=tool_call_parser, reasoning=reasoning_parser,
            template_has_tools=template_has_tools(tokenizer.chat_template),
        )  # fmt: skip
        self.limits = limits
        table = tokenizer.token_bytes()
        self.token_bytes = table + [b""] * (limits.vocab_size - len(table))
        self._max_token_bytes = max(map(len, self.token_bytes), default=1) or 1
        self._infill_marks = infill_marks(self.token_bytes)
        self._seeds = random.Random(seed)

    async def chat(self, request: ChatCompletionRequest) -> Prepared:
        """A chat request: one prompt, from the messages or as given ids."""
        check_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
        if request.prompt_token_ids is not None:
            if request.messages:
                raise bad_request("messages and prompt_token_ids exclude each other", "prompt_token_ids")
            prompts = [request.prompt_token_ids]
        else:
            prompt = render(self.tokenizer, request, offered_tools(request))
            prompts = [await self._encode(prompt, False, "messages")]
        if request.max_completion_tokens is not None and request.max_tokens is not None:
            raise bad_request("max_tokens and max_completion_tokens exclude each other", "max_tokens")
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        max_tokens, name = request.max_tokens, "max_tokens"
        if request.max_completion_tokens is not None:
            max_tokens, name = request.max_completion_tokens, "max_completion_tokens"
        prepared = self._prepare(request, prompts, "messages", (name, max_tokens), ("top_logprobs", logprobs))
        prepared = await self._with_grammar(request, await self._with_prediction(request, prepared))
        return self._with_parsing(request, prepared)

    async def completion(self, request: CompletionRequest) -> Prepared:
        """A completion request: one or several prompts, as text or ids."""
        prompts, texts = await self._prompts(infilled(request, self._infill_marks))
        prepared = self._prepare(
            request, prompts, "prompt", ("max_tokens", request.max_tokens), ("logprobs", request.logprobs)
        )
        prepared = await self._with_grammar(request, await self._with_prediction(request, prepared))
        if request.echo and request.logprobs is not None:  # the prompt is echoed with its own
            most = max(request.logprobs, request.prompt_logprobs or 0)
            params = [msgspec.structs.replace(each, prompt_logprobs=most) for each in prepared.params]
            prepared = dataclasses.replace(prepared, params=params)
        if request.echo:
            texts = texts or [self.tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
            return dataclasses.replace(prepared, texts=texts)
        return prepared

    async def tokens(self, request: TokenizeRequest) -> list[int]:
        """The ids of a text or a conversation."""
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("give either prompt or messages", "prompt", "missing_required_parameter")
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            return await self._run(
                lambda text: self.tokenizer.encode(text, add_special_tokens=special), request.prompt
            )
        text = render(self.tokenizer, request, request.tools or [])
        return await self._run(lambda t: self.tokenizer.encode(t, add_special_tokens=False), text)

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.limits.model_name:
            raise ApiError(
                404, f"the model {model!r} is not served here; this server has {self.limits.model_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip

    def check_ids(self, token_ids: list[int], param: str) -> None:
        """Refuse ids that the vocabulary does not have."""
        size = self.limits.vocab_size
        if token_ids and max(token_ids) >= size:
            raise bad_request(
                f"{param}: token id {max(token_ids)} is not in the vocabulary of {size} tokens", param
            )

    async def _prompts(self, request: CompletionRequest) -> tuple[list[list[int]], list[str] | None]:
        prompt = request.prompt
        if request.prompt_token_ids is not None:
            if prompt is not None:
                raise bad_request("prompt and prompt_token_ids exclude each other", "prompt_token_ids")
            return [request.prompt_token_ids], None
        if prompt is None or prompt == []:
            raise bad_request("prompt is required", "prompt", "missing_required_parameter")
        if isinstance(prompt, str):
            prompt = [prompt]
        special = request.add_special_tokens is not False
        if isinstance(prompt[0], str):
            texts: list[str] = prompt  # type: ignore[assignment]
            return [await self._encode(text, special, "prompt") for text in texts], texts
        if isinstance(prompt[0], int):
            return [prompt], None  # type: ignore[list-item]
        return list(prompt), None  # type: ignore[arg-type]

    async def _encode(self, text: str, special: bool, param: str) -> list[int]:
        """Token ids; a text that cannot fit is refused before any work is spent on it."""
        size, limit = len(text.encode()), self.limits.max_model_len
        if size > limit * self._max_token_bytes:
            raise self._too_long(f"at least {-(-size // self._max_token_bytes)}", param)
        return await self._run(lambda t: self.tokenizer.encode(t, add_special_tokens=special), text)

    @staticmethod
    async def _run(encode: Callable[[str], list[int]], text: str) -> list[int]:
        return await asyncio.to_thread(encode, text) if len(text) > LONG_TEXT else encode(text)

    def _with_parsing(self, request: ChatCompletionRequest, prepared: Prepared) -> Prepared:
        """The request with how its answers are taken apart, if they have parts."""
        end = self.tokenizer.decode(prepared.prompts[0][-16:], skip_special_tokens=False)
        parsing = parsing_for(request, self.formats, end)
        if parsing is None:
            return prepared
        shown = sorted(self._marker_ids(parsing.markers)) if request.skip_special_tokens is not False else []
        params = [msgspec.structs.replace(each, shown_special_ids=shown) for each in prepared.params]
        return dataclasses.replace(prepared, params=params, parsing=parsing)

    def _marker_ids(self, markers: Sequence[str]) -> set[int]:
        """Special tokens that mark the parts of an answer: their text has to be seen."""
        texts = {marker.encode() for marker in markers}
        return {i for i in self.tokenizer.special_ids if self.token_bytes[i] in texts}

    async def _with_grammar(self, request: GenerationRequest, prepared: Prepared) -> Prepared:
        grammar = await grammar_of(request)
        if grammar is None:
            return prepared
        params = [msgspec.structs.replace(each, grammar=grammar) for each in prepared.params]
        return dataclasses.replace(prepared, params=params)

    async def _with_prediction(self, request: GenerationRequest, prepared: Prepared) -> Prepared:
        """The request with what its client expects of the answer, for every choice."""
        if request.prediction is None:
            return prepared
        text, limit = request.prediction.text, self.limits.max_model_len
        ids: list[int] = []
        is_too_long = len(text.encode()) > limit * self._max_token_bytes
        if not is_too_long:
            ids = await self._run(lambda t: self.tokenizer.encode(t, add_special_tokens=False), text)
        if is_too_long or len(ids) > limit:
            raise bad_request(
                f"the prediction is longer than the model's context of {limit} tokens, so no answer can "
                "follow it to its end; shorten it",
                "prediction", "context_length_exceeded",
            )  # fmt: skip
        params = [msgspec.structs.replace(each, prediction_token_ids=ids) for each in prepared.params]
        return dataclasses.replace(prepared, params=params)

    def _too_long(self, length: int | str, param: str) -> ApiError:
        return bad_request(
            f"the prompt has {length} tokens, but the model's context is {self.limits.max_model_len} "
            "tokens, of which at least one must be left for the answer; shorten the prompt",
            param, "context_length_exceeded",
        )  # fmt: skip

    def _prepare(
        self, request: GenerationRequest, prompts: list[list[int]], param: str,
        max_tokens: tuple[str, int | None], logprobs: tuple[str, int | None],
    ) -> Prepared:  # fmt: skip
        self.check_model(request.model)
        n = request.n or 1
        if n * len(prompts) > self.limits.max_n:
            raise bad_request(
                f"n is too large: {len(prompts)} prompt(s) x n={n} are {n * len(prompts)} sequences, at most "
                f"{self.limits.max_n} are allowed", "n",
            )  # fmt: skip
        if request.prompt_token_ids is not None:
            param = "prompt_token_ids"
        for prompt in prompts:
            if not prompt:
                raise bad_request("the prompt is empty: it has no tokens", param)
            self.check_ids(prompt, param)
            if len(prompt) >= self.limits.max_model_len:
                raise self._too_long(len(prompt), param)
            self._check_max_tokens(*max_tokens, len(prompt))
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        params = self._params(request, max_tokens[1], *logprobs)
        seed = self._seeds.getrandbits(53) if request.seed is None else request.seed
        seeded = [_with_seed(params, derive_seed(seed, i)) for i in range(n)]
        return Prepared(prompts, seeded * len(prompts), n, seed, model=self.limits.model_name)

    def _check_max_tokens(self, name: str, value: int | None, prompt_len: int) -> None:
        room = self.limits.max_model_len - prompt_len
        if value is not None and value < 1:
            raise bad_request(f"{name} must be at least 1, got {value}", name)
        if value is not None and value > room:
            raise bad_request(
                f"{name} is too large: {value}; the prompt has {prompt_len} tokens and the model's context "
                f"is {self.limits.max_model_len}, so at most {room} are possible",
                name, "context_length_exceeded",
            )  # fmt: skip

    def _params(
        self, request: GenerationRequest, max_tokens: int | None, logprobs_name: str, logprobs: int | None
    ) -> SamplingParams:
        stop = request.stop_strings
        if len(stop) > MAX_STOP_STRINGS:
            raise bad_request(
                f"stop: at most {MAX_STOP_STRINGS} strings are allowed, got {len(stop)}", "stop"
            )
        if "" in stop:
            raise bad_request("stop: an empty string would end every answer at once", "stop")
        if logprobs is not None and logprobs > self.limits.max_logprobs:
            raise bad_request(
                f"{logprobs_name} must be at most {self.limits.max_logprobs}, got {logprobs}", logprobs_name
            )
        if request.prompt_logprobs is not None:
            if request.stream:
                raise bad_request("prompt_logprobs and stream exclude each other", "prompt_logprobs")
            if request.prompt_logprobs > self.limits.max_logprobs:
                raise bad_request(
                    f"prompt_logprobs must be at most {self.limits.max_logprobs}, got "
                    f"{request.prompt_logprobs}", "prompt_logprobs",
                )  # fmt: skip
        if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
            raise bad_request(
                f"min_tokens must be at most max_tokens ({max_tokens}), got {request.min_tokens}",
                "min_tokens",
            )
        self.check_ids(request.stop_token_ids or [], "stop_token_ids")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_or(request.temperature, 1.0),
            top_k=max(_or(request.top_k, 0), 0),
            top_p=_or(request.top_p, 1.0),
            min_p=_or(request.min_p, 0.0),
            presence_penalty=_or(request.presence_penalty, 0.0),
            frequency_penalty=_or(request.frequency_penalty, 0.0),
            repetition_penalty=_or(request.repetition_penalty, 1.0),
            logit_bias=self._logit_bias(request.logit_bias or {}),
            min_tokens=request.min_tokens or 0,
            bad_words=self._bad_words(request.bad_words or []),
            stop=stop,
            stop_token_ids=request.stop_token_ids or [],
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
            ignore_eos=bool(request.ignore_eos),
            skip_special_tokens=request.skip_special_tokens is not False,
            logprobs=logprobs,
            prompt_logprobs=request.prompt_logprobs,
            speculation=_speculation(request.speculation),
        )

    def _logit_bias(self, bias: dict[str, float]) -> dict[int, float]:
        result: dict[int, float] = {}
        for key, value in bias.items():
            if not key.isdecimal():
                raise bad_request(f"logit_bias: keys must be token ids, got {key!r}", "logit_bias")
            self.check_ids([int(key)], "logit_bias")
            result[int(key)] = value
        return result

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Each word as it may appear: at the start of a text and after a blank."""
        sequences: list[list[int]] = []
        for word in words:
            bare = word.lstrip() or word
            for text in (bare, " " + bare):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _speculation(value: str | Speculation | None) -> SpeculationParams | None:
    if isinstance(value, Speculation):
        return SpeculationParams(value.method, value.max_draft_tokens)
    return None if value is None else SpeculationParams(method=value)


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return msgspec.structs.replace(params, seed=seed)


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: the request's own for the first, then a mix of both."""
    if index == 0:
        return seed % 2**64
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64  # splitmix64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)
