"""The cache manager beside a dictionary that says what each request should read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes import VOCABULARY
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.output import OutputStream
from outrider.engine.state import Request
from outrider.request import SamplingParams

BLOCK_SIZE = 2
NUM_BLOCKS = 5


class NoState:
    def append(self, token_ids: list[int]) -> None:
        pass


def make_request(request_id: str, tokens: list[int], salt: str = "") -> Request:
    params = SamplingParams(ignore_eos=True)
    return Request(
        request_id, tokens, params, OutputStream(params, 1000, VOCABULARY), NoState(), cache_salt=salt
    )


@dataclass
class Memory:
    """What the slots hold, and what is meant by it: (salt, all tokens up to here)."""

    slots: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def compute(self, request: Request, tokens: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            place = (request.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            self.slots[place] = (request.cache_salt, tuple(tokens[: position + 1]))

    def check_reads(self, request: Request) -> None:
        """Every computed position of a request reads what that request wrote or would have written."""
        for position in range(request.num_computed_tokens):
            place = (request.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            assert self.slots[place] == (request.cache_salt, tuple(request.token_ids[: position + 1]))


class CacheMachine(RuleBasedStateMachine):
    """Requests come, compute, draft, are rejected, go; small blocks, few tokens, shared prefixes."""

    requests: Bundle[Request] = Bundle("requests")
    manager_class: Any = KVCacheManager

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.manager_class(NUM_BLOCKS, BLOCK_SIZE)
        self.memory = Memory()
        self.live: list[Request] = []
        self.num = 0

    @rule(
        target=requests,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "", "s"]),
    )
    def admit(self, tokens: list[int], salt: str) -> Request:
        self.num += 1
        request = make_request(f"r{self.num}", tokens, salt)
        num_cached = self.manager.admit(request)
        assert num_cached < request.num_tokens
        assert num_cached % BLOCK_SIZE == 0
        self.live.append(request)
        return request

    @rule(request=requests, num_tokens=st.integers(1, 9), draft=st.lists(st.integers(0, 1), max_size=4))
    def compute(self, request: Request, num_tokens: int, draft: list[int]) -> None:
        """A step: some of its tokens and, if it reaches their end, drafts, all of which are rejected."""
        if request not in self.live:
            return
        start = request.num_computed_tokens
        end = min(start + num_tokens, request.num_tokens)
        if end < request.num_tokens:
            draft = []
        free, held = self.manager.num_free_blocks, list(request.block_table)
        if not self.manager.allocate(request, end + len(draft)):
            assert self.manager.num_blocks_for(end + len(draft)) - len(held) > free
            assert (self.manager.num_free_blocks, list(request.block_table)) == (free, held)
            return
        self.memory.compute(request, request.token_ids + draft, start, end + len(draft))
        request.num_computed_tokens = end
        if end == request.num_tokens:
            request.append([draft[0] if draft else 0])
        self.manager.commit(request)

    @rule(request=consumes(requests))
    def release(self, request: Request) -> None:
        if request in self.live:
            self.live.remove(request)
            self.manager.release(request)
            assert not request.block_table and request.num_computed_tokens == 0

    @rule(request=requests)
    def preempt_and_come_back(self, request: Request) -> None:
        if request in self.live:
            self.manager.release(request)
            self.manager.admit(request)

    @precondition(lambda self: len(self.live) > 0)
    @rule()
    def everyone_leaves(self) -> None:
        for request in self.live:
            self.manager.release(request)
        self.live.clear()
        assert self.manager.num_free_blocks == NUM_BLOCKS

    @invariant()
    def books_are_right(self) -> None:
        self.manager.check(self.live)

    @invariant()
    def nobody_reads_what_is_not_theirs(self) -> None:
        for request in self.live:
            self.memory.check_reads(request)


def test_no_request_ever_reads_another_ones_data() -> None:
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=40, stateful_step_count=40))


def filled(manager: KVCacheManager, request: Request) -> Request:
    """Admit, compute and publish all of a request."""
    manager.admit(request)
    assert manager.allocate(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.commit(request)
    return request


def test_a_prefix_is_taken_from_the_cache_but_never_the_last_token() -> None:
    manager = KVCacheManager(8, 2)
    manager.release(filled(manager, make_request("a", [0, 1, 0, 1])))
    assert manager.admit(make_request("b", [0, 1, 0, 1])) == 2
    assert manager.admit(make_request("c", [0, 1, 0, 1, 1])) == 4
    assert manager.admit(make_request("d", [1, 1, 0, 1, 1])) == 0


def test_a_prefix_is_shared_while_its_owner_still_runs() -> None:
    manager = KVCacheManager(8, 2)
    owner = filled(manager, make_request("a", [0, 1, 0, 1]))
    guest = make_request("b", [0, 1, 0, 1, 1])
    assert manager.admit(guest) == 4
    assert guest.block_table == owner.block_table
    manager.release(owner)
    manager.check([guest])
    assert manager.num_free_blocks == 6


def test_salts_keep_tenants_apart() -> None:
    manager = KVCacheManager(8, 2)
    manager.release(filled(manager, make_request("a", [0, 1, 0, 1], "x")))
    assert manager.admit(make_request("b", [0, 1, 0, 1, 1], "y")) == 0
    assert manager.admit(make_request("c", [0, 1, 0, 1, 1], "x")) == 4


def test_the_least_recently_used_prefix_goes_first_and_its_tail_before_its_head() -> None:
    manager = KVCacheManager(4, 2)
    manager.release(filled(manager, make_request("old", [0, 0, 0, 0])))
    manager.release(filled(manager, make_request("new", [1, 1, 1, 1])))
    big = make_request("big", [0, 1])
    manager.admit(big)
    assert manager.allocate(big, 2)
    assert manager.admit(make_request("b", [0, 0, 0, 0, 1])) == 2  # its tail is gone
    assert manager.admit(make_request("c", [1, 1, 1, 1, 1])) == 4


def test_only_what_is_computed_and_final_is_published() -> None:
    manager = KVCacheManager(8, 2)
    request = make_request("a", [0, 1, 0, 1])
    manager.admit(request)
    assert manager.allocate(request, 8)
    request.num_computed_tokens = 3
    manager.commit(request)
    assert manager.admit(make_request("b", [0, 1, 0, 1, 0])) == 2
    request.num_computed_tokens = 8  # drafts: not among its tokens
    manager.commit(request)
    assert request.num_published_blocks == 2


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = KVCacheManager(8, 2, enable_prefix_caching=False)
    manager.release(filled(manager, make_request("a", [0, 1, 0, 1])))
    assert manager.admit(make_request("b", [0, 1, 0, 1, 1])) == 0


def test_releasing_twice_is_noticed() -> None:
    manager = KVCacheManager(8, 2)
    request = filled(manager, make_request("a", [0, 1, 0, 1]))
    table = request.block_table
    manager.release(request)
    request.block_table = table
    with pytest.raises(AssertionError, match="twice"):
        manager.release(request)
