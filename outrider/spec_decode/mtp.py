"""Drafts from the target's hidden states, by a multi-token-prediction module.

The module is a shadow of the target: its cache has the target's blocks and slots, and every final token is
fed to it once, with the hidden state that the target itself had before it. So nothing is rolled back when
drafts are rejected, and a request that was not drafted for can be caught up with at any time, its prompt
included: that is all there is to chunked prefill, prefix-cache hits and preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.spec_decode.draft_head import DraftHead
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts, RequestView, ResultView

SOURCE = "mtp"
SECOND = "mtp_second"  # second choices: what the module says of them is worth something else
CATCH_UP_ROWS = 512  # tokens of requests that are far behind, fed in one round
MOST_PENDING = 33  # tokens that a step can have added: its drafts and one more
_LEAST_SURVIVAL = 1e-4
_LEAST_BRANCH = 0.03  # a second choice that is less likely than this is not worth a look


class DraftedRequest(RequestView, Protocol):
    """What drafting with the target's cache takes."""

    @property
    def block_table(self) -> Any: ...  # array("i")
    @property
    def sampling_state(self) -> Any: ...


class MTPProposer:
    """Feeds a module with what became final, and lets it draft."""

    needs_hidden = True

    def __init__(
        self,
        head: DraftHead,
        *,
        block_size: int,
        num_model_steps: int,
        look_ahead: Callable[[Any, int], int],
        branches: bool = False,
    ) -> None:
        """`look_ahead(request, num_tokens)` gives a request slots for so many tokens, if there are any to
        spare, and says for how many it has slots. `branches`: drafts are trees, where the limit leaves room:
        chains with the module's second choices beside them."""
        self.max_model_steps = num_model_steps
        # Set by whoever decides how many steps are worth their time: (requests, free drafts) -> steps.
        self.choose_model_steps: Callable[[Sequence[RequestView], Sequence[Drafts]], list[int]] | None = None
        self._head = head
        self._block_size = block_size
        self._look_ahead = look_ahead
        self._branches = branches
        self._fed: dict[str, int] = {}  # request -> tokens that the module has seen
        self._num_calls = 0
        self._num_fed = 0
        self._num_drafted = 0

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        """Drafts of up to `limits[i]` tokens; none for requests that are still being caught up with."""
        steps: Sequence[int] = limits
        if self.choose_model_steps is not None:
            chosen = self.choose_model_steps(requests, [NO_DRAFTS] * len(requests))
            steps = [min(pair) for pair in zip(limits, chosen, strict=True)]
        work = self._plan(requests, steps)
        drafts = [NO_DRAFTS] * len(requests)
        if not work:
            return drafts
        drafted, probabilities = self._head.draft(*_arrays(work))
        tokens, chances = drafted.tolist(), probabilities.tolist()
        for row, one in enumerate(work):
            self._fed[one.request.request_id] = one.start + one.num_tokens
            if not one.steps:
                continue
            chain = _chain(tokens[0][row], chances[0][row])
            room = limits[one.index] - len(chain) if self._branches else 0
            if room > 0:
                chain = _with_branches(chain, tokens[1][row], chances[1][row], room)
            drafts[one.index] = chain
            self._num_drafted += len(chain)
        self._num_calls += 1
        self._num_fed += sum([one.num_tokens for one in work])
        return drafts

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        """The head has the hidden states already, by slot: the runner hands them over at once."""

    def forget(self, request_id: str) -> None:
        self._fed.pop(request_id, None)

    def stats(self) -> dict[str, Any]:
        return {
            "requests": len(self._fed),
            "memory_bytes": self._head.nbytes,
            "calls": self._num_calls,
            "fed_tokens": self._num_fed,
            "drafted_tokens": self._num_drafted,
        }

    def _plan(self, requests: Sequence[Any], limits: Sequence[int]) -> list[_Work]:
        """Who is fed what. Those who are nearly up to date come first; the others share the rest."""
        rows_left = self._head.max_rows
        work: list[_Work] = []
        behind: list[_Work] = []
        for index, (request, limit) in enumerate(zip(requests, limits, strict=True)):
            limit = min(limit, self.max_model_steps)
            if limit <= 0:
                continue
            one = self._work(index, request, limit)
            if one.num_tokens > min(MOST_PENDING, rows_left):
                behind.append(one)
            elif one.num_tokens > 0:
                rows_left -= one.num_tokens
                work.append(one)
        rows_left = min(rows_left, CATCH_UP_ROWS)
        for one in behind:
            if one.num_tokens > rows_left:
                one.num_tokens, one.steps = rows_left, 0
            if one.num_tokens > 0:
                rows_left -= one.num_tokens
                work.append(one)
        return work

    def _work(self, index: int, request: Any, limit: int) -> _Work:
        num_tokens = len(request.token_ids)
        table = request.block_table
        start = self._fed.get(request.request_id)
        if start is None:
            num_blocks = (num_tokens - 1) // self._block_size
            fed = self._head.count_fed(np.array(table, np.int32), num_blocks) if num_blocks else 0
            start = fed * self._block_size
        slots = len(table) * self._block_size
        if slots < num_tokens + limit - 1:
            slots = self._look_ahead(request, num_tokens + limit - 1)
        start = min(start, num_tokens - 1)  # to draft again takes the last token again
        end = min(num_tokens, slots)
        steps = min(limit, slots - num_tokens + 1) if end == num_tokens else 0
        return _Work(index, request, start, end - start, steps)


class _Work:
    """One request's part of a round."""

    __slots__ = ("index", "num_tokens", "request", "start", "steps")

    def __init__(self, index: int, request: Any, start: int, num_tokens: int, steps: int) -> None:
        self.index = index
        self.request = request
        self.start = start
        self.num_tokens = num_tokens
        self.steps = steps


def _arrays(work: list[_Work]) -> tuple[Any, ...]:
    """The arguments of `DraftHead.draft`; all integers but the tables in one array."""
    token_ids: list[int] = []
    loc = [0]
    for one in work:
        token_ids += one.request.token_ids[one.start : one.start + one.num_tokens]
        loc.append(len(token_ids))
    num, end = len(work), len(token_ids)
    whole = np.array(token_ids + loc + [one.start for one in work] + [one.steps for one in work], np.int32)
    tables: NDArray[np.int32] = np.zeros((num, max([len(one.request.block_table) for one in work])), np.int32)
    for i, one in enumerate(work):
        tables[i, : len(one.request.block_table)] = one.request.block_table
    return (
        whole[:end],
        whole[end : end + num + 1],
        whole[end + num + 1 : end + 2 * num + 1],
        tables,
        whole[end + 2 * num + 1 :],
        [one.request.sampling_state for one in work],
    )


def _with_branches(chain: Drafts, seconds: list[int], chances: list[float], room: int) -> Drafts:
    """A chain and up to `room` second choices beside its tokens, the likeliest."""
    before = (1.0, *chain.survival[:-1])
    options = [
        (alive * chance, depth)
        for depth, (alive, chance) in enumerate(zip(before, chances, strict=False))
        if seconds[depth] >= 0 and alive * chance > _LEAST_BRANCH
    ]
    options.sort(reverse=True)
    chosen = options[:room]
    return Drafts(
        chain.token_ids + tuple([seconds[depth] for _, depth in chosen]),
        chain.parents + tuple([depth - 1 for _, depth in chosen]),
        chain.survival + tuple([alive for alive, _ in chosen]),
        chain.source + (SECOND,) * len(chosen),
    )


def _chain(token_ids: list[int], chances: list[float]) -> Drafts:
    survival: list[float] = []
    alive = 1.0
    for token, chance in zip(token_ids, chances, strict=False):
        if token < 0:
            break
        alive = max(min(alive, alive * chance), _LEAST_SURVIVAL)
        survival.append(alive)
    return Drafts.chain(token_ids[: len(survival)], survival, SOURCE)
