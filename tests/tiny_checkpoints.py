"""What tiny checkpoints made by tests have in common."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models


def save_tokenizer(folder: str | Path) -> None:
    """A tokenizer.json of 90 pieces, one character each."""
    tokenizer = Tokenizer(models.BPE(vocab={chr(33 + index): index for index in range(90)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
