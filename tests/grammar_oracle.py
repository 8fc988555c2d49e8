"""Grammars over the tiny vocabulary of the fakes, and what they allow, worked out without the library.

A grammar is an automaton over bytes, written down by hand: which byte leads where, and where a text may end.
"""

from __future__ import annotations

import random
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from outrider.engine.grammars import Grammars
from outrider.engine.output import Vocabulary
from outrider.request import GrammarSpec
from outrider.sampling.grammar import Grammar, GrammarCompiler

A, C3, A9 = b"a\xc3\xa9"


@dataclass(frozen=True)
class Automaton:
    """State 0 is the beginning."""

    edges: dict[int, dict[int, int]]
    ends: frozenset[int]

    def after(self, text: bytes) -> int | None:
        state = 0
        for byte in text:
            following = self.edges.get(state, {}).get(byte)
            if following is None:
                return None
            state = following
        return state

    def allowed(self, text: bytes, vocabulary: Vocabulary) -> set[int]:
        """The tokens that may follow `text`."""
        state = self.after(text)
        assert state is not None
        tokens = {
            token
            for token, piece in enumerate(vocabulary.token_bytes)
            if token not in vocabulary.special_ids and self.after(text + piece) is not None
        }
        return tokens | (set(vocabulary.eos_ids) if state in self.ends else set())

    def is_over(self, text: bytes) -> bool:
        """Whether nothing can follow."""
        return not self.edges.get(self.after(text) or 0)


# As a regular expression, and as an automaton.
_PATTERNS = {
    "(aé)*a?": Automaton({0: {A: 1}, 1: {C3: 2}, 2: {A9: 0}}, frozenset({0, 1})),
    "(a|é){3,5}": Automaton(
        {n: {A: n + 1, C3: n + 10} for n in range(5)} | {n + 10: {A9: n + 1} for n in range(5)},
        frozenset({3, 4, 5}),
    ),
    "a*éa*é": Automaton({0: {A: 0, C3: 1}, 1: {A9: 2}, 2: {A: 2, C3: 3}, 3: {A9: 4}}, frozenset({4})),
    "é+": Automaton({0: {C3: 1}, 1: {A9: 2}, 2: {C3: 1}}, frozenset({2})),
}


def random_grammar(rng: random.Random) -> GrammarSpec:
    """A pattern, or a choice of a few texts."""
    if rng.random() < 0.5:
        return GrammarSpec.regex(rng.choice(list(_PATTERNS)))
    words = ["".join(rng.choices("aé", k=rng.randint(1, 8))) for _ in range(rng.randint(1, 4))]
    return GrammarSpec.choice(words)


def automaton_of(spec: GrammarSpec) -> Automaton:
    if spec.kind == "regex":
        return _PATTERNS[spec.text]
    import json

    edges: dict[int, dict[int, int]] = {}
    ends: set[int] = set()
    num_states = 1
    for word in json.loads(spec.text):
        state = 0
        for byte in word.encode():
            following = edges.setdefault(state, {})
            if byte not in following:
                following[byte], num_states = num_states, num_states + 1
            state = following[byte]
        ends.add(state)
    return Automaton(edges, frozenset(ends))


class AtOnce(Executor):
    """Runs what it is given where it is given, so that a test does not depend on threads."""

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


_compilers: dict[int, GrammarCompiler] = {}


def grammars_of(vocabulary: Vocabulary) -> Grammars:
    """The engine's grammars over a vocabulary of bytes; the compiler is made once."""
    compiler = _compilers.get(id(vocabulary))
    if compiler is None:
        by_bytes = {piece: token for token, piece in enumerate(vocabulary.token_bytes)}
        compiler = _compilers[id(vocabulary)] = GrammarCompiler(
            vocabulary.token_bytes,
            vocabulary.special_ids,
            vocabulary.eos_ids,
            lambda text: [by_bytes[bytes([byte])] for byte in text.encode() if bytes([byte]) in by_bytes],
        )
    return Grammars(compiler, executor=AtOnce())


def compiled(spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
    compiler = grammars_of(vocabulary)._compiler
    assert compiler is not None
    return compiler.compile(spec)
