"""Planted faults of grammars: masks of the wrong place, drafts not taken back, ends in the wrong place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from planting import Patch, fault

from outrider.sampling.grammar import GrammarMatcher, Mask, Path


@fault
def a_node_masked_like_its_parent(patch: Patch) -> None:
    original = GrammarMatcher.masks

    def masks(self: GrammarMatcher, token_ids: Sequence[int] = (), parents: Sequence[int] = ()) -> Any:
        right = original(self, token_ids, parents)
        return [right[0], *(right[parent + 1] for parent in parents)]

    patch.setattr(GrammarMatcher, "masks", masks)


@fault
def every_row_masked_like_the_first(patch: Patch) -> None:
    original = GrammarMatcher.masks

    def masks(self: GrammarMatcher, token_ids: Sequence[int] = (), parents: Sequence[int] = ()) -> Any:
        return [original(self)[0]] * (len(token_ids) + 1)

    patch.setattr(GrammarMatcher, "masks", masks)


@fault
def drafts_masked_as_a_chain(patch: Patch) -> None:
    original = GrammarMatcher.masks

    def masks(self: GrammarMatcher, token_ids: Sequence[int] = (), parents: Sequence[int] = ()) -> Any:
        return original(self, token_ids, range(-1, len(parents) - 1))

    patch.setattr(GrammarMatcher, "masks", masks)


@fault
def drafts_that_stay_in_the_grammar(patch: Patch) -> None:
    original = GrammarMatcher.masks

    def masks(self: GrammarMatcher, token_ids: Sequence[int] = (), parents: Sequence[int] = ()) -> Any:
        result = original(self, token_ids, parents)
        self._ahead = ()
        return result

    patch.setattr(GrammarMatcher, "masks", masks)


@fault
def masks_kept_for_the_next_token(patch: Patch) -> None:
    original = GrammarMatcher.append

    def append(self: GrammarMatcher, token_id: int) -> bool:
        kept = dict(self._masks)
        is_over = original(self, token_id)
        self._masks = kept
        return is_over

    patch.setattr(GrammarMatcher, "append", append)


@fault
def grammars_that_do_not_end_the_text(patch: Patch) -> None:
    original = GrammarMatcher.append
    patch.setattr(GrammarMatcher, "append", lambda self, token_id: original(self, token_id) and False)


@fault
def an_end_of_sequence_where_the_text_may_not_end(patch: Patch) -> None:
    original = GrammarMatcher._mask_after

    def mask_after(self: GrammarMatcher, path: Path) -> Mask:
        mask = original(self, path).copy()
        if mask.any():
            for token_id in self._grammar.eos_ids:
                mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return mask

    patch.setattr(GrammarMatcher, "_mask_after", mask_after)


@fault
def an_ignored_end_of_sequence_that_the_grammar_allows(patch: Patch) -> None:
    original = GrammarMatcher.__init__
    patch.setattr(GrammarMatcher, "__init__", lambda self, grammar, **_: original(self, grammar))


@fault
def a_grammar_that_starts_over_after_a_failure(patch: Patch) -> None:
    original = GrammarMatcher.append

    def append(self: GrammarMatcher, token_id: int) -> bool:
        if len(self._token_ids) == 3:
            self._inner, self._ahead = self._grammar.fresh(), ()
        return original(self, token_id)

    patch.setattr(GrammarMatcher, "append", append)
