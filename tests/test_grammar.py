"""Grammars piece by piece: masks in the sampler, matchers along drafts, what is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import outrider._native as native
import pytest
from fakes import VOCABULARY
from grammar_oracle import automaton_of, compiled, random_grammar
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import save, train_byte_level, train_sentencepiece_like

from outrider.engine.batch import SamplingBatch
from outrider.models.tokenizer import Tokenizer
from outrider.request import GrammarSpec
from outrider.sampling.grammar import Grammar, GrammarCompiler, GrammarMatcher, allows
from outrider.sampling.grammar_source import GrammarError, check_grammar
from outrider.sampling.sampler import Sampler
from outrider.spec_decode.proposer import Drafts

NAMES = {
    "type": "object",
    "properties": {"firstName": {"type": "string", "maxLength": 6}, "population": {"enum": [1, 20, 300]}},
    "required": ["firstName", "population"],
    "additionalProperties": False,
}

# --- masks in the sampler ---


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_a_mask_is_as_if_the_other_tokens_had_no_chance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab, rows = int(rng.integers(2, 200)), int(rng.integers(1, 6))
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    states = [
        native.SamplerState(
            temperature=float(rng.choice([0.0, 0.7, 1.5])),
            top_k=int(rng.choice([0, 3])),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            bad_words=[[int(rng.integers(vocab))]] if rng.random() < 0.3 else [],
            seed=int(rng.integers(2**32)),
        )
        for _ in range(rows)
    ]
    states[0].append(rng.integers(0, vocab, 3).tolist())
    bits = rng.random((rows, vocab)) < rng.choice([0.02, 0.5, 0.98])
    bits[:, rng.integers(vocab)] = True
    has_mask = rng.random(rows) < 0.7
    words = np.packbits(np.pad(bits, ((0, 0), (0, -vocab % 32))), axis=1, bitorder="little").view(np.uint32)
    row_mask = np.where(has_mask, np.arange(rows), -1).astype(np.int32)
    place = (
        np.arange(rows, dtype=np.int32),
        np.arange(rows),
        np.zeros(rows + 1, np.int32),
        np.zeros(0, np.int32),
    )
    masked = SamplingBatch(states, *place, masks=words, row_mask=row_mask)
    without = np.where(bits | ~has_mask[:, None], logits, -np.inf).astype(np.float32)
    assert (
        Sampler().sample(logits, masked).token_ids
        == Sampler().sample(without, SamplingBatch(states, *place)).token_ids
    )


def test_log_probabilities_are_of_the_distribution_before_the_mask() -> None:
    logits = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    state = native.SamplerState(temperature=0.0, num_logprobs=2)
    batch = SamplingBatch(
        [state], np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(2, np.int32), np.zeros(0, np.int32),
        masks=np.array([[0b1000]], np.uint32), row_mask=np.zeros(1, np.int32),
    )  # fmt: skip
    sampled = Sampler().sample(logits, batch)
    assert sampled.token_ids == [3]
    assert sampled.logprobs is not None and sampled.logprobs[0] is not None
    entry = sampled.logprobs[0]
    assert entry.rank == 4 and entry.top_token_ids == [0, 1]
    assert entry.logprob == pytest.approx(-np.log(np.exp([0.0, 1, 2, 3]).sum()))


def test_a_mask_without_a_token_gives_none() -> None:
    state = native.SamplerState(temperature=1.0)
    arrays = (np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(2, np.int32), np.zeros(0, np.int32))
    logits = np.zeros((1, 40), np.float32)
    empty = np.zeros((1, 2), np.uint32)
    assert native.sample(logits, [state], *arrays, empty, np.zeros(1, np.int32))[0].tolist() == [-1]
    with pytest.raises(ValueError, match="masks need a bit for each token"):
        native.sample(logits, [state], *arrays, empty[:, :1].copy(), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="row_mask must index masks"):
        native.sample(logits, [state], *arrays, empty, np.ones(1, np.int32))
    with pytest.raises(ValueError, match="one entry for each row"):
        native.sample(logits, [state], *arrays, empty, None)


# --- matchers ---


def compiler_of(tokenizer: Tokenizer, eos: str = "<|im_end|>") -> GrammarCompiler:
    eos_id = tokenizer.token_to_id(eos)
    assert eos_id is not None
    return GrammarCompiler(
        tokenizer.token_bytes(), tokenizer.special_ids, frozenset({eos_id}),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save(train_byte_level(), tmp_path_factory.mktemp("byte level"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return compiler_of(tokenizer)


SPECS = {
    "object": GrammarSpec.json_schema(NAMES),
    "any object": GrammarSpec.json_object(),
    "regex": GrammarSpec.regex(r"(foo|foobar|fo{2,5}) [0-9]{3}-[a-z]+"),
    "choice": GrammarSpec.choice(["New York", "New Jersey", "Newark", "<|im_end|> is text", "née"]),
    "lark": GrammarSpec.grammar('start: "The answer is " ("yes"|"no") "." (" Because " /[a-z ]+/ ".")?'),
    "free blanks": GrammarSpec.json_schema({**NAMES, "x-guidance": {"whitespace_flexible": True}}),
}


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return b"".join(tokenizer.token_bytes()[t] for t in token_ids).decode()


def tokens_of(mask: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("name", SPECS)
def test_a_mask_depends_on_the_tokens_alone(compiler: GrammarCompiler, name: str) -> None:
    """Whatever was drafted and taken back, a matcher allows what one does that was given the tokens."""
    grammar = compiler.compile(SPECS[name])
    rng = random.Random(name)
    for _ in range(6):
        matcher, taken = grammar.matcher(), list[int]()
        for _ in range(25):
            token_ids, parents = random_tree(rng, matcher, compiler.vocab_size)
            masks = matcher.masks(token_ids, parents)
            check_masks(grammar, taken, token_ids, parents, masks)
            if rng.random() < 0.5:
                matcher.forced((), 5)
            allowed = [t for t in tokens_of(masks[0]) if t not in compiler.eos_ids]
            # Mostly on along a draft, as accepted ones are.
            good = [t for t, p in zip(token_ids, parents, strict=True) if p == -1 and t in allowed]
            if not allowed:
                break
            taken.append(rng.choice(good or allowed))
            if matcher.append(taken[-1]):
                assert set(tokens_of(grammar_after(grammar, taken).masks()[0])) <= compiler.eos_ids
                break


def random_tree(rng: random.Random, matcher: GrammarMatcher, vocab_size: int) -> tuple[list[int], list[int]]:
    token_ids: list[int] = []
    parents: list[int] = []
    for _ in range(rng.randint(0, 7)):
        parents.append(rng.randrange(-1, len(token_ids)) if rng.random() < 0.5 else len(token_ids) - 1)
        before = matcher.masks([*token_ids], parents[:-1])[parents[-1] + 1]
        allowed = [] if before is None else tokens_of(before)
        token_ids.append(rng.choice(allowed) if allowed and rng.random() < 0.8 else rng.randrange(vocab_size))
    return token_ids, parents


def grammar_after(grammar: Grammar, token_ids: Sequence[int]) -> GrammarMatcher:
    matcher = grammar.matcher()
    for token_id in token_ids:
        matcher.append(token_id)
    return matcher


def check_masks(
    grammar: Grammar, taken: list[int], token_ids: list[int], parents: list[int], masks: list[Any]
) -> None:
    drafts = Drafts(tuple(token_ids), tuple(parents), (1.0,) * len(token_ids), ("x",) * len(token_ids))
    for node in range(-1, len(token_ids)):
        path = [token_ids[i] for i in [*drafts.ancestors(node), node]] if node >= 0 else []
        fresh = grammar_after(grammar, taken)
        is_reached = True
        for token_id in path:
            is_reached &= allows(fresh.masks()[0], token_id) and token_id not in grammar.eos_ids
            if not is_reached:
                break
            fresh.append(token_id)
        if is_reached:
            assert (masks[node + 1] == fresh.masks()[0]).all()
        else:
            assert masks[node + 1] is None


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_masks_are_those_of_an_automaton(seed: int) -> None:
    rng = random.Random(seed)
    spec = random_grammar(rng)
    automaton = automaton_of(spec)
    matcher = compiled(spec, VOCABULARY).matcher()
    text = b""
    for _ in range(20):
        allowed = automaton.allowed(text, VOCABULARY)
        assert set(tokens_of(matcher.masks()[0])) == allowed
        going_on = sorted(allowed - VOCABULARY.eos_ids)
        if not going_on:
            break
        token_id = rng.choice(going_on)
        text += VOCABULARY.token_bytes[token_id]
        assert matcher.append(token_id) == automaton.is_over(text)


@pytest.mark.parametrize("name", SPECS)
def test_forced_tokens_are_the_only_ones(compiler: GrammarCompiler, name: str) -> None:
    grammar = compiler.compile(SPECS[name])
    rng = random.Random(name)
    num_forced = 0
    for _ in range(8):
        matcher = grammar.matcher()
        for _ in range(20):
            forced = matcher.forced((), 6)
            num_forced += len(forced)
            for i, mask in enumerate(matcher.masks(forced, range(-1, len(forced) - 1))[: len(forced)]):
                assert tokens_of(mask) == [forced[i]]
            allowed = [t for t in tokens_of(matcher.masks()[0]) if t not in compiler.eos_ids]
            if not allowed or matcher.append(rng.choice(allowed)):
                break
    assert num_forced > 0 or name == "any object"


def test_special_tokens_never_stand_for_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(GrammarSpec.choice(["<|im_end|>!"])).matcher()
    forced = matcher.forced()
    assert b"".join(tokenizer.token_bytes()[t] for t in forced) == b"<|im_end|>!"
    assert tokenizer.special_ids.isdisjoint(forced)


def test_a_structural_tag_binds_what_its_trigger_begins(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    tag = {"begin": '<call name="age">', "schema": {"type": "integer", "maximum": 99}, "end": "</call>"}
    matcher = compiler.compile(GrammarSpec.structural_tag([tag], ["<call"])).matcher()

    def give(text: str) -> None:
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            assert allows(matcher.masks()[0], token_id)
            matcher.append(token_id)

    eos = next(iter(compiler.eos_ids))
    give("I say this: ")
    assert allows(matcher.masks()[0], eos) and len(tokens_of(matcher.masks()[0])) > 500
    give("<call")
    assert not allows(matcher.masks()[0], eos)
    forced = text_of(tokenizer, matcher.forced())
    assert forced and ' name="age">'.startswith(forced)
    give(' name="age">4')
    assert not allows(matcher.masks()[0], tokenizer.encode("x", add_special_tokens=False)[0])
    give("2</call>")
    assert allows(matcher.masks()[0], eos)
    give(" and go on.")


def test_words_with_a_blank_before_them_are_spelt_without_it(tmp_path: Path) -> None:
    tokenizer = save(train_sentencepiece_like(), tmp_path)
    compiler = compiler_of(tokenizer, "</s>")
    matcher = compiler.compile(GrammarSpec.json_schema(NAMES)).matcher()
    forced = matcher.forced()
    text = b"".join(tokenizer.token_bytes()[t] for t in forced)
    assert len(forced) > 2 and b'{"firstName": "'.startswith(text)


def test_without_an_end_of_sequence_a_text_ends_where_it_must() -> None:
    compiler = GrammarCompiler([b"a", b"b"], frozenset(), frozenset(), lambda text: [])
    matcher = compiler.compile(GrammarSpec.regex("a+b")).matcher()
    assert tokens_of(matcher.masks()[0]) == [0]
    assert not matcher.append(0)
    assert tokens_of(matcher.masks()[0]) == [0, 1]
    assert matcher.append(1)


EXPLOSIVE = r"(.*a.{200}){2}b"  # its automaton grows with every token


def test_a_grammar_that_grew_too_much_is_begun_anew(compiler: GrammarCompiler) -> None:
    """The library's matchers share an automaton of bounded size: none may be at the mercy of the others."""
    grammar = compiler.compile(GrammarSpec.regex(EXPLOSIVE))
    ids = [t for t, piece in enumerate(compiler._words.tokens) if piece.isalpha()]
    texts = [random.Random(seed).choices(ids, k=120) for seed in range(3)]
    num_renewals = 0
    original = grammar.forget

    def forget() -> None:
        nonlocal num_renewals
        num_renewals += 1
        original()

    grammar.forget = forget  # type: ignore[method-assign]
    for text in texts:
        matcher = grammar.matcher()
        for token_id in text:
            assert allows(matcher.masks()[0], token_id), matcher.error
            matcher.masks([token_id, token_id], [-1, 0])
            matcher.append(token_id)
    assert num_renewals > 0


def test_a_grammar_that_fails_ends_its_request_with_the_reason(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(SPECS["object"])
    matcher = grammar.matcher()
    before = matcher.masks()[0]
    matcher._inner.consume_token(5)  # a failure that the library's matcher never leaves
    matcher._masks.clear()
    assert matcher._inner.is_error()
    assert (matcher.masks()[0] == before).all() and matcher.error is None  # there is a new one
    matcher._masks.clear()
    matcher._token_ids.append(5)
    matcher._inner.consume_token(5)  # among the final tokens: nothing may follow
    mask = matcher.masks([1], [-1])[0]
    assert mask is not None and not mask.any()
    assert matcher.error is not None and "grammar" in matcher.error


# --- what is refused ---


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("xml", "<a/>"), "kind must be one of json_schema"),
        (GrammarSpec("json_schema", "{"), "Expecting"),
        (GrammarSpec.json_schema({"not": {}}), "not supported: not"),
        (GrammarSpec.regex("(" * 5000), "not usable"),
        (GrammarSpec.choice([]), "one or more texts"),
        (GrammarSpec.grammar("x" * 200_000), "at most 131072"),
        (GrammarSpec("json_schema", "[" * 100_000), "nested too deeply|recursion|at most"),
        (GrammarSpec("structural_tag", "{}"), "structures and triggers"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(spec: GrammarSpec, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        check_grammar(spec)


def test_a_lenient_schema_ignores_what_is_not_supported() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(GrammarError, match="uniqueItems"):
        check_grammar(GrammarSpec.json_schema(schema))
    check_grammar(GrammarSpec.json_schema(schema, lenient=True))


def test_choices_may_hold_any_characters(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    words = ["a.b*c", "(x|y)", 'say "hi"\n', "50% off/[now]", "Größe #1", "a&&b--c~~d", "tab\there_"]
    for word in words:
        matcher = compiler.compile(GrammarSpec.choice([word])).matcher()
        is_over = False
        while not is_over:
            forced = matcher.forced((), 1) or tokens_of(matcher.masks()[0])[-1:]
            is_over = matcher.append(forced[0])
        assert b"".join(tokenizer.token_bytes()[t] for t in matcher._token_ids) == word.encode()
