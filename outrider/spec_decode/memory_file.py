"""Past outputs in a file, so that drafts from them survive a restart (`draft_memory_file`).

A file is written whole and then takes the place of the old one. Whatever is not exactly such a file, for this
model's token ids, is refused with one sentence: it may be somebody's, so it is never overwritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from outrider.config_fields import ConfigError

MAGIC = b"OUTRIDER DRAFT MEMORY\n"
VERSION = 1
_HEADER = struct.Struct("<22sI32s")  # magic, version, SHA-256 of what follows

Tokens = list[int]


class _Content(msgspec.Struct):
    vocabulary: str
    texts: list[tuple[bytes, bytes]]  # tenant, token ids as int32 in order of arrival


class MemoryFile:
    """One file of past outputs."""

    def __init__(self, path: str | Path, vocabulary: str, vocab_size: int) -> None:
        """`vocabulary` names whose token ids these are."""
        self.path = Path(path)
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size

    def load(self) -> list[tuple[bytes, Tokens]]:
        """(tenant, token ids) of all outputs, oldest first; none if there is no file yet."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            self._check_folder()
            return []
        except OSError as error:
            raise self._refusal(f"cannot be read ({error.strerror})") from None
        content = self._decode(data)
        if content.vocabulary != self._vocabulary:
            raise self._refusal("holds the token ids of another tokenizer")
        texts: list[tuple[bytes, Tokens]] = []
        for key, packed in content.texts:
            if len(packed) % 4:
                raise self._refusal("is damaged (a text ends inside a token)")
            ids = array("i", packed).tolist()
            if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
                raise self._refusal("is damaged (it holds ids that no token has)")
            texts.append((key, ids))
        return texts

    def save(self, texts: Sequence[tuple[bytes, Tokens]]) -> None:
        """Write all outputs; the file is the old one or the new one at any time. OSError if it cannot be."""
        packed = [(key, array("i", ids).tobytes()) for key, ids in texts]
        body = msgspec.msgpack.encode(_Content(self._vocabulary, packed))
        header = _HEADER.pack(MAGIC, VERSION, hashlib.sha256(body).digest())
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name + ".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(header + body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _decode(self, data: bytes) -> _Content:
        if not data.startswith(MAGIC):
            raise self._refusal("is not a file of past outputs")
        if len(data) < _HEADER.size:
            raise self._refusal("is damaged (it is cut off)")
        _, version, digest = _HEADER.unpack_from(data)
        if version != VERSION:
            raise self._refusal(f"has format {version}, and this version of Outrider reads {VERSION}")
        body = data[_HEADER.size :]
        if hashlib.sha256(body).digest() != digest:
            raise self._refusal("is damaged (its checksum differs)")
        try:
            return msgspec.msgpack.decode(body, type=_Content)
        except msgspec.MsgspecError as error:
            raise self._refusal(f"is damaged ({error})") from None

    def _check_folder(self) -> None:
        if not os.access(self.path.parent, os.W_OK):
            raise self._refusal("cannot be made: its folder is not there or not writable")

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"the draft memory {self.path} {what}; move it away or change draft_memory_file in "
            "--speculative-config"
        )
