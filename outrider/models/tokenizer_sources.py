"""Making a `Tokenizer` from what a checkpoint carries: tokenizer.json, or GGUF metadata.

A GGUF file names its pre-tokenizer only; what the names mean is listed here (`_PRE_TOKENIZERS`). With these
the ids equal llama.cpp's. A name that is not listed is an error: a wrong split would go unnoticed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.models.safetensors import read_json
from outrider.models.tensors import CheckpointError
from outrider.models.tokenizer import Tokenizer, Vocabulary, byte_alphabet, vocabulary_of

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # GGUF token types

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
_FALCON = [r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"]
_DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]
_DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]

# tokenizer.ggml.pre -> patterns, each of which splits what the one before has left into matches and the rest.
_PRE_TOKENIZERS: dict[str, list[str]] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), [r"\p{N}", _GPT2]),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4", "mellum"), [_GPT2]),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), [_LLAMA3]),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), [_QWEN2]),
    "qwen35": [_QWEN35],
    "tekken": [_TEKKEN],
    "falcon": _FALCON,
    "deepseek-coder": _DEEPSEEK_CODER,
    "default": _DEFAULT,
}  # fmt: skip
_WHOLE_WORDS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
_ADDS_BOS = _WHOLE_WORDS_FIRST  # unless the file says otherwise


def tokenizer_from_directory(path: str) -> Tokenizer:
    """From tokenizer.json, with tokenizer_config.json and chat_template.jinja where there are any."""
    import tokenizers

    file = os.path.join(path, "tokenizer.json")
    if not os.path.isfile(file):
        raise CheckpointError(
            f"{path}: has no tokenizer.json; give a directory that has one with --tokenizer"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(file)
        backend.no_truncation()  # training leftovers in the file: a prompt is never cut or filled up
        backend.no_padding()
        vocabulary = vocabulary_of(backend, file)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file}: is not a usable tokenizer: {error}") from error
    config_path = os.path.join(path, "tokenizer_config.json")
    config = read_json(config_path) if os.path.isfile(config_path) else {}
    return Tokenizer(
        vocabulary,
        lambda: backend,
        special_tokens=_special_token_texts(config),
        chat_template=_directory_template(path, config),
    )


def _special_token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for key, value in config.items():
        if key.endswith("_token"):
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                texts[key] = content
    return texts


def _directory_template(path: str, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    file = os.path.join(path, "chat_template.jinja")
    if os.path.isfile(file):
        with open(file, encoding="utf-8") as opened:
            return opened.read()
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return {entry["name"]: entry["template"] for entry in template}
    return template


def tokenizer_from_gguf(metadata: Mapping[str, Any], file: str) -> Tokenizer:
    """From the tokens, types, merges or scores of a GGUF file."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _required(metadata, "tokenizer.ggml.tokens", list, file)
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = np.asarray(types if types is not None else [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{file}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens"
        )
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{file}: tokenizer.ggml.model {model!r} is not supported; supported: gpt2, llama"
        )
    literal = np.flatnonzero((kinds == _UNKNOWN) | (kinds == _CONTROL) | (kinds == _USER_DEFINED)).tolist()
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    vocabulary = Vocabulary(
        pieces=tokens,
        literals={index: tokens[index] for index in literal},
        special_ids=frozenset(index for index in literal if kinds[index] != _USER_DEFINED),
        coding="byte_level" if model == "gpt2" else "byte_fallback",
        strip_first_space=model == "llama" and prefix_space,
    )
    if model == "gpt2":
        patterns = _pre_tokenizer(metadata, file)
        merges = _required(metadata, "tokenizer.ggml.merges", list, file)
        build = lambda: _byte_level_bpe(tokens, merges, patterns, metadata)  # noqa: E731
    else:
        scores = _required(metadata, "tokenizer.ggml.scores", np.ndarray, file)
        build = lambda: _sentencepiece_bpe(tokens, scores, prefix_space, metadata)  # noqa: E731

    def make() -> tokenizers.Tokenizer:
        try:
            backend = build()
            _add_literals(backend, vocabulary, metadata)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: its tokenizer cannot be built: {error}") from error
        return backend

    return Tokenizer(
        vocabulary,
        make,
        special_tokens=_gguf_special_texts(metadata, tokens, file),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _required(metadata: Mapping[str, Any], key: str, kind: type, file: str) -> Any:
    value = metadata.get(key)
    if not isinstance(value, kind):
        raise CheckpointError(f"{file}: {key} is missing or not an array of the right kind")
    return value


def _pre_tokenizer(metadata: Mapping[str, Any], file: str) -> list[str]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known: "
            f"{', '.join(_PRE_TOKENIZERS)}. Give a directory with a tokenizer.json with --tokenizer"
        )
    return _PRE_TOKENIZERS[name]


def _gguf_special_texts(metadata: Mapping[str, Any], tokens: list[str], file: str) -> dict[str, str]:
    texts = {}
    names = (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"), ("seperator", "sep"))
    for key, name in names:
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"{file}: tokenizer.ggml.{key}_token_id {token_id!r} is not one of {len(tokens)} tokens"
            )
        texts[f"{name}_token"] = tokens[token_id]
    return texts


def _byte_level_bpe(
    tokens: list[str], merges: list[str], patterns: list[str], metadata: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", "default")
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(tokens)},
        merges=[_merge_pair(merge) for merge in merges],
        ignore_merges=name in _WHOLE_WORDS_FIRST,
    )
    backend = Tokenizer(model)
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge_pair(merge: str) -> tuple[str, str]:
    # A piece may begin with a blank in sentencepiece-like vocabularies, so the first character never splits.
    left, blank, right = merge[1:].partition(" ")
    if not blank:
        raise ValueError(f"merge {merge!r} is not two pieces with a blank between")
    return merge[0] + left, right


def _sentencepiece_bpe(
    tokens: list[str], scores: np.ndarray, prefix_space: bool, metadata: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """Pieces with scores: whichever two neighbours make the best-scored piece are joined first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {piece: index for index, piece in enumerate(tokens)}
    if len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    merges = []
    for index in np.argsort(-scores, kind="stable").tolist():
        piece = tokens[index]
        for cut in range(1, len(piece)):
            if piece[:cut] in ids and piece[cut:] in ids:
                merges.append((piece[:cut], piece[cut:]))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(vocab=ids, merges=merges, unk_token=tokens[unknown], byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _add_literals(backend: tokenizers.Tokenizer, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
    """Special and added tokens, and the ones that go around every text."""
    from tokenizers import AddedToken, processors

    for token_id, text in vocabulary.literals.items():
        special = token_id in vocabulary.special_ids
        token = AddedToken(text, special=special, normalized=False)
        _ = backend.add_special_tokens([token]) if special else backend.add_tokens([token])
    name = metadata.get("tokenizer.ggml.pre")
    adds_bos_itself = vocabulary.coding == "byte_fallback" or name in _ADDS_BOS
    around = [
        ("bos", metadata.get("tokenizer.ggml.add_bos_token", adds_bos_itself)),
        ("eos", metadata.get("tokenizer.ggml.add_eos_token", False)),
    ]
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, wanted in around if wanted}
    present = {
        key: (vocabulary.pieces[token_id], token_id) for key, token_id in ids.items() if token_id is not None
    }
    if present:
        parts = [present[key][0] if key in present else None for key in ("bos",)]
        template = [*filter(None, parts), "$A", *([present["eos"][0]] if "eos" in present else [])]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(present.values())
        )


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Ids 0..255 are bytes: for random-weight models that come without a tokenizer."""
    if vocab_size < 256:
        raise CheckpointError(
            f"a byte tokenizer needs a vocabulary of at least 256, the model has {vocab_size}"
        )
    pieces = list(byte_alphabet())
    return Tokenizer(
        Vocabulary(pieces=pieces, literals={}, special_ids=frozenset(), coding="byte_level"),
        lambda: _byte_level_bpe(pieces, [], [], {}),
        special_tokens={},
    )
