"""Making a `Tokenizer` from a model directory: tokenizer.json and the files beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from outrider.models.safetensors import read_json
from outrider.models.tensors import CheckpointError
from outrider.models.tokenizer import Tokenizer, vocabulary_of


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
