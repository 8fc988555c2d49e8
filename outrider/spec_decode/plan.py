"""Several sources behind one proposer: who is asked, and what becomes of several answers.

Free sources (grammar, predicted, suffix, ngram) are asked first. Then the controller says for how many
steps a model is worth running, given what the free ones found, and the model drafts. What comes together:

* append: a model's chain goes on with what a free source finds after it (`mtp_strategy: with_ngram`);
* replace: without a controller, a free draft that expects as much as the model gives saves the model's cost;
* merge: all drafts of a request become one tree; where trees are not verified,
* race: the draft with the most expected accepted tokens wins;
* grammar: what a request's grammar forbids is cut, and a chain goes on with what must follow it.

A source that fails is silent for that call; the others go on. It is counted, and logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from outrider.config import SpeculativeConfig
from outrider.config_fields import ConfigError
from outrider.spec_decode.grammar import SOURCE as GRAMMAR
from outrider.spec_decode.grammar import GrammarProposer, in_grammar, matcher_of
from outrider.spec_decode.merge import expected_tokens, merge
from outrider.spec_decode.proposer import (
    MOST_DRAFT_TOKENS,
    NO_DRAFTS,
    Drafts,
    FreeSource,
    Parts,
    Proposer,
    RequestView,
    ResultView,
    wants_source,
)

logger = logging.getLogger(__name__)

FIXED_DRAFT_TOKENS = 5  # a request and step, when nothing trims and nobody said how many
T = TypeVar("T")


class ChooseModelSteps(Protocol):
    """How many steps a model should draft for each request, given the free drafts."""

    def __call__(self, requests: Sequence[RequestView], drafts: Sequence[Drafts]) -> Sequence[int]: ...


class ModelSource(Proposer, Protocol):
    """A source that runs a model, `steps[i]` times for the i-th request."""

    max_model_steps: int
    choose_model_steps: ChooseModelSteps | None


@dataclass(frozen=True)
class Append:
    """A model's chain goes on with a free source's, to `max_tokens`."""

    name: str
    source: FreeSource
    max_tokens: int


class Plan:
    """Free sources and at most one model, as one proposer."""

    def __init__(
        self,
        free: dict[str, FreeSource],
        model: tuple[str, ModelSource] | None = None,
        *,
        append: Append | None = None,
        branches: bool = False,
        most_nodes: int = 256,
        vocab_size: int = 2**31 - 1,
    ) -> None:
        """`branches`: several drafts may become a tree of `most_nodes`, instead of the best of them."""
        self.free = free
        self.model = model
        self.choose_model_steps: ChooseModelSteps | None = None  # the controller's, when there is one
        self.max_model_steps = model[1].max_model_steps if model is not None else 0
        self.needs_hidden = model is not None and model[1].needs_hidden
        self._append = append
        self._branches = branches
        self._most_nodes = most_nodes
        self._vocab_size = vocab_size
        self._num_errors: dict[str, int] = {}
        # Some sources have something for a few requests only, or learn nothing from results.
        self._concerns = {
            name: source.concerns for name, source in free.items() if hasattr(source, "concerns")
        }
        self._learners = [pair for pair in self._sources() if getattr(pair[1], "learns", True)]

    # --- the three verbs ---

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        found: list[list[Drafts]] = [[] for _ in requests]
        for name, source in self.free.items():
            concerns = self._concerns.get(name)
            if concerns is not None and not any(map(concerns, requests)):
                continue
            for mine, drafts in zip(found, self._ask(name, source, requests, limits), strict=True):
                if drafts.token_ids:
                    mine.append(drafts)
        self._apply_grammars(requests, limits, found)
        best = [self._combine(mine, limit) for mine, limit in zip(found, limits, strict=True)]
        if self.model is None:
            return best
        steps = self._model_steps(requests, limits, best)
        if not any(steps):
            return best
        drafted = self._ask_model(requests, limits, steps)
        drafted = [
            self._in_grammar(request, drafts, limit)
            for request, drafts, limit in zip(requests, drafted, limits, strict=True)
        ]
        return [
            self._combine([drafts, free] if drafts.token_ids else [free], limit)
            for drafts, free, limit in zip(drafted, best, limits, strict=True)
        ]

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        for name, source in self._learners:
            self._guarded(name, partial(source.observe, results, hidden), None)

    def forget(self, request_id: str) -> None:
        for name, source in self._sources():
            self._guarded(name, partial(source.forget, request_id), None)

    def close(self) -> None:
        """The engine ends: sources keep what they want to keep."""
        for name, source in self._sources():
            close = getattr(source, "close", None)
            if close is not None:
                self._guarded(name, close, None)

    def stats(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {}
        by_source = {name: self._guarded(name, source.stats, nothing) for name, source in self._sources()}
        return {
            "requests": sum(stats.get("requests", 0) for stats in by_source.values()),
            "memory_bytes": sum(stats.get("memory_bytes", 0) for stats in by_source.values()),
            "errors": dict(self._num_errors),
            "sources": by_source,
        }

    # --- asking ---

    def _sources(self) -> list[tuple[str, Proposer]]:
        sources: list[tuple[str, Proposer]] = list(self.free.items())
        if self.model is not None:
            sources.append(self.model)
        if self._append is not None and self._append.name not in self.free:
            sources.append((self._append.name, self._append.source))
        return sources

    def _ask(
        self, name: str, source: Proposer, requests: Sequence[RequestView], limits: Sequence[int]
    ) -> list[Drafts]:
        """A source's drafts, or none at all if what it says cannot be told apart from nonsense."""

        try:
            proposals = source.propose(requests, limits)
            if len(proposals) != len(requests):
                raise ValueError(f"{len(requests)} requests need as many drafts, got {len(proposals)}")
            for drafts, limit in zip(proposals, limits, strict=True):
                if drafts.token_ids:
                    if len(drafts.token_ids) > limit:
                        raise ValueError(f"at most {limit} draft tokens are allowed here, got {len(drafts)}")
                    drafts.check(self._vocab_size)
            return proposals
        except Exception as error:
            self._note_failure(name, error)
            return [NO_DRAFTS] * len(requests)

    def _model_steps(
        self, requests: Sequence[RequestView], limits: Sequence[int], free: Sequence[Drafts]
    ) -> list[int]:
        """Steps of the model for each request, 0 where the request does not want it."""
        assert self.model is not None
        most = [
            min(self.max_model_steps, limit) if wants_source(request.params, self.model[0]) else 0
            for request, limit in zip(requests, limits, strict=True)
        ]
        if self.choose_model_steps is None:
            return [0 if expected_tokens(drafts) >= n else n for drafts, n in zip(free, most, strict=True)]
        wanted = [i for i, n in enumerate(most) if n]
        if not wanted:
            return most
        chosen = self.choose_model_steps([requests[i] for i in wanted], [free[i] for i in wanted])
        for i, n in zip(wanted, chosen, strict=True):
            most[i] = min(most[i], n)
        return most

    def _ask_model(
        self, requests: Sequence[RequestView], limits: Sequence[int], steps: Sequence[int]
    ) -> list[Drafts]:
        """The model's drafts, with what is appended to them."""
        assert self.model is not None
        name, model = self.model
        asked = [i for i, n in enumerate(steps) if n]
        some = [requests[i] for i in asked]
        model.choose_model_steps = lambda requests, drafts: [steps[i] for i in asked]
        proposals = self._ask(name, model, some, [limits[i] for i in asked])
        drafted = [NO_DRAFTS] * len(requests)
        for i, drafts in zip(asked, proposals, strict=True):
            drafted[i] = self._appended(requests[i], drafts, limits[i])
        return drafted

    def _appended(self, request: RequestView, drafts: Drafts, limit: int) -> Drafts:
        append = self._append
        if append is None or not drafts.token_ids or not drafts.is_chain:
            return drafts
        room = min(limit, append.max_tokens) - len(drafts)
        if room <= 0:
            return drafts
        tail = self._guarded(
            append.name, lambda: append.source.continue_after(request, drafts.token_ids, room), NO_DRAFTS
        )
        alive = drafts.survival[-1]
        return Drafts.chain_of(
            drafts.token_ids + tail.token_ids[:room],
            drafts.survival + tuple(alive * value for value in tail.survival[:room]),
            drafts.source + tail.source[:room],
        )

    def _apply_grammars(
        self, requests: Sequence[RequestView], limits: Sequence[int], found: list[list[Drafts]]
    ) -> None:
        """Keep of what was found what the grammars allow, and let it go on with what must follow."""
        for request, limit, mine in zip(requests, limits, found, strict=True):
            if matcher_of(request) is not None:
                allowed = [self._in_grammar(request, drafts, limit) for drafts in mine]
                mine[:] = [drafts for drafts in allowed if drafts.token_ids]

    def _in_grammar(self, request: RequestView, drafts: Drafts, limit: int) -> Drafts:
        if matcher_of(request) is None:
            return drafts
        sources = self.free.items()
        return self._guarded(
            GRAMMAR, lambda: in_grammar(request, drafts, limit, sources, self._guarded), NO_DRAFTS
        )

    def _combine(self, proposals: list[Drafts], limit: int) -> Drafts:
        if len(proposals) < 2:
            return proposals[0] if proposals else NO_DRAFTS
        proposals.sort(key=expected_tokens, reverse=True)  # stable: of equals the first asked comes first
        return merge(proposals, min(limit, self._most_nodes)) if self._branches else proposals[0]

    def _guarded(self, name: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:
            self._note_failure(name, error)
            return otherwise

    def _note_failure(self, name: str, error: Exception) -> None:
        if name not in self._num_errors:
            logger.exception("the draft source %s failed (%s); the others go on", name, error)
        self._num_errors[name] = self._num_errors.get(name, 0) + 1


def make_plan(config: SpeculativeConfig, parts: Parts) -> Plan:
    """The sources that a method stands for, as far as there are parts for them."""
    method = config.method
    branches = parts.branches and config.tree != "off"
    limit = config.num_speculative_tokens or (MOST_DRAFT_TOKENS if config.adaptive else FIXED_DRAFT_TOKENS)
    free = _free_sources(config, parts, limit, branches)
    model: tuple[str, ModelSource] | None = None
    makers = {"mtp": parts.mtp, "draft_model": parts.draft_model}
    for name, make in makers.items():
        if method == name and make is None:
            raise ConfigError(
                f"method {name!r} needs a {'head' if name == 'mtp' else 'draft model'}, and none was found; "
                "name one with model in --speculative-config or choose another method"
            )
        if make is not None and method in (name, "auto") and model is None:
            model = (name, make())  # type: ignore[assignment]
    append = None
    if model is not None and config.mtp_strategy == "with_ngram":
        append = Append("ngram", free.get("ngram") or _ngram(config, limit), limit)
    most_nodes = config.tree if isinstance(config.tree, int) else limit
    return Plan(
        free, model, append=append, branches=branches, most_nodes=most_nodes, vocab_size=parts.vocab_size
    )


def _free_sources(
    config: SpeculativeConfig, parts: Parts, limit: int, branches: bool
) -> dict[str, FreeSource]:
    from outrider.spec_decode.predicted import PredictedProposer

    # A request that brings a grammar or a prediction gets drafts from it whatever the method.
    free: dict[str, FreeSource] = {
        GRAMMAR: GrammarProposer(max_draft_tokens=limit, branches=branches),
        "predicted": PredictedProposer(max_draft_tokens=limit),
    }
    if config.method in ("suffix", "auto"):
        free["suffix"] = _suffix(config, parts, limit, branches)
    # Beside the trees, whose drafts are as long as their matches, it drafts far ahead where text is copied.
    if config.method in ("ngram", "auto"):
        free["ngram"] = _ngram(config, limit)
    if config.method == "auto" and parts.phrases is not None:
        phrases = parts.phrases(branches)
        if phrases is not None:
            free["phrases"] = phrases
    return free


def _ngram(config: SpeculativeConfig, limit: int) -> FreeSource:
    from outrider.spec_decode.ngram import NgramProposer

    return NgramProposer(
        max_n=config.prompt_lookup_max,
        min_n=config.prompt_lookup_min,
        max_draft_tokens=limit,
        min_survival=0.01 if config.adaptive else 0.0,
    )


def _suffix(config: SpeculativeConfig, parts: Parts, limit: int, branches: bool) -> FreeSource:
    from outrider.spec_decode.suffix import SuffixProposer

    store = None
    if config.draft_memory_file is not None and parts.memory_file is not None:
        store = parts.memory_file(config.draft_memory_file)
    return SuffixProposer(
        max_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
        max_draft_tokens=limit,
        draft_memory=config.draft_memory,
        branches=branches,
        store=store,
    )
