"""What goes back over the wire: OpenAI's response shapes, built as bytes.

A stream's chunk costs a few microseconds, because everything constant is encoded once a request: the
kernels share the machine with this process.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outrider.entrypoints.chat_message import ChatMessage, delta_fields, message_fields
from outrider.entrypoints.parsers.message import Delta, Parsing
from outrider.entrypoints.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from outrider.request import FinishReason, RequestOutput, SpeculationStats, TokenLogprobs

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """What has come of one sequence so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    speculation: SpeculationStats | None = None
    error: str | None = None

    def add(self, output: RequestOutput) -> None:
        self.text.append(output.text)
        self.token_ids += output.token_ids
        self.sources += output.sources
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.note(output)

    def note(self, output: RequestOutput) -> None:
        """The counts of an increment, without its content: all a stream has to remember."""
        self.num_output_tokens = output.num_output_tokens
        self.num_prompt_tokens = output.num_prompt_tokens or self.num_prompt_tokens
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
            self.speculation = output.speculation


@dataclass(frozen=True)
class Wanted:
    """The optional parts of an answer."""

    chat: bool
    logprobs: bool = False
    num_logprobs: int = 0
    num_prompt_logprobs: int | None = None  # beside the answer; an echo shows those of `logprobs`
    token_ids: bool = False
    usage: bool = False  # a usage chunk at the end of a stream
    speculation: bool = False
    sources: bool = False  # the source and the text of every token
    received: float | None = None  # perf_counter() at receipt: chunks then tell seconds since, `arrival_time`


def wanted_of(request: GenerationRequest) -> Wanted:
    """What the fields of a request ask for."""
    is_chat = isinstance(request, ChatCompletionRequest)
    alternatives: int | None = None
    if isinstance(request, ChatCompletionRequest):
        alternatives = (request.top_logprobs or 0) if request.logprobs else None
    elif isinstance(request, CompletionRequest):
        alternatives = request.logprobs
    return Wanted(
        chat=is_chat,
        logprobs=alternatives is not None,
        num_logprobs=alternatives or 0,
        num_prompt_logprobs=request.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        usage=request.include_usage,
        speculation=bool(request.return_speculation),
        sources=request.return_speculation == "detailed",
    )


class Answer:
    """Builds the wire form of one request's answer, whole or in chunks."""

    def __init__(
        self, request_id: str, model: str, fingerprint: str, seed: int, prompts: Sequence[Sequence[int]],
        n: int, wanted: Wanted, token_bytes: Sequence[bytes], echo: Sequence[str] | None = None,
        parsing: Parsing | None = None,
    ) -> None:  # fmt: skip
        self.choices = [Choice() for _ in range(len(prompts) * n)]
        self.wanted = wanted
        self._n = n
        self._prompts = prompts
        self._echo = echo
        self._logprobs = LogprobWriter(token_bytes, wanted)
        self._offsets = [_Offsets() for _ in self.choices]
        self._token_bytes = token_bytes
        self._pieces = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self.choices]
        self._started = [False] * len(self.choices)
        # Where an answer has parts; else its text is its content, which costs nothing.
        self._messages = [ChatMessage(parsing, token_bytes) for _ in self.choices if parsing is not None]
        kind = "chat.completion" if wanted.chat else "text_completion"
        self._head = {
            "id": request_id, "object": kind, "created": int(time.time()), "model": model,
            "system_fingerprint": fingerprint, "seed": seed,
        }  # fmt: skip
        chunk_kind = "chat.completion.chunk" if wanted.chat else kind
        self._chunk_head = b"data: " + encode(self._head | {"object": chunk_kind})[:-1] + b',"choices":['

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        """One increment as a server-sent event; empty when there is nothing to show yet."""
        choice, wanted = self.choices[index], self.wanted
        choice.note(output)
        first = not self._started[index]
        finish_reason: str | None = output.finish_reason
        content: str | Delta = output.text
        if self._messages:
            message = self._messages[index]
            content = message.feed(output.text, output.token_ids, finish_reason is not None)
            finish_reason = message.finish_reason(output.finish_reason)
        if not (content or first or finish_reason or wanted.token_ids or output.logprobs or wanted.sources):
            return b""
        self._started[index] = True
        logprobs = b"null"
        if wanted.logprobs:
            logprobs = encode(
                self._scores(index, output.token_ids, output.logprobs or [], output.prompt_logprobs or [])
            )
        finish = b"null" if finish_reason is None else encode(finish_reason)
        parts = [
            self._chunk_head,
            b'{"index":%d,' % index,
            self._text(index, content, first),
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            finish,
        ]
        if output.finish_reason is not None or wanted.token_ids or wanted.sources:
            parts.append(self._extras(index, output, first))
        if wanted.received is not None:
            parts.append(b',"arrival_time":%.6f' % (time.perf_counter() - wanted.received))
        parts.append(b"}]")
        if wanted.speculation and output.finish_reason is not None and self.is_finished:
            parts.append(b',"speculation":' + encode(self.speculation()))
        parts.append(b',"usage":null}\n\n' if wanted.usage else b"}\n\n")
        return b"".join(parts)

    def _text(self, index: int, text: str | Delta, first: bool) -> bytes:
        if isinstance(text, Delta):
            return b'"delta":' + encode(delta_fields(text, first))
        if not self.wanted.chat:
            prefix = self._echo[index // self._n] if first and self._echo is not None else ""
            return b'"text":' + encode(prefix + text)
        role = b'"role":"assistant",' if first else b""
        return b'"delta":{' + role + b'"content":' + encode(text) + b"}"

    def _extras(self, index: int, output: RequestOutput, first: bool) -> bytes:
        extras: dict[str, Any] = {}
        if output.finish_reason is not None:
            extras["stop_reason"] = output.stop_reason
        if self.wanted.token_ids:
            extras["token_ids"] = output.token_ids
            if first:
                extras["prompt_token_ids"] = self._prompts[index // self._n]
        if self.wanted.sources:
            extras |= self._detail(index, output.token_ids, output.sources)
        return b"," + encode(extras)[1:-1] if extras else b""

    def usage_chunk(self) -> bytes:
        """The last event of a stream whose client asked for usage."""
        return self._chunk_head + b'],"usage":' + encode(self.usage()) + b"}\n\n"

    def body(self) -> bytes:
        """The whole answer of a request that does not stream."""
        content = self._head | {
            "choices": [self._choice(i, choice) for i, choice in enumerate(self.choices)],
            "usage": self.usage(),
        }
        if self.wanted.speculation:
            content["speculation"] = self.speculation()
        return encode(content)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        result: dict[str, Any] = {"index": index}
        finish_reason: str | None = choice.finish_reason
        if self._messages:
            message = self._messages[index]
            result["message"] = message_fields(message.feed(text, choice.token_ids, True))
            finish_reason = message.finish_reason(choice.finish_reason)
        elif self.wanted.chat:
            result["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            result["text"] = self._echo[index // self._n] + text if self._echo is not None else text
        result["logprobs"] = None
        if self.wanted.logprobs:
            result["logprobs"] = self._scores(
                index, choice.token_ids, choice.logprobs, choice.prompt_logprobs
            )
        result["finish_reason"] = finish_reason
        result["stop_reason"] = choice.stop_reason
        if self.wanted.num_prompt_logprobs is not None:
            prompt = self._prompts[index // self._n]
            result["prompt_logprobs"] = self._logprobs.by_id(
                prompt, choice.prompt_logprobs, self.wanted.num_prompt_logprobs
            )
        if self.wanted.token_ids:
            result["token_ids"] = choice.token_ids
            result["prompt_token_ids"] = self._prompts[index // self._n]
        if self.wanted.sources:
            result |= self._detail(index, choice.token_ids, choice.sources)
        return result

    def _scores(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs],
        of_prompt: Sequence[TokenLogprobs],
    ) -> dict[str, Any]:  # fmt: skip
        """Log-probabilities of tokens, those of an echoed prompt before them."""
        scores: list[TokenLogprobs | None] = list(logprobs)
        if self._echo is not None and not self._offsets[index].num_pieces:
            token_ids = [*self._prompts[index // self._n], *token_ids]
            scores = [None, *of_prompt, *scores]  # nothing comes before the first token
        return self._logprobs(token_ids, scores, self._offsets[index])

    def _detail(self, index: int, token_ids: Sequence[int], sources: Sequence[str]) -> dict[str, Any]:
        """Where each token came from and its text; a character of several tokens is with its last one."""
        decode = self._pieces[index].decode
        return {
            "token_sources": sources,
            "token_strs": [decode(self._token_bytes[token_id]) for token_id in token_ids],
        }

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Tokens in and out; each prompt counts once, however many choices it has."""
        prompt = sum(map(len, self._prompts))
        completion = sum(choice.num_output_tokens for choice in self.choices)
        predicted = [0, 0]
        for choice in self.choices:
            if choice.speculation is not None:
                drafted, accepted = choice.speculation.by_source.get("predicted", (0, 0))
                predicted = [predicted[0] + drafted, predicted[1] + accepted]
        details = {
            "accepted_prediction_tokens": predicted[1],
            "rejected_prediction_tokens": predicted[0] - predicted[1],
        }
        if self._messages:
            details["reasoning_tokens"] = sum(message.num_reasoning_tokens for message in self._messages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.num_cached_tokens for choice in self.choices[:: self._n])
            },
            "completion_tokens_details": details,
        }

    def speculation(self) -> dict[str, Any]:
        """What speculation did for all choices together."""
        return total_speculation(self.choices)


def total_speculation(choices: Sequence[Choice]) -> dict[str, Any]:
    """The `speculation` object of an answer: what speculation did for all its choices."""
    stats = SpeculationStats()
    for choice in choices:
        if choice.speculation is not None:
            _add(stats, choice.speculation)
    return {
        "steps": stats.steps,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "by_source": {
            source: {"draft_tokens": drafted, "accepted_tokens": accepted}
            for source, (drafted, accepted) in stats.by_source.items()
        },
        "per_position": stats.per_position,  # [draft tokens, accepted], by place in the draft
    }


def _add(total: SpeculationStats, part: SpeculationStats) -> None:
    total.steps += part.steps
    total.draft_tokens += part.draft_tokens
    total.accepted_tokens += part.accepted_tokens
    for source, counts in part.by_source.items():
        mine = total.by_source.setdefault(source, [0, 0])
        mine[:] = [mine[0] + counts[0], mine[1] + counts[1]]
    for position, counts in enumerate(part.per_position):
        if position == len(total.per_position):
            total.per_position.append([0, 0])
        mine = total.per_position[position]
        mine[:] = [mine[0] + counts[0], mine[1] + counts[1]]


class _Offsets:
    """Where in the text a token begins, counted in whole characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self.num_pieces = 0

    def advance(self, piece: bytes) -> int:
        begin = self._length
        self.num_pieces += 1
        self._length += len(self._decoder.decode(piece))
        return begin


class LogprobWriter:
    """Log-probabilities in the shape of the chat or of the completion API."""

    def __init__(self, token_bytes: Sequence[bytes], wanted: Wanted) -> None:
        self._token_bytes = token_bytes
        self._wanted = wanted

    def __call__(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: _Offsets
    ) -> dict[str, Any]:
        """`None`: a token that nothing came before."""
        if self._wanted.chat:
            pairs = zip(token_ids, logprobs, strict=True)
            return {"content": [self._chat(i, entry) for i, entry in pairs if entry], "refusal": None}
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else entry.logprob for entry in logprobs],
            "top_logprobs": [self._best(*pair) for pair in zip(token_ids, logprobs, strict=True)],
            "text_offset": [offsets.advance(self._token_bytes[token_id]) for token_id in token_ids],
        }

    def _chat(self, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
        best = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[: self._wanted.num_logprobs]
        return self._token(token_id, entry.logprob) | {
            "top_logprobs": [self._token(other, logprob) for other, logprob in best]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._token_bytes[token_id]
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    def by_id(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], count: int
    ) -> list[dict[str, Any] | None]:
        """A mapping from token id for each token of a prompt, None for its first."""
        result: list[dict[str, Any] | None] = [None]
        for token_id, entry in zip(token_ids[1:], logprobs, strict=True):
            best = zip(entry.top_token_ids[:count], entry.top_logprobs, range(1, count + 1), strict=False)
            known = {other: (logprob, rank) for other, logprob, rank in best}
            known.setdefault(token_id, (entry.logprob, entry.rank))
            result.append({
                str(other): {"logprob": logprob, "rank": rank, "decoded_token": self._name(other)}
                for other, (logprob, rank) in known.items()
            })  # fmt: skip
        return result

    def _best(self, token_id: int, entry: TokenLogprobs | None) -> dict[str, float] | None:
        """The best tokens and, as OpenAI does, the chosen one if it is not among them."""
        if entry is None:
            return None
        count = self._wanted.num_logprobs
        best = dict(zip(entry.top_token_ids[:count], entry.top_logprobs[:count], strict=True))
        best.setdefault(token_id, entry.logprob)
        return {self._name(other): logprob for other, logprob in best.items()}

    def _name(self, token_id: int) -> str:
        """A name that differs for different bytes, be they whole characters or not."""
        piece = self._token_bytes[token_id]
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
