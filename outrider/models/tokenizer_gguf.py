"""Making a `Tokenizer` from GGUF metadata: tokens, types, merges or scores.

A GGUF file names its pre-tokenizer only; what the names mean is listed here (`_PATTERNS`). With these the ids
equal llama.cpp's. A name that is not listed is an error: a wrong split would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.models.tensors import CheckpointError
from outrider.models.tokenizer import Tokenizer, Vocabulary, byte_alphabet

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types of the format
_KEY = "tokenizer.ggml."

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]
_DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]

# Patterns, each of which splits what the one before has left into matches and the rest -> names in
# tokenizer.ggml.pre that stand for them.
_PATTERNS: list[tuple[list[str], str]] = [
    ([r"\p{N}", _GPT2], "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    ([_GPT2], "gpt-2 phi-2 mpt olmo jais trillion gigachat exaone4 mellum"),
    ([_LLAMA3], "llama3 llama-v3 llama-bpe falcon3 pixtral dbrx smaug-bpe"),
    ([_QWEN2], "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan"),
    ([_QWEN35], "qwen35"),
    ([_TEKKEN], "tekken"),
    (_DEEPSEEK_CODER, "deepseek-coder"),
    (_DEFAULT, "default"),
]
_PRE_TOKENIZERS = {name: patterns for patterns, names in _PATTERNS for name in names.split()}
# Words that are in the vocabulary as a whole are taken before any merge; a text begins with the BOS token
# unless the file says otherwise.
_LLAMA3_LIKE = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})


def tokenizer_from_gguf(metadata: Mapping[str, Any], file: str) -> Tokenizer:
    """The tokenizer that the metadata of `file` describe; it is built in full at the first `encode`."""
    model = metadata.get(_KEY + "model")
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"{file}: {_KEY}model {model!r} is not supported; supported: gpt2, llama")
    tokens = _array(metadata, "tokens", list, file)
    vocabulary = _vocabulary(metadata, tokens, file)
    if model == "gpt2":
        merges, patterns = _array(metadata, "merges", list, file), _pre_tokenizer(metadata, file)
        whole_words_first = metadata.get(_KEY + "pre") in _LLAMA3_LIKE
        build = partial(_byte_level_bpe, tokens, merges, patterns, whole_words_first)
    else:
        scores = _array(metadata, "scores", np.ndarray, file)
        unknown = _token_id(metadata, "unknown", tokens, file) or 0
        build = partial(_scored_bpe, tokens, scores, unknown, _prefixes_space(metadata))

    def make() -> tokenizers.Tokenizer:
        try:
            backend = build()
            _add_literals(backend, vocabulary)
            _surround(backend, metadata, tokens, file)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: its tokenizer cannot be built: {error}") from error
        return backend

    return Tokenizer(
        vocabulary,
        make,
        special_tokens=_special_texts(metadata, tokens, file),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Ids 0..255 are bytes: for random-weight models that come without a tokenizer."""
    if vocab_size < 256:
        raise CheckpointError(
            f"a byte tokenizer needs a vocabulary of at least 256, the model has {vocab_size}"
        )
    pieces = list(byte_alphabet())
    vocabulary = Vocabulary(pieces=pieces, literals={}, special_ids=frozenset(), coding="byte_level")
    return Tokenizer(vocabulary, lambda: _byte_level_bpe(pieces, [], [], False), special_tokens={})


def _array(metadata: Mapping[str, Any], key: str, kind: type, file: str) -> Any:
    value = metadata.get(_KEY + key)
    if not isinstance(value, kind):
        raise CheckpointError(f"{file}: {_KEY}{key} is missing or not an array of the right kind")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, tokens: list[str], file: str) -> int | None:
    token_id = metadata.get(f"{_KEY}{name}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"{file}: {_KEY}{name}_token_id {token_id!r} is not one of {len(tokens)} tokens"
        )
    return token_id


def _prefixes_space(metadata: Mapping[str, Any]) -> bool:
    return bool(metadata.get(_KEY + "add_space_prefix", True))


def _vocabulary(metadata: Mapping[str, Any], tokens: list[str], file: str) -> Vocabulary:
    types = metadata.get(_KEY + "token_type")
    kinds = np.full(len(tokens), _NORMAL) if types is None else np.asarray(types)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{file}: {_KEY}token_type has {len(kinds)} entries for {len(tokens)} tokens")
    literal = np.flatnonzero(np.isin(kinds, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
    is_scored = metadata[_KEY + "model"] == "llama"
    return Vocabulary(
        pieces=tokens,
        literals={index: tokens[index] for index in literal},
        special_ids=frozenset(index for index in literal if kinds[index] != _USER_DEFINED),
        coding="byte_fallback" if is_scored else "byte_level",
        strip_first_space=is_scored and _prefixes_space(metadata),
    )


def _pre_tokenizer(metadata: Mapping[str, Any], file: str) -> list[str]:
    name = metadata.get(_KEY + "pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file}: pre-tokenizer {name!r} ({_KEY}pre) is not known; known: {', '.join(_PRE_TOKENIZERS)}. "
            "Give a directory with a tokenizer.json with --tokenizer"
        )
    return _PRE_TOKENIZERS[name]


def _special_texts(metadata: Mapping[str, Any], tokens: list[str], file: str) -> dict[str, str]:
    """The names that chat templates know special tokens by."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}
    ids = {name: _token_id(metadata, key, tokens, file) for key, name in names.items()}
    return {f"{name}_token": tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _byte_level_bpe(
    tokens: list[str], merges: list[str], patterns: list[str], whole_words_first: bool
) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(tokens)},
        merges=[_merge_pair(merge) for merge in merges],
        ignore_merges=whole_words_first,
    )
    backend = Tokenizer(model)
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    return backend


def _merge_pair(merge: str) -> tuple[str, str]:
    left, blank, right = merge.partition(" ")
    if not (left and blank and right):
        raise ValueError(f"merge {merge!r} is not two pieces with a blank between")
    return left, right


def _scored_bpe(
    tokens: list[str], scores: np.ndarray, unknown: int, prefix_space: bool
) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE: whichever two neighbours make the best-scored piece are joined first."""
    from tokenizers import Tokenizer, models, normalizers

    if len(scores) != len(tokens):
        raise ValueError(f"{_KEY}scores has {len(scores)} entries for {len(tokens)} tokens")
    ids = {piece: index for index, piece in enumerate(tokens)}
    merges = []
    for index in np.argsort(-scores, kind="stable").tolist():
        piece = tokens[index]
        cuts = range(1, len(piece))
        merges += [(piece[:cut], piece[cut:]) for cut in cuts if piece[:cut] in ids and piece[cut:] in ids]
    model = models.BPE(vocab=ids, merges=merges, unk_token=tokens[unknown], byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    first: list[Any] = [normalizers.Prepend("▁")] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    return backend


def _add_literals(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Special and added tokens, which are recognised in any text."""
    from tokenizers import AddedToken

    for token_id, text in vocabulary.literals.items():
        if token_id in vocabulary.special_ids:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        else:
            backend.add_tokens([AddedToken(text, special=False, normalized=False)])


def _surround(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str], file: str
) -> None:
    """The tokens that go before and after every text."""
    from tokenizers import processors

    adds_bos = metadata.get(_KEY + "model") == "llama" or metadata.get(_KEY + "pre") in _LLAMA3_LIKE
    template, special = ["$A"], []
    for key, default, place in (("bos", adds_bos, 0), ("eos", False, 2)):
        token_id = _token_id(metadata, key, tokens, file)
        if token_id is not None and metadata.get(f"{_KEY}add_{key}_token", default):
            template.insert(place, tokens[token_id])
            special.append((tokens[token_id], token_id))
    if special:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
