"""An engine in this process for the commands that need no server, asked with the same requests as one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from outrider.config import Configuration, read_chat_template
from outrider.entrypoints.errors import ApiError
from outrider.entrypoints.prepare import Limits, Prepared, Preparer
from outrider.entrypoints.protocol import ChatCompletionRequest, CompletionRequest
from outrider.request import AddRequest, RequestOutput


class LocalEngine:
    """A model, its tokenizer and an engine; requests are checked as the server checks them."""

    def __init__(self, configuration: Configuration) -> None:
        from outrider.engine.factory import build_engine, load

        logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s", stream=sys.stderr)
        for warning in configuration.warnings:
            logging.warning(warning)
        config, server = configuration.engine, configuration.server
        checkpoint = load(config)
        if config.chat_template is not None:
            checkpoint.tokenizer.chat_template = read_chat_template(config.chat_template)
        self.tokenizer = checkpoint.tokenizer
        self._engine = build_engine(config, checkpoint)
        limits = Limits(
            config.model_name, self._engine.max_model_len, len(self._engine.vocabulary), server.max_n,
            server.max_logprobs,
        )  # fmt: skip
        self.preparer = Preparer(
            checkpoint.tokenizer, limits, config.seed,
            tool_call_parser=server.tool_call_parser, reasoning_parser=server.reasoning_parser,
        )  # fmt: skip
        self._ids = itertools.count()

    def prepare(self, request: ChatCompletionRequest | CompletionRequest) -> Prepared:
        """Token ids and parameters of a request; ValueError says what is wrong with it."""
        if request.stream:
            raise ValueError("stream has a meaning only for a server; remove it")
        try:
            if isinstance(request, ChatCompletionRequest):
                return asyncio.run(self.preparer.chat(request))
            return asyncio.run(self.preparer.completion(request))
        except ApiError as error:
            raise ValueError(error.message) from None

    def stats(self) -> dict[str, Any]:
        """What the engine has counted."""
        return self._engine.stats()

    def run(
        self, prepared: Iterable[Prepared], cache_salt: str = "", window: int | None = None
    ) -> Iterator[tuple[int, int, RequestOutput]]:
        """Increments as (request, sequence of it, output) until all ended; leaving early cancels the rest.

        Cached prefixes and past outputs are shared within a salt only. With `window`, requests are taken from
        `prepared` only while fewer sequences than that are open.
        """
        engine, requests = self._engine, enumerate(prepared)
        places: dict[str, tuple[int, int]] = {}  # of open sequences
        is_more = True
        try:
            while True:
                while is_more and (window is None or len(places) < window):
                    following = next(requests, None)
                    if following is None:
                        is_more = False
                    else:
                        self._add(*following, places, cache_salt)
                if not engine.has_work:
                    return
                for output in engine.step():
                    place = places[output.request_id]
                    if output.finish_reason is not None:
                        del places[output.request_id]
                    yield (*place, output)
        finally:
            if places:
                engine.cancel(list(places))

    def _add(
        self, index: int, request: Prepared, places: dict[str, tuple[int, int]], cache_salt: str
    ) -> None:
        for sequence, params in enumerate(request.params):
            request_id = str(next(self._ids))
            places[request_id] = (index, sequence)
            prompt = request.prompts[sequence // request.n]
            self._engine.add_request(AddRequest(request_id, prompt, params, time.monotonic(), 0, cache_salt))


def add_sampling_flags(parser: Any, **defaults: Any) -> None:
    """Flags for the sampling parameters that people change by hand; the names are those of the API."""
    group = parser.add_argument_group("sampling")
    flags: dict[str, tuple[Any, str]] = {
        "max_tokens": (int, "most tokens of an answer"),
        "temperature": (float, "0: greedy"),
        "top_p": (float, "share of probability to draw from"),
        "top_k": (int, "number of tokens to draw from"),
        "min_p": (float, "least probability, relative to the best token's"),
        "repetition_penalty": (float, "above 1: fewer repetitions"),
        "sampling_seed": (int, "seed of the draws; the same seed repeats an answer"),
    }
    for name, (kind, text) in flags.items():
        default = defaults.get(name)
        shown = f"{text} [{default}]" if default is not None else text
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=default,
            help=shown,
            metavar=name.split("_")[-1].upper(),
        )


def sampling_fields(options: Any) -> dict[str, Any]:
    """The request fields that the flags of `add_sampling_flags` ask for."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    fields = {name: getattr(options, name) for name in names}
    fields["seed"] = options.sampling_seed
    return {name: value for name, value in fields.items() if value is not None}
