"""What a draft is, what a proposer does, and which proposers this version offers.

A proposer is three verbs: `propose`, `observe`, `forget`. It never changes a request, and nothing it
does can change a token: the target draws its own token at every drafted position (`sampling.verifier`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from outrider.config import SpeculativeConfig
from outrider.request import SamplingParams

NO_SOURCE = ("off", "naive")  # methods that draft nothing
MOST_DRAFT_TOKENS = 32  # a request and step, when the controller trims


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafted continuations of one request, as a tree.

    Node i carries `token_ids[i]` and continues node `parents[i]`; -1 is the last committed token. A
    parent comes before its children, so a chain has parents -1, 0, 1, ... `survival[i]` estimates the
    chance that node i is reached and accepted: in (0, 1], never above its parent's.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    source: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def chain(cls, token_ids: Sequence[int], survival: Sequence[float], source: str) -> Drafts:
        """One path, every node from the same source."""
        num = len(token_ids)
        return cls(tuple(token_ids), tuple(range(-1, num - 1)), tuple(survival), (source,) * num)

    @classmethod
    def chain_of(
        cls, token_ids: tuple[int, ...], survival: tuple[float, ...], source: tuple[str, ...]
    ) -> Drafts:
        """One path whose nodes have sources of their own."""
        return cls(token_ids, tuple(range(-1, len(token_ids) - 1)), survival, source)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def depths(self) -> list[int]:
        """Per node, how many drafted tokens precede it on its path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def ancestors(self, node: int) -> list[int]:
        """The path that leads to `node`, from the first drafted token to its parent."""
        path: list[int] = []
        while (node := self.parents[node]) >= 0:
            path.append(node)
        return path[::-1]

    def first(self, num: int) -> Drafts:
        """The tree of the first `num` nodes; of a chain, its beginning."""
        if num >= len(self.token_ids):
            return self
        return Drafts(self.token_ids[:num], self.parents[:num], self.survival[:num], self.source[:num])

    def select(self, nodes: Sequence[int]) -> Drafts:
        """The tree of `nodes` alone: ascending, and with each node its parent."""
        if len(nodes) == len(self.token_ids):
            return self
        new_index = {node: i for i, node in enumerate(nodes)}
        new_index[-1] = -1
        return Drafts(
            tuple(self.token_ids[i] for i in nodes),
            tuple(new_index[self.parents[i]] for i in nodes),
            tuple(self.survival[i] for i in nodes),
            tuple(self.source[i] for i in nodes),
        )

    def check(self, vocab_size: int) -> None:
        """Raise ValueError unless this is a well-formed tree of valid token ids."""
        num = len(self.token_ids)
        if not num == len(self.parents) == len(self.survival) == len(self.source):
            raise ValueError(f"drafts need one parent, survival and source for each of {num} tokens")
        nodes = zip(self.token_ids, self.parents, self.survival, strict=True)
        for i, (token, parent, survival) in enumerate(nodes):
            if not 0 <= token < vocab_size:
                raise ValueError(f"draft token must be in 0..{vocab_size - 1}, got {token} at node {i}")
            if not -1 <= parent < i:
                raise ValueError(f"the parent of node {i} must be one of -1..{i - 1}, got {parent}")
            limit = self.survival[parent] if parent >= 0 else 1.0
            if not 0.0 < survival <= limit:
                raise ValueError(f"survival of node {i} must be in (0, {limit}], got {survival}")


NO_DRAFTS = Drafts()


class RequestView(Protocol):
    """What a proposer may read of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...  # prompt, then output: final tokens only
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...  # names the tenant
    @property
    def params(self) -> SamplingParams: ...


class ResultView(Protocol):
    """What a proposer may read of a request's step."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...  # new and final; as long as `path` if a stop cut it there
    @property
    def drafts(self) -> Drafts: ...  # what was verified, after all trimming
    @property
    def path(self) -> Sequence[int]: ...  # the accepted nodes of `drafts`, root first


class Proposer(Protocol):
    """A source of drafts."""

    needs_hidden: bool  # whether `observe` wants the target's hidden states

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        """Drafts for each request, at most `limits[i]` nodes for the i-th, possibly none."""

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        """Learn what became of the last drafts. `hidden` is None unless `needs_hidden`."""

    def forget(self, request_id: str) -> None:
        """Free what is kept for a request: it finished, was cancelled or preempted. Unknown ids are fine."""

    def stats(self) -> dict[str, Any]:
        """For people: what is kept, how much memory it takes, how good the drafts are."""


class NoProposer:
    """Plain decoding: the same path with zero drafts."""

    needs_hidden = False

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        return [NO_DRAFTS] * len(requests)

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


class FreeSource(Proposer, Protocol):
    """A source that runs no model, and so can be asked as often as one likes."""

    def continue_after(self, request: RequestView, after: Sequence[int], limit: int) -> Drafts:
        """A draft for the request's text as if it had gone on with `after`."""


class MemoryStore(Protocol):
    """Where past outputs survive the process."""

    def load(self) -> list[tuple[bytes, list[int]]]:
        """(tenant, token ids) of all outputs, oldest first."""

    def save(self, texts: Sequence[tuple[bytes, list[int]]]) -> None:
        """Keep these instead. OSError if that cannot be."""


class DraftLimit(NamedTuple):
    """What a request may get: nothing, or up to `max_tokens` of drafts."""

    wanted: bool
    max_tokens: int


def draft_limit(params: SamplingParams, method: str, limit: int) -> DraftLimit:
    """Apply a request's own `speculation` to what `method`'s proposer would give it."""
    override = params.speculation
    if override is None:
        return DraftLimit(limit > 0, limit)
    if override.max_draft_tokens is not None:
        limit = min(limit, override.max_draft_tokens)
    asked = override.method
    is_offered = asked in (None, "auto", method) or (method == "auto" and asked not in NO_SOURCE)
    return DraftLimit(limit > 0 and is_offered, limit)


def wants_source(params: SamplingParams, source: str) -> bool:
    """Whether a request takes drafts from this source."""
    override = params.speculation
    return override is None or override.method in (None, "auto", source)


@dataclass(frozen=True)
class Parts:
    """What sources are made from beside the configuration. A source without its part is not available."""

    mtp: Callable[[], Proposer] | None = None  # there is a head
    draft_model: Callable[[], Proposer] | None = None
    phrases: Callable[[bool], FreeSource | None] | None = None  # of whether drafts may branch
    memory_file: Callable[[str], MemoryStore] | None = None  # opens the file of past outputs
    branches: bool = False  # whether trees are verified as trees
    vocab_size: int = 2**31 - 1


def make_proposer(config: SpeculativeConfig, parts: Parts | None = None) -> Proposer:
    """The proposer for `config.method`."""
    if config.method in NO_SOURCE:
        return NoProposer()
    from outrider.spec_decode.plan import make_plan

    return make_plan(config, parts or Parts())
