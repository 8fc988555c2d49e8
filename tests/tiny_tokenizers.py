"""Tokenizers trained on the spot, of the kinds that checkpoints carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizer_texts import varied_texts
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from outrider.models.tokenizer import Tokenizer, byte_alphabet
from outrider.models.tokenizer_json import tokenizer_from_directory

TEXTS = varied_texts(1000)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train_byte_level(with_bos: bool = False) -> Library:
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=list(byte_alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:500], trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return tokenizer


def train_sentencepiece_like(prepend: bool = True) -> Library:
    """Normaliser, byte fallback and decoder as Llama 2's tokenizer.json has them."""
    first: list[Any] = [normalizers.Prepend("▁")] if prepend else []
    trained = Library(models.BPE())
    trained.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special + bytes_, initial_alphabet=["▁"], show_progress=False
    )
    trained.train_from_iterator([word for text in TEXTS[:200] for word in text.split()], trainer)
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    options = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    tokenizer = Library(models.BPE(vocab=state["vocab"], merges=merges, **options))
    tokenizer.normalizer = trained.normalizer
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def save(library: Library, folder: Path, **config: Any) -> Tokenizer:
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer_from_directory(str(folder))
