"""Grammars: which tokens a request may get next, as a function of the tokens it has got.

A matcher follows one request. The state after any tokens, and so the mask there, depends on these tokens
alone, never on what was tried and taken back; so masks along drafts keep the law.

The work is done by llguidance. Where a grammar leaves only one text, its masks leave only the tokens that
the tokenizer makes of that text: such a stretch is a free draft.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.request import GrammarSpec
from outrider.sampling.grammar_source import explain, limits, one_line, translate

if TYPE_CHECKING:
    import llguidance

Mask = NDArray[np.uint32]  # a bit for each token id, low bits first


def allows(mask: Mask, token_id: int) -> bool:
    """Whether the bit of a token is set."""
    return bool(int(mask[token_id >> 5]) >> (token_id & 31) & 1)


class GrammarCompiler:
    """Makes grammars over one vocabulary. `compile` may run in any thread."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        eos_ids: frozenset[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """`encode` gives the ids of a text, with nothing added around it."""
        self.vocab_size = len(token_bytes)
        self.eos_ids = eos_ids
        self._words = _Words(token_bytes, special_ids, eos_ids, encode)

    @functools.cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        from llguidance import LLTokenizer

        words: Any = self._words
        return LLTokenizer(words, n_vocab=len(words.tokens), eos_token=words.eos_token_ids)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raise GrammarError where `spec` is no grammar, or allows no text."""
        from llguidance import LLMatcher

        source = translate(spec)

        def make() -> llguidance.LLMatcher:
            return LLMatcher(self._tokenizer, source, limits=limits(), log_level=0)

        grammar = Grammar(make, len(self._words.tokens), self.vocab_size, self.eos_ids)
        first = grammar.fresh()
        if not first.is_error():
            first.compute_bitmask()
        if first.is_error():
            raise explain(spec, first.get_error())
        return grammar


class _Words:
    """A tokenizer as llguidance wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        eos_ids: frozenset[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = list(token_bytes)
        self.eos_token_ids = sorted(eos_ids)
        if not eos_ids:  # the library needs one; its id is above those of the model
            self.tokens.append(b"<eos>")
            self.eos_token_ids = [len(token_bytes)]
        self.eos_token_id = self.eos_token_ids[0]
        self._special_ids = special_ids | set(self.eos_token_ids)
        self.special_token_ids = sorted(self._special_ids)
        self._encode = encode
        # The same names and their ends are asked for again and again.
        self._spelt = functools.lru_cache(maxsize=8192)(self._spell)

    def __call__(self, text: str) -> list[int]:
        """The ids that spell `text` inside of other text, none of them special."""
        return self._spelt(text) if len(text) < 256 else self._spell(text)

    def _spell(self, text: str) -> list[int]:
        wanted = text.encode()
        for before in ("", "\n"):  # some tokenizers put a blank at the beginning
            ids = self._encode(before + text)
            first, size = len(ids), len(wanted)
            while first > 0 and size > 0:
                first -= 1
                size -= len(self.tokens[ids[first]])
            ids = ids[first:]
            if self._special_ids.isdisjoint(ids) and b"".join(self.tokens[i] for i in ids) == wanted:
                return ids
        return self._longest_first(wanted)

    def _longest_first(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            piece = next((text[:n] for n in range(self._longest, 0, -1) if text[:n] in self._ids), b"")
            if not piece:  # the vocabulary cannot spell it
                break
            ids.append(self._ids[piece])
            text = text[len(piece) :]
        return ids

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        return {word: i for i, word in enumerate(self.tokens) if word and i not in self._special_ids}

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))


class Grammar:
    """A compiled grammar, shared by its requests.

    The library's matchers share what they learn of a grammar (its automata), and fail for good when that has
    grown to its limit. So a failure may be the work of other requests: what counts is whether a matcher that
    has learned nothing fails too.
    """

    def __init__(
        self,
        make: Callable[[], llguidance.LLMatcher],
        num_words: int,
        vocab_size: int,
        eos_ids: frozenset[int],
    ) -> None:
        self._make = make
        self._pristine = make()
        self.num_mask_bits = num_words
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids

    def fresh(self) -> llguidance.LLMatcher:
        return self._pristine.deep_copy()

    def forget(self) -> None:
        """Compile it again: what has been learned is too much."""
        self._pristine = self._make()

    def matcher(self, *, ignore_eos: bool = False) -> GrammarMatcher:
        """At the beginning of a text. With `ignore_eos` the end of sequence is never allowed."""
        return GrammarMatcher(self, ignore_eos=ignore_eos)


Path = tuple[int, ...]  # tokens after the committed ones


class GrammarMatcher:
    """Where one request is in its grammar."""

    def __init__(self, grammar: Grammar, *, ignore_eos: bool = False) -> None:
        self.error: str | None = None  # why it cannot go on
        self._grammar = grammar
        self._ignore_eos = ignore_eos
        self._token_ids: list[int] = []  # committed
        self._inner = grammar.fresh()
        self._ahead: Path = ()  # what the inner matcher has taken beyond the committed tokens
        self._masks: dict[Path, Mask] = {}  # that are known

    def append(self, token_id: int) -> bool:
        """Take a final token; True when no other can follow it."""
        self._token_ids.append(token_id)
        self._masks = {path[1:]: mask for path, mask in self._masks.items() if path[:1] == (token_id,)}
        if self._ahead[:1] == (token_id,):
            self._ahead = self._ahead[1:]
        else:
            self._rewind()
            self._inner.consume_token(token_id)
        if self._inner.is_error():
            self._begin_anew()
        return not self._ahead and self._inner.is_stopped() and not self._inner.is_error()

    def masks(self, token_ids: Sequence[int] = (), parents: Sequence[int] = ()) -> list[Mask | None]:
        """What may follow the committed tokens, and each node of a tree of drafts.

        None: the node is not allowed or ends the text, so that nothing depends on what follows it. Where the
        grammar has failed (it got too complex), nothing may follow.
        """
        paths: list[Path] = [()]
        masks: list[Mask | None] = [self._mask_after(())]
        for token_id, parent in zip(token_ids, parents, strict=True):
            before = masks[parent + 1]
            paths.append((*paths[parent + 1], token_id))
            is_open = before is not None and allows(before, token_id)
            is_end = token_id in self._grammar.eos_ids
            masks.append(self._mask_after(paths[-1]) if is_open and not is_end else None)
        return masks

    def forced(self, after: Sequence[int] = (), limit: int = 32) -> list[int]:
        """The only tokens that can follow the committed ones and `after` (which is allowed), as far as the
        library can tell."""
        self._go_to(tuple(after))
        return [] if self._inner.is_error() or limit <= 0 else self._inner.compute_ff_tokens()[:limit]

    def may_follow(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """For each node of a tree, whether its text fits into the grammar. Cheaper than masks, which may
        leave one way only to spell a text."""
        fits: list[bool] = []
        paths: list[Path] = [()]
        for token_id, parent in zip(token_ids, parents, strict=True):
            before = paths[parent + 1]
            paths.append((*before, token_id))
            can_go_on = parent < 0 or (fits[parent] and token_ids[parent] not in self._grammar.eos_ids)
            fits.append(can_go_on and self._fits(before, token_id))
        return fits

    def _fits(self, path: Path, token_id: int) -> bool:
        self._go_to(path)
        if token_id in self._grammar.eos_ids:
            return not self._ignore_eos and self._inner.is_accepting()
        return self._inner.validate_tokens([token_id]) == 1

    def choices(self, after: Sequence[int], most: int) -> list[int]:
        """The tokens that can follow `after` (which is allowed) and do not end the text, if there are no more
        than `most`; else none."""
        if not self._grammar.eos_ids.isdisjoint(after):
            return []
        mask = self._mask_after(tuple(after))
        words = np.flatnonzero(mask).tolist()
        if len(words) > most + len(self._grammar.eos_ids):
            return []
        found = [32 * word + bit for word in words for bit in range(32) if int(mask[word]) >> bit & 1]
        found = [token_id for token_id in found if token_id not in self._grammar.eos_ids]
        return found if len(found) <= most else []

    def _mask_after(self, path: Path) -> Mask:
        mask = self._masks.get(path)
        if mask is None:
            mask = self._compute_mask(path)
            if self._inner.is_error():
                self._grammar.forget()
                mask = self._compute_mask(path)
            if self._inner.is_error():
                mask[:] = 0
                if not path:
                    self.error = f"the grammar is too complex here: {one_line(self._inner.get_error())}"
            self._masks[path] = mask
        return mask

    def _compute_mask(self, path: Path) -> Mask:
        grammar = self._grammar
        mask = np.zeros(-(-grammar.num_mask_bits // 32), np.uint32)
        self._go_to(path)
        if not self._inner.is_error():
            self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._ignore_eos:
            for token_id in grammar.eos_ids:
                mask[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        return mask[: -(-grammar.vocab_size // 32)]

    def _go_to(self, path: Path) -> None:
        """Take the inner matcher to the end of a path of allowed tokens."""
        if self._inner.is_error():
            self._begin_anew()
        self._rewind(path)
        if len(path) > len(self._ahead):
            self._inner.consume_tokens(list(path[len(self._ahead) :]))
        self._ahead = path

    def _rewind(self, path: Path = ()) -> None:
        """Take back what the inner matcher has taken that is not on the path."""
        num_shared = 0
        for mine, wanted in zip(self._ahead, path, strict=False):
            if mine != wanted:
                break
            num_shared += 1
        if num_shared < len(self._ahead):
            self._inner.rollback(len(self._ahead) - num_shared)
            self._ahead = self._ahead[:num_shared]

    def _begin_anew(self) -> None:
        """The inner matcher never leaves a failure: there is a new one, with new automata if need be."""
        for is_second_try in (False, True):
            if is_second_try:
                self._grammar.forget()
            self._inner, self._ahead = self._grammar.fresh(), ()
            self._inner.consume_tokens(self._token_ids)
            if not self._inner.is_error():
                return
