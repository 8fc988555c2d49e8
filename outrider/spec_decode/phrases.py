"""Drafts from a shipped table of what the target usually writes after a few tokens.

It knows nothing of the request, so it is asked where the sources that do have little to say.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import outrider._native as _native
from outrider.config_fields import ConfigError
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts, RequestView, ResultView, wants_source

SOURCE = "phrases"
MOST_NODES = 3  # of a request: what is less likely is not worth a look
LEAST_SURVIVAL = 0.08
_FORMAT = 1
_LONGEST: int = _native.LONGEST_PHRASE


class PhraseProposer:
    """Looks the last tokens of every request up in a table."""

    needs_hidden = False
    learns = False  # `observe` has nothing to do

    def __init__(self, table: _native.PhraseTable, *, branches: bool = False) -> None:
        self._table = table
        self._branches = branches
        self._num_lookups = self._num_matches = 0

    def propose(self, requests: Sequence[RequestView], limits: Sequence[int]) -> list[Drafts]:
        return [
            self.continue_after(request, (), limit) if wants_source(request.params, SOURCE) else NO_DRAFTS
            for request, limit in zip(requests, limits, strict=True)
        ]

    def continue_after(self, request: RequestView, after: Sequence[int], limit: int) -> Drafts:
        """A draft for the request's text as if it had gone on with `after`."""
        limit = min(limit, MOST_NODES)
        if limit <= 0:
            return NO_DRAFTS
        self._num_lookups += 1
        tail = [*request.token_ids[-_LONGEST:], *after][-_LONGEST:]
        token_ids, parents, survival = self._table.propose(tail, limit, self._branches, LEAST_SURVIVAL)
        if not token_ids:
            return NO_DRAFTS
        self._num_matches += 1
        return Drafts(tuple(token_ids), tuple(parents), tuple(survival), (SOURCE,) * len(token_ids))

    def observe(self, results: Sequence[ResultView], hidden: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {
            "contexts": len(self._table),
            "table_bytes": self._table.memory_bytes,
            "lookups": self._num_lookups,
            "matches": self._num_matches,
        }


def vocabulary_name(token_bytes: Sequence[bytes]) -> str:
    """Equal for models whose token ids mean the same text."""
    return hashlib.sha256(b"".join(b"%d:%s" % (len(text), text) for text in token_bytes)).hexdigest()


def save_phrases(path: str | Path, table: Mapping[str, NDArray[Any]], vocabulary: str) -> None:
    """Write a table for models with this vocabulary."""
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            format=np.array(_FORMAT),
            vocabulary=np.frombuffer(bytes.fromhex(vocabulary), np.uint8),
            fingerprints=table["fingerprints"],
            token_ids=table["token_ids"],
            chances=table["chances"],
        )


def load_phrases(path: str | Path, vocabulary: str) -> _native.PhraseTable | None:
    """The table of a file; None if it is for another vocabulary, ConfigError if it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if int(file["format"]) != _FORMAT:
                raise ValueError(f"its format is {int(file['format'])}, this version reads {_FORMAT}")
            if file["vocabulary"].tobytes().hex() != vocabulary:
                return None
            return _native.PhraseTable(file["fingerprints"], file["token_ids"], file["chances"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is not a table of phrases ({error}); install Outrider again") from None


def shipped_phrases(vocabulary: str) -> _native.PhraseTable | None:
    """The package's own table for this vocabulary, if it has one."""
    assets = resources.files("outrider") / "assets"
    if not assets.is_dir():
        return None
    for entry in sorted(assets.iterdir(), key=lambda entry: entry.name):
        if entry.name.startswith("phrases-") and entry.name.endswith(".npz"):
            with resources.as_file(entry) as path:
                table = load_phrases(path, vocabulary)
            if table is not None:
                return table
    return None
