"""Offline use: prompts in, whole answers out, with the engine in the caller's process.

Also the smallest example of using the engine: add requests, step until none is left.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from outrider.config import DEFAULT_MODEL, EngineConfig
from outrider.engine.factory import build_engine, load
from outrider.request import (
    AddRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)
from outrider.sampling.grammar_source import check_grammar


@dataclass(frozen=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, taken from the prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    seed: int  # asks for the same answer again
    usage: Usage
    speculation: dict[str, Any]  # steps, draft_tokens, accepted_tokens, ... by_source, per_position
    error: str | None = None  # why it ended, when finish_reason is ERROR


class LLM:
    """A model in this process. Not for several threads at once; `close` frees it, as does leaving `with`."""

    def __init__(self, model: str = DEFAULT_MODEL, **config: Any) -> None:
        """Keywords are the keys of the configuration file; unknown ones are errors."""
        self.config = EngineConfig.from_dict({"model": model, **config})
        checkpoint = load(self.config)
        self.tokenizer = checkpoint.tokenizer
        self._chat_template = _read_template(self.config.chat_template)
        self.engine = build_engine(self.config, checkpoint)
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model's memory. The object cannot be used afterwards."""
        self.engine.close()
        del self.engine

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        predictions: Sequence[str | Sequence[int] | None] | None = None,
        use_progress_bar: bool | None = None,
    ) -> list[Completion]:
        """One answer for each prompt (text or token ids), in order.

        `params` is for all prompts or one for each. `predictions` say what each answer will mostly be: they
        are drafts, so it comes sooner. A prompt the engine refuses is a ValueError before
        anything runs. The bar is shown on a terminal when there are several prompts.
        """
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: Sequence[Any] = [prompts] if is_one else prompts
        token_ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in many]
        return self._run(token_ids, self._params(len(token_ids), params, predictions), use_progress_bar)

    def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]] | Sequence[Mapping[str, Any]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        predictions: Sequence[str | Sequence[int] | None] | None = None,
        use_progress_bar: bool | None = None,
        **template: Any,
    ) -> list[Completion]:
        """One answer for each list of messages, as `generate` gives them; `template` are keywords of
        `apply_chat_template`."""
        is_one = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        many: Sequence[Any] = [conversations] if is_one else conversations
        template.setdefault("chat_template", self._chat_template)
        texts = [self.tokenizer.apply_chat_template(messages, **template) for messages in many]
        token_ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._run(token_ids, self._params(len(token_ids), params, predictions), use_progress_bar)

    def _params(
        self,
        num_prompts: int,
        params: SamplingParams | Sequence[SamplingParams] | None,
        predictions: Sequence[str | Sequence[int] | None] | None,
    ) -> list[SamplingParams]:
        """Parameters for each prompt."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * num_prompts
        if len(params) != num_prompts:
            raise ValueError(f"{num_prompts} prompts need as many SamplingParams (or one), got {len(params)}")
        if predictions is None:
            return list(params)
        if isinstance(predictions, str) or len(predictions) != num_prompts:
            raise ValueError(
                f"{num_prompts} prompts need a list of as many predictions (None: no prediction)"
            )
        encode = self.tokenizer.encode
        ids = [
            encode(p, add_special_tokens=False) if isinstance(p, str) else list(p or ()) for p in predictions
        ]
        return [
            msgspec.structs.replace(each, prediction_token_ids=predicted) if predicted else each
            for each, predicted in zip(params, ids, strict=True)
        ]

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], use_progress_bar: bool | None
    ) -> list[Completion]:
        for grammar in {each.grammar for each in params if each.grammar is not None}:
            check_grammar(grammar)
        requests = [
            AddRequest(str(next(self._ids)), prompt, each, time.monotonic())
            for prompt, each in zip(prompts, params, strict=True)
        ]
        increments = self._increments(requests, use_progress_bar)
        return [_completion(request, increments[request.request_id]) for request in requests]

    def _increments(
        self, requests: list[AddRequest], use_progress_bar: bool | None
    ) -> dict[str, list[RequestOutput]]:
        """Run all requests to their ends; whatever interrupts, none stays behind in the engine."""
        increments: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        if use_progress_bar is None:
            use_progress_bar = len(requests) > 1 and sys.stderr.isatty()
        bar = _progress_bar(len(requests)) if use_progress_bar else None
        try:
            for request in requests:
                self.engine.add_request(request)
            while self.engine.has_work:
                for output in self.engine.step():
                    increments[output.request_id].append(output)
                    if bar is not None and output.finish_reason is not None:
                        bar.update()
        finally:
            self.engine.cancel(list(increments))
            if bar is not None:
                bar.close()
        return increments


def _read_template(template: str | None) -> str | None:
    """A chat template as configured: a file's path, or the text itself."""
    if template is None or "{" in template:
        return template
    return Path(template).read_text(encoding="utf-8")


def _progress_bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", unit="prompt")


def _completion(request: AddRequest, increments: list[RequestOutput]) -> Completion:
    last = increments[-1]
    assert last.finish_reason is not None
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = [entry for output in increments for entry in output.logprobs or []]
    return Completion(
        prompt_token_ids=request.prompt_token_ids,
        text="".join(output.text for output in increments),
        token_ids=[token for output in increments for token in output.token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs,
        seed=last.seed,
        usage=Usage(last.num_prompt_tokens, last.num_output_tokens, last.num_cached_tokens),
        speculation=speculation_view(last.speculation or SpeculationStats()),
        error=last.error,
    )


def speculation_view(stats: SpeculationStats) -> dict[str, Any]:
    """What speculation did, with the ratios people ask for."""
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
        "per_position": stats.per_position,
    }
