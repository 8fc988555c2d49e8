"""Who owns which block of the paged cache, and which blocks can be used again.

A block holds the keys and values of `block_size` consecutive tokens. A full block whose tokens are
both computed and final may be published under a digest of its tokens, of all tokens before it and of
the request's salt; a later request that begins the same way takes it instead of computing it. The
digest is cryptographic and chained, so equal digests mean equal prefixes: nothing leaks between
prompts or tenants. Blocks that nobody holds stay published until they are needed, oldest first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from outrider.engine.state import Request

BLOCK_SIZES = (16, 32, 64, 128)


class KVCacheManager:
    """The cache's blocks: free, held by requests, or both free and published."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0  # looked up in the prefix cache at admission
        self.num_hit_tokens = 0  # of these, found
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next victim first

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request) -> int:
        """Give `request` the longest published prefix of its tokens; returns how many tokens that is.

        Its progress starts there. The request must hold no blocks.
        """
        assert not request.block_table, f"{request.request_id} is admitted but holds blocks"
        # The last token is never taken from the cache: its logits are needed.
        limit = (request.num_tokens - 1) // self.block_size
        if not self.enable_prefix_caching or request.prompt_scores is not None:
            limit = 0  # the logits of all its tokens are needed
        for i in range(limit):
            block = self._published.get(self._digest(request, i))
            if block is None:
                break
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
            request.block_table.append(block)
        request.num_published_blocks = len(request.block_table)
        request.num_computed_tokens = len(request.block_table) * self.block_size
        return request.num_computed_tokens

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Give `request` the blocks it lacks for its first `num_tokens` tokens.

        All or nothing: on False nothing has changed, and the scheduler may preempt another request
        and ask again.
        """
        num_missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        if num_missing > len(self._free):
            return False
        for _ in range(num_missing):
            block, _ = self._free.popitem(last=False)
            digest = self._digests[block]
            if digest is not None:
                del self._published[digest]
                self._digests[block] = None
            self._ref_counts[block] = 1
            request.block_table.append(block)
        return True

    def commit(self, request: Request) -> None:
        """Publish the full blocks of `request` whose tokens are both computed and final."""
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= request.num_published_blocks or not self.enable_prefix_caching:
            return
        for i in range(request.num_published_blocks, num_full):
            digest = self._digest(request, i)
            # A block computed twice at the same time is published once; the twin stays anonymous.
            if digest not in self._published:
                block = request.block_table[i]
                self._published[digest] = block
                self._digests[block] = digest
        request.num_published_blocks = num_full

    def release(self, request: Request) -> None:
        """Take all blocks of `request` back; its progress is zero again. Published blocks stay findable."""
        # From the end, so that the tail of a prefix is the next victim before its head.
        for block in reversed(request.block_table):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} is released twice"
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)
        request.block_table = array("i")
        request.num_published_blocks = 0
        request.num_computed_tokens = 0

    def count_lookup(self, request: Request) -> None:
        """Count a lookup that led to an admission; failed attempts are repeated and do not count."""
        if self.enable_prefix_caching:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += request.num_computed_tokens

    def check(self, requests: Iterable[Request]) -> None:
        """Recompute everything from what the requests hold; AssertionError when the books are wrong."""
        held = [0] * self.num_blocks
        for request in requests:
            assert len(set(request.block_table)) == len(request.block_table)
            assert request.num_computed_tokens <= len(request.block_table) * self.block_size
            assert request.num_published_blocks * self.block_size <= request.num_computed_tokens
            for block in request.block_table:
                held[block] += 1
        assert held == self._ref_counts, "reference counts differ from the block tables"
        assert {b for b in range(self.num_blocks) if held[b] == 0} == set(self._free)
        assert self._published == {d: b for b, d in enumerate(self._digests) if d is not None}

    def _digest(self, request: Request, index: int) -> bytes:
        """Digest of block `index` of a request's tokens and of all before it."""
        digests = request.block_digests
        while len(digests) <= index:
            start = len(digests) * self.block_size
            parent = digests[-1] if digests else blake2b(request.cache_salt.encode(), digest_size=32).digest()
            tokens = array("i", request.token_ids[start : start + self.block_size])
            digests.append(blake2b(parent + tokens.tobytes(), digest_size=32).digest())
        return digests[index]
