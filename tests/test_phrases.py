"""The table of phrases: how it is made, looked up, stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import outrider._native as native
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_proposers import FakeRequest

from outrider.config_fields import ConfigError
from outrider.models.loader import load_checkpoint
from outrider.spec_decode.phrases import (
    PhraseProposer,
    load_phrases,
    save_phrases,
    shipped_phrases,
    vocabulary_name,
)
from outrider.training.phrases import CANDIDATES, build, hashes

NAME = vocabulary_name([b"a", b"b"])


def table_of(texts: list[list[int]], most: int = 1000) -> dict[str, np.ndarray]:
    """A table from texts whose every next token was certain."""
    tokens = [np.array(text, np.int32) for text in texts]
    wanted = [np.ones(len(text) - 1, bool) for text in texts]
    ids = [np.full((len(text) - 1, CANDIDATES), -1, np.int32) for text in texts]
    chances = [np.zeros((len(text) - 1, CANDIDATES), np.float32) for text in texts]
    for text, row, chance in zip(texts, ids, chances, strict=True):
        row[:, 0], chance[:, 0] = text[1:], 1.0
    return build(tokens, wanted, ids, chances, most)


def native_table(table: dict[str, np.ndarray]) -> native.PhraseTable:
    return native.PhraseTable(table["fingerprints"], table["token_ids"], table["chances"])


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_contexts_are_named_alike_by_both_sides(context: list[int]) -> None:
    columns = [np.array([token], np.int64) for token in context]
    with np.errstate(over="ignore"):
        assert int(hashes(columns)[0] >> np.uint64(32)) == native.PhraseTable.fingerprint(context)


def test_what_was_written_is_drafted() -> None:
    table = native_table(table_of([[1, 2, 3, 4, 5, 6]] * 4))
    tokens, parents, survival = table.propose([1], 4, False, 0.05)
    assert tokens == [2, 3, 4, 5] and parents == [-1, 0, 1, 2]
    assert survival == sorted(survival, reverse=True) and survival[0] > 0.5


def test_longer_contexts_are_believed_before_shorter_ones() -> None:
    texts = [[7, 1, 2]] * 6 + [[8, 1, 3]] * 2
    table = native_table(table_of(texts))
    assert table.propose([1], 1, False, 0.05)[0] == [2]
    assert table.propose([8, 1], 1, False, 0.05)[0] == [3]
    assert table.propose([9, 9, 7, 1], 1, False, 0.05)[0] == [2]  # of unknown beginning: its known end counts


def test_a_tree_holds_both_continuations_and_a_chain_the_better() -> None:
    table = native_table(table_of([[1, 2, 4]] * 5 + [[1, 3, 5]] * 4))
    tokens, parents, survival = table.propose([1], 4, True, 0.05)
    assert dict(zip(tokens, parents, strict=True)) == {2: -1, 3: -1, 4: tokens.index(2), 5: tokens.index(3)}
    assert survival == sorted(survival, reverse=True)
    assert table.propose([1], 4, False, 0.05)[0] == [2, 4]


def test_a_context_that_says_what_its_end_says_is_left_out() -> None:
    certain = table_of([[9, 1, 2]] * 20 + [[8, 1, 2]] * 20)
    with np.errstate(over="ignore"):
        prints = set(certain["fingerprints"].view(np.uint32).tolist())
    assert native.PhraseTable.fingerprint([1]) in prints
    assert native.PhraseTable.fingerprint([9, 1]) not in prints


def test_the_most_telling_contexts_stay() -> None:
    texts = [[1, 2]] * 9 + [[3, 4]] * 2
    assert len(table_of(texts, most=1)["fingerprints"]) == 1
    assert native_table(table_of(texts, most=1)).propose([1], 1, False, 0.05)[0] == [2]


def test_requests_are_drafted_for_after_what_they_say() -> None:
    proposer = PhraseProposer(native_table(table_of([[1, 2, 3, 4, 5]] * 4)))
    known, unknown = FakeRequest("a", [6, 6, 1, 2]), FakeRequest("b", [6])
    first, second = proposer.propose([known, unknown], [8, 8])
    assert first.token_ids == (3, 4, 5) and not second.token_ids
    assert proposer.continue_after(known, (3,), 1).token_ids == (4,)


def test_a_file_is_for_one_vocabulary_and_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "phrases-x.npz"
    save_phrases(path, table_of([[1, 2, 3]] * 3), NAME)
    table = load_phrases(path, NAME)
    assert table is not None and table.propose([1], 1, False, 0.05)[0] == [2]
    assert load_phrases(path, vocabulary_name([b"a", b"c"])) is None
    for content in (b"", b"not a table", path.read_bytes()[:-200]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"phrases-x.npz is not a table of phrases"):
            load_phrases(path, NAME)


@pytest.mark.parametrize("wrong", ["order", "width"])
def test_a_malformed_table_is_refused(wrong: str) -> None:
    prints, ids, chances = np.array([1, 2], np.int32), np.zeros((2, 2), np.int32), np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match="must ascend" if wrong == "order" else "two token ids"):
        if wrong == "order":
            native.PhraseTable(prints[::-1].copy(), ids, chances)
        else:
            native.PhraseTable(prints, ids[:1], chances)


@pytest.mark.model
def test_the_built_in_model_has_a_table(builtin_model: Path) -> None:
    tokenizer = load_checkpoint(str(builtin_model)).tokenizer
    table = shipped_phrases(vocabulary_name(tokenizer.token_bytes()))
    assert table is not None and len(table) > 100_000 and table.memory_bytes < 8 * 2**20
    tokens, _, survival = table.propose(tokenizer.encode("On the other"), 3, False, 0.05)
    assert tokenizer.decode(tokens).startswith(" hand,") and survival[0] > 0.5
