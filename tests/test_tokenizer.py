"""Token ids and chat prompts against oracles that are not us: llama.cpp's ids and transformers."""

from __future__ import annotations

import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import TEXTS, save, train_byte_level, train_sentencepiece_like
from tokenizers import Tokenizer as Library
from tokenizers import decoders

from outrider.models.loader import load_tokenizer
from outrider.models.tensors import CheckpointError
from outrider.models.tokenizer import Tokenizer
from outrider.models.tokenizer_gguf import byte_tokenizer, tokenizer_from_gguf
from outrider.models.tokenizer_json import tokenizer_from_directory

# The built-in model ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built_in() -> Tokenizer:
    return load_tokenizer("smollm2-135m")


@pytest.mark.model
def test_ids_of_the_built_in_model_equal_llama_cpp_on_1000_texts(built_in: Tokenizer) -> None:
    fixture = Path(__file__).parent / "data" / "smollm2_token_ids.json"
    cases = json.loads(fixture.read_text(encoding="utf-8"))
    assert [text for text, _ in cases] == TEXTS
    assert sum(len(ids) for _, ids in cases) > 30_000
    for text, ids in cases:
        assert built_in.encode(text, add_special_tokens=False) == ids, ascii(text)
        assert built_in.encode(text) == ids, "this model adds no special tokens"
        assert built_in.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_only_the_bytes_that_the_vocabulary_lacks_vanish(built_in: Tokenizer) -> None:
    lacking = [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)]
    assert set(range(256)) - {piece[0] for piece in built_in.token_bytes() if len(piece) == 1} == set(lacking)
    for code in range(0x80):
        expected = "" if code in lacking else chr(code)
        assert built_in.decode(built_in.encode(chr(code))) == expected


@pytest.mark.model
def test_the_built_in_model_knows_its_special_tokens_and_template(built_in: Tokenizer) -> None:
    assert built_in.special_ids == frozenset(range(17))
    assert built_in.token_bytes()[1] == b"<|im_start|>"
    ids = built_in.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert built_in.decode(ids) == "user\nhi"
    assert built_in.apply_chat_template([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


# tokenizer.json --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bos", [False, True])
def test_ids_and_texts_of_a_byte_level_tokenizer_equal_transformers(tmp_path: Path, with_bos: bool) -> None:
    ours = save(train_byte_level(with_bos), tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        for added in (False, True):
            ids = theirs.encode(text, add_special_tokens=added)
            assert ours.encode(text, add_special_tokens=added) == ids, ascii(text)
        for skipped in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skipped, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skipped) == expected
        assert ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@pytest.mark.parametrize("prepend", [False, True])
def test_ids_and_texts_of_a_byte_fallback_tokenizer_equal_transformers(tmp_path: Path, prepend: bool) -> None:
    ours = save(train_sentencepiece_like(prepend), tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    num_fallbacks = 0
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids, ascii(text)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False) == text
        num_fallbacks += any(3 <= token_id < 259 for token_id in ids)
    assert num_fallbacks > 100


def test_special_tokens_are_skipped_and_added_ones_are_not(tmp_path: Path) -> None:
    tokenizer = save(train_byte_level(), tmp_path)
    ids = tokenizer.encode("<|im_start|><think>x")
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids) == "<think>x"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|><think>x"


@given(st.lists(st.integers(0, 899), max_size=12), st.integers(0, 12))
def test_bytes_of_the_tokens_join_to_the_text_wherever_it_is_cut(token_ids: list[int], cut: int) -> None:
    tokenizer = _shared_byte_level()
    table = tokenizer.token_bytes()
    parts = [b"".join(table[i] for i in part) for part in (token_ids[:cut], token_ids[cut:])]
    assert b"".join(parts).decode(errors="replace") == tokenizer.decode(token_ids, skip_special_tokens=False)


_cache: list[Tokenizer] = []


def _shared_byte_level() -> Tokenizer:
    if not _cache:
        _cache.append(tokenizer_from_gguf(gguf_metadata(train_byte_level()), "x.gguf"))
    return _cache[0]


def test_truncation_and_padding_left_in_the_file_are_ignored(tmp_path: Path) -> None:
    library = train_byte_level()
    library.enable_truncation(3)
    library.enable_padding(length=50)
    assert len(save(library, tmp_path).encode("one two three four five six")) > 5


def test_a_model_may_have_more_ids_than_the_tokenizer_or_fewer(tmp_path: Path) -> None:
    tokenizer = save(train_byte_level(), tmp_path)
    size = tokenizer.vocab_size
    assert len(tokenizer.token_bytes()) == size
    tokenizer.attach(size + 5, [2], None)
    assert tokenizer.token_bytes()[size:] == [b""] * 5
    assert tokenizer.decode([size + 4]) == ""
    with pytest.raises(ValueError, match=f"token id {size + 5} is not in the vocabulary"):
        tokenizer.decode([size + 5])
    tokenizer.attach(size - 1, [2], None)
    assert len(tokenizer.token_bytes()) == size - 1
    with pytest.raises(ValueError, match=f"token '<think>' of id {size - 1}, but the model has only"):
        tokenizer.encode("a<think>b")


def test_a_tokenizer_alone_knows_how_many_ids_its_model_has(tmp_path: Path) -> None:
    save(train_byte_level(), tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 5000}')
    assert len(load_tokenizer(str(tmp_path)).token_bytes()) == 5000


def test_a_lone_surrogate_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        save(train_byte_level(), tmp_path).encode("a\ud800b")


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        tokenizer_from_directory(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a usable tokenizer"):
        tokenizer_from_directory(str(tmp_path))
    library = train_byte_level()
    library.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="'WordPiece' are not supported"):
        save(library, tmp_path)


# GGUF metadata ---------------------------------------------------------------------------------------------


def gguf_metadata(library: Library, pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """What a conversion to GGUF writes for a byte-level tokenizer."""
    state = json.loads(library.to_str())
    vocab = library.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {token["content"]: token["special"] for token in state["added_tokens"]}
    kinds = [{True: 3, False: 4, None: 1}[added.get(token)] for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array(kinds),
        "merges": merges,
        "eos_token_id": 0,
        "bos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def test_a_byte_level_tokenizer_from_gguf_metadata_has_the_ids_of_its_origin() -> None:
    library = train_byte_level()
    tokenizer = tokenizer_from_gguf(gguf_metadata(library), "x.gguf")
    for text in TEXTS:
        assert tokenizer.encode(text) == library.encode(text).ids, ascii(text)


def test_the_qwen2_split_has_the_ids_of_transformers() -> None:
    library = train_byte_level()
    state = json.loads(library.to_str())["model"]
    theirs = transformers.Qwen2Tokenizer(vocab=state["vocab"], merges=[tuple(m) for m in state["merges"]])
    tokenizer = tokenizer_from_gguf(gguf_metadata(library, "qwen2"), "x.gguf")
    plain = tokenizer_from_gguf(gguf_metadata(library, "gpt-2"), "x.gguf")
    num_differing = 0
    for text in TEXTS:
        # Special tokens are the other test's; transformers normalises, GGUF tokenizers do not.
        text = unicodedata.normalize("NFC", text.replace("<", "("))
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text), ascii(text)
        num_differing += ids != plain.encode(text)
    assert num_differing > 100


def test_a_scored_vocabulary_from_gguf_metadata_has_the_ids_of_its_origin() -> None:
    library = train_sentencepiece_like()
    vocab = library.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    scores = -np.arange(len(tokens), dtype=np.float32)  # merged pieces come in the order of their merges
    kinds = np.array([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    metadata = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "bos_token_id": 1,
        "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}, "x.gguf")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [1, *library.encode(text).ids], ascii(text)
        assert tokenizer.decode(ids) == text


def test_tokens_around_a_text_follow_the_file() -> None:
    library = train_byte_level()
    body = library.encode("abc").ids

    def encoded(**changes: Any) -> list[int]:
        return tokenizer_from_gguf(gguf_metadata(library, **changes), "x.gguf").encode("abc")

    assert encoded() == body
    assert encoded(add_bos_token=True) == [1, *body]
    assert encoded(add_eos_token=True) == [*body, 0]
    assert encoded(add_bos_token=True, add_eos_token=True) == [1, *body, 0]
    assert encoded(pre="llama-bpe")[0] == 1
    assert encoded(pre="llama-bpe", add_bos_token=False)[0] != 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "some-new-one"}, r"pre-tokenizer 'some-new-one'.*known: smollm"),
        ({"model": "bert"}, r"model 'bert' is not supported; supported: gpt2, llama"),
        ({"tokens": None}, r"ggml\.tokens is missing"),
        ({"merges": None}, r"ggml\.merges is missing"),
        ({"model": "llama"}, r"ggml\.scores is missing"),
        ({"token_type": np.array([1])}, r"token_type has 1 entries"),
        ({"eos_token_id": 10**6}, r"eos_token_id 1000000 is not one of"),
        ({"bos_token_id": "x"}, r"bos_token_id 'x' is not one of"),
        ({"merges": ["ab"]}, r"merge 'ab' is not two pieces"),
        ({"merges": ["a zzzzzz"]}, r"cannot be built"),
    ],
)  # fmt: skip
def test_gguf_metadata_that_cannot_be_used_say_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        tokenizer_from_gguf(gguf_metadata(train_byte_level(), **changes), "x.gguf").encode("a")
    assert "x.gguf" in str(caught.value)


def test_the_byte_tokenizer_is_the_text_itself() -> None:
    tokenizer = byte_tokenizer(256)
    for text in TEXTS[:100]:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    with pytest.raises(CheckpointError, match="at least 256"):
        byte_tokenizer(255)


def test_threads_may_share_a_tokenizer_from_its_first_use() -> None:
    tokenizer = tokenizer_from_gguf(gguf_metadata(train_byte_level()), "x.gguf")
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(tokenizer.encode, TEXTS[:200]))
    assert results == [tokenizer.encode(text) for text in TEXTS[:200]]
