"""Text <-> token ids, over the `tokenizers` library.

The bytes of every id are known (`token_bytes`), and `decode` is nothing but their concatenation: text
that is streamed token by token joins to exactly what `decode` gives for the whole.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.models import chat_template as templates
from outrider.models.chat_template import ChatTemplateError

if TYPE_CHECKING:
    import tokenizers

_BLANK = "▁"  # how sentencepiece vocabularies write a space


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a tokenizer and how they are written.

    `coding` "byte_level": each character of a piece is one byte, in GPT-2's alphabet; "byte_fallback":
    pieces are text with ▁ for a space, and <0xAB> is a byte. `literals` are ids that stand for their own
    text (added and special tokens).
    """

    pieces: Sequence[str]  # by id; "" where there is none
    literals: Mapping[int, str]
    special_ids: frozenset[int]
    coding: str
    strip_first_space: bool = False  # decoding drops one space at the start (sentencepiece's prefix)


class Tokenizer:
    """Encodes, decodes and applies the chat template. Safe to use from several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        make_backend: Callable[[], tokenizers.Tokenizer],
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        """`make_backend` is called at the first `encode`. `special_tokens` are the template's variables
        (bos_token, eos_token, ...)."""
        self._vocabulary = vocabulary
        self._make_backend = make_backend
        self._special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.special_ids = vocabulary.special_ids
        self.vocab_size = len(vocabulary.pieces)
        self.eos_token_ids: tuple[int, ...] = ()
        self.bos_token_id: int | None = None

    def attach(self, vocab_size: int, eos_token_ids: Sequence[int], bos_token_id: int | None) -> None:
        """Take the model's word for what ids there are: those without a piece decode to nothing, and
        pieces whose ids the model lacks cannot be encoded."""
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.__dict__.pop("_token_bytes", None)

    @functools.cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        return self._make_backend()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Special tokens written out in it are recognised; `add_special_tokens` adds
        those that the tokenizer puts around a text (often a beginning-of-text token)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text has a lone surrogate at character {error.start}") from error
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if ids and max(ids) >= self.vocab_size:
            piece = self._vocabulary.pieces[max(ids)]
            raise ValueError(
                f"the text has token {piece!r} of id {max(ids)}, but the model has only {self.vocab_size} ids"
            )
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD."""
        table = self.token_bytes()
        skipped = self.special_ids if skip_special_tokens else frozenset()
        for token_id in token_ids:
            if not 0 <= token_id < len(table):
                raise ValueError(f"token id {token_id} is not in the vocabulary of {len(table)}")
        joined = b"".join(table[token_id] for token_id in token_ids if token_id not in skipped)
        if self._vocabulary.strip_first_space:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self) -> list[bytes]:
        """The bytes of every id below `vocab_size`, special tokens as their text (see `special_ids`).

        The list is shared: do not change it.
        """
        return self._token_bytes

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        vocabulary = self._vocabulary
        decode = _byte_level_pieces if vocabulary.coding == "byte_level" else _byte_fallback_pieces
        table = decode(vocabulary.pieces)
        for token_id, text in vocabulary.literals.items():
            table[token_id] = text.encode()
        return table[: self.vocab_size] + [b""] * (self.vocab_size - len(table))

    def token_to_id(self, text: str) -> int | None:
        """The id of a piece or special token, spelt as in the vocabulary."""
        return self._backend.token_to_id(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text for `messages` (see `chat_template.render`); encode it without special tokens.

        `variables` reach the template as they are. Errors are `ChatTemplateError`.
        """
        return templates.render(
            chat_template or self._template(bool(tools)),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._special_tokens, **variables, "tools": list(tools) if tools else None},
        )

    def _template(self, with_tools: bool) -> str:
        found = self.chat_template
        if isinstance(found, Mapping):
            name = "tool_use" if with_tools and "tool_use" in found else "default"
            if name not in found:
                raise ChatTemplateError(
                    f"the model's chat templates are {sorted(found)}; none is the default"
                )
            return found[name]
        if found is None:
            raise ChatTemplateError("this model has no chat template; set one with --chat-template")
        return found


@functools.lru_cache(maxsize=1)
def byte_alphabet() -> tuple[str, ...]:
    """GPT-2's character for each byte: itself where it prints, else the next one from U+0100."""
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printing]
    return tuple(chr(256 + hidden.index(b)) if b not in printing else chr(b) for b in range(256))


def _byte_level_pieces(pieces: Sequence[str]) -> list[bytes]:
    """All pieces at once: one string, one table look-up, cut at the pieces' lengths."""
    codes = np.frombuffer("".join(pieces).encode("utf-32-le"), np.uint32)
    to_byte = np.full(0x180, -1, np.int16)
    to_byte[[ord(char) for char in byte_alphabet()]] = np.arange(256)
    known = to_byte[np.minimum(codes, 0x17F)]
    data = known.astype(np.uint8).tobytes()
    ends = np.cumsum([len(piece) for piece in pieces]).tolist() if pieces else []
    table = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    if (known < 0).any():  # pieces outside the alphabet (added tokens): their own text
        for index in np.unique(np.searchsorted(ends, np.flatnonzero(known < 0), side="right")):
            table[index] = pieces[index].encode()
    return table


def _byte_fallback_pieces(pieces: Sequence[str]) -> list[bytes]:
    table = [piece.replace(_BLANK, " ").encode() for piece in pieces]
    for index, piece in enumerate(pieces):
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            table[index] = bytes.fromhex(piece[3:5])
    return table


def vocabulary_of(backend: tokenizers.Tokenizer, source: str) -> Vocabulary:
    """What a tokenizer.json's decoder says about its pieces; ValueError where it is of another kind."""
    by_id = {token_id: piece for piece, token_id in backend.get_vocab(with_added_tokens=True).items()}
    pieces = [by_id.get(token_id, "") for token_id in range(max(by_id, default=-1) + 1)]
    added = backend.get_added_tokens_decoder()
    coding, strip = _decoder_kind(backend, source)
    return Vocabulary(
        pieces=pieces,
        literals={token_id: token.content for token_id, token in added.items()},
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        coding=coding,
        strip_first_space=strip,
    )


def _decoder_kind(backend: tokenizers.Tokenizer, source: str) -> tuple[str, bool]:
    """(coding, whether decoding drops the first space)."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    steps = state.get("decoders", [state])
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return "byte_level", False
    if "Metaspace" in kinds:
        step = steps[kinds.index("Metaspace")]
        return "byte_fallback", step.get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds:
        strips = any(s.get("type") == "Strip" and s.get("content") == " " and s.get("start") for s in steps)
        return "byte_fallback", strips
    raise ValueError(
        f"{source}: tokenizers with decoder {state.get('type')!r} are not supported; supported: ByteLevel, "
        "Metaspace, and sequences with ByteFallback"
    )
