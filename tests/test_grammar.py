"""Grammars piece by piece: masks in the sampler, matchers along drafts, compiling, what must come."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import outrider._native as native
import pytest
from fakes import VOCABULARY, HashModel, ReferenceSampler
from grammar_oracle import AtOnce, automaton_of, grammars_of, random_grammar
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import save, train_byte_level, train_sentencepiece_like

from outrider.engine.batch import SamplingBatch
from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.engine.grammars import Grammars
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.output import OutputStream
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Scheduler
from outrider.engine.state import Request
from outrider.models.tokenizer import Tokenizer
from outrider.request import AddRequest, FinishReason, GrammarSpec, RequestOutput, SamplingParams
from outrider.sampling.grammar import Grammar, GrammarCompiler, GrammarMatcher, allows
from outrider.sampling.grammar_source import GrammarError, check_grammar
from outrider.sampling.sampler import Sampler
from outrider.spec_decode.grammar import GrammarProposer, allowed_part, in_grammar
from outrider.spec_decode.ngram import NgramProposer
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts, NoProposer

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
    matcher = compiled(spec).matcher()
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


def compiled(spec: GrammarSpec) -> Grammar:
    grammars = grammars_of(VOCABULARY)
    assert grammars._compiler is not None
    return grammars._compiler.compile(spec)


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


# --- compiling beside the engine ---


def request_of(spec: GrammarSpec | None, request_id: str = "r", **params: Any) -> Request:
    asked = SamplingParams(grammar=spec, **params)
    return Request(
        request_id, [0], asked, OutputStream(asked, 30, VOCABULARY), Sampler().make_state(asked, [0], [], 0)
    )


def specs(count: int) -> list[GrammarSpec]:
    return [GrammarSpec.choice(["a" * (i + 1)]) for i in range(count)]


def test_a_grammar_is_compiled_once_and_the_last_ones_are_kept() -> None:
    real = grammars_of(VOCABULARY)._compiler
    grammars = Grammars(real, most_kept=2, executor=AtOnce())
    one, two, three = specs(3)
    for spec in (one, two, one, three, one, two):
        request = request_of(spec)
        if not grammars.prepare(request):
            assert [ready.error for ready in grammars.take_ready()] == [None]
        assert request.stream.grammar is not None
    assert grammars.stats() == {"kept": 2, "compiled": 4, "hits": 2, "waiting": 0}


def test_kept_grammars_are_bounded_in_size() -> None:
    grammars = Grammars(grammars_of(VOCABULARY)._compiler, most_kept_bytes=40, executor=AtOnce())
    for spec in specs(8):
        grammars.prepare(request_of(spec))
        grammars.take_ready()
    assert 0 < sum(len(spec.text) for spec in grammars._kept) <= 40


class Gate:
    """A compiler that waits to be let go on."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.num_calls = 0

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.num_calls += 1
        assert self.open.wait(10)
        return compiled(spec)


def test_requests_for_one_grammar_wait_for_one_compilation_and_may_leave() -> None:
    gate: Any = Gate()
    grammars = Grammars(gate)
    spec = specs(1)[0]
    requests = [request_of(spec, f"r{i}") for i in range(4)]
    assert not any(grammars.prepare(request) for request in requests)
    assert grammars.take_ready() == [] and grammars.num_waiting == 4
    assert grammars.drop("r2") and not grammars.drop("r2")
    gate.open.set()
    ready = grammars.take_ready(timeout_s=10)
    assert [entry.request.request_id for entry in ready] == ["r0", "r1", "r3"]
    assert gate.num_calls == 1
    assert len({id(entry.request.stream.grammar) for entry in ready}) == 3


def test_a_grammar_that_takes_too_long_is_given_up() -> None:
    gate: Any = Gate()
    now = [0.0]
    grammars = Grammars(gate, patience_s=5.0, clock=lambda: now[0])
    assert not grammars.prepare(request_of(specs(1)[0]))
    assert grammars.take_ready() == []
    now[0] = 6.0
    (ready,) = grammars.take_ready()
    assert ready.error is not None and "within 5 s" in ready.error
    gate.open.set()


def test_a_grammar_that_cannot_be_compiled_is_an_error_of_its_requests_alone() -> None:
    grammars = grammars_of(VOCABULARY)
    assert not grammars.prepare(request_of(GrammarSpec.regex("zzz"), "bad"))  # not in this vocabulary
    assert not grammars.prepare(request_of(GrammarSpec.regex("a"), "good"))
    errors = {ready.request.request_id: ready.error for ready in grammars.take_ready()}
    assert errors["good"] is None
    assert errors["bad"] is not None and "allows no text" in errors["bad"]


def small_engine(grammars: Grammars) -> Engine:
    return Engine(
        scheduler=Scheduler(KVCacheManager(16, 4), max_num_seqs=4, max_num_batched_tokens=16),
        runner=Runner(HashModel(16, 4)),
        sampler=ReferenceSampler(),
        drafting=Drafting(NoProposer(), method="off", max_draft_tokens=0, vocab_size=4),
        vocabulary=VOCABULARY,
        max_model_len=40,
        grammars=grammars,
    )


def test_the_others_go_on_while_a_grammar_is_compiled_and_the_waiting_can_leave() -> None:
    gate: Any = Gate()
    engine = small_engine(Grammars(gate))

    def add(name: str, spec: GrammarSpec | None) -> None:
        params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0, grammar=spec)
        engine.add_request(AddRequest(name, [0, 1], params, 0.0))

    def run_until(name: str) -> list[RequestOutput]:
        seen: list[RequestOutput] = []
        for _ in range(3000):
            seen += [output for output in engine.step() if output.request_id == name]
            if seen and seen[-1].finish_reason is not None:
                return seen
        raise AssertionError(f"{name} does not end")

    add("bound", GrammarSpec.choice(["aa"]))
    add("leaving", GrammarSpec.choice(["aa"]))
    add("free", None)
    assert engine.stats()["num_requests_waiting"] == 3
    assert sum(len(output.token_ids) for output in run_until("free")) == 6
    (left,) = engine.cancel(["leaving"])
    assert left.finish_reason is FinishReason.ABORT
    assert engine.has_work and engine.step() == []  # it waits a moment, and nothing else is to be done
    gate.open.set()
    outputs = run_until("bound")
    assert "".join(output.text for output in outputs) == "aa"
    assert outputs[-1].finish_reason is FinishReason.STOP and not engine.has_work


def test_a_refused_grammar_is_the_last_word_to_its_request() -> None:
    engine = small_engine(grammars_of(VOCABULARY))
    engine.add_request(AddRequest("bad", [0], SamplingParams(grammar=GrammarSpec.regex("zzz")), 0.0))
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.ERROR and output.num_prompt_tokens == 0
    assert output.error is not None and "allows no text" in output.error
    assert not engine.has_work and engine.metrics.num_finished == {"error": 1}


def test_the_end_of_the_grammar_comes_before_the_length_limit() -> None:
    request = request_of(GrammarSpec.choice(["aa"]), max_tokens=2)
    grammars = grammars_of(VOCABULARY)
    grammars.prepare(request)
    grammars.take_ready()
    request.stream.max_tokens = 2
    assert request.append([0, 0, 0]) == [0, 0]
    assert request.finish_reason is FinishReason.STOP


# --- drafts ---


@dataclass
class View:
    """A request as a proposer sees it."""

    grammar: GrammarMatcher | None
    token_ids: list[int] = field(default_factory=lambda: [0])
    request_id: str = "r"
    num_prompt_tokens: int = 1
    cache_salt: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)


def view(compiler: GrammarCompiler, spec: GrammarSpec, **params: Any) -> Any:
    return View(compiler.compile(spec).matcher(), params=SamplingParams(grammar=spec, **params))


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return b"".join(tokenizer.token_bytes()[t] for t in token_ids).decode()


def test_what_must_come_is_drafted(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    source = GrammarProposer()
    (drafts,) = source.propose([view(compiler, SPECS["object"])], [32])
    drafts.check(compiler.vocab_size)
    assert '{"firstName": "'.startswith(text_of(tokenizer, drafts.token_ids)) and len(drafts) > 2
    assert set(drafts.survival) == {1.0} and set(drafts.source) == {"grammar"}
    assert len(source.propose([view(compiler, SPECS["object"])], [2])[0]) == 2
    assert source.propose([View(None)], [8]) == [NO_DRAFTS]  # type: ignore[list-item]
    off = view(compiler, SPECS["object"], speculation={"method": "ngram"})
    off.params = json_params("ngram")
    assert source.propose([off], [8]) == [NO_DRAFTS]


def json_params(method: str) -> SamplingParams:
    from outrider.request import SpeculationParams

    return SamplingParams(speculation=SpeculationParams(method=method))


def test_a_few_choices_are_branches(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    spec = GrammarSpec.choice(["left or right", "middle of it"])
    for limit in range(1, 12):
        (drafts,) = GrammarProposer(branches=True).propose([view(compiler, spec)], [limit])
        assert len(drafts) <= limit
        if drafts.token_ids:
            drafts.check(compiler.vocab_size)
        assert allowed_part(view(compiler, spec), drafts) == drafts
    (whole,) = GrammarProposer(branches=True).propose([view(compiler, GrammarSpec.regex("(x1y|z2w)!"))], [20])
    tops = [i for i, parent in enumerate(whole.parents) if parent == -1]
    assert sorted(text_of(tokenizer, [whole.token_ids[i]])[0] for i in tops) == ["x", "z"]


def test_what_the_grammar_forbids_is_cut_with_all_that_follows_it(compiler: GrammarCompiler) -> None:
    request = view(compiler, SPECS["object"])
    good = request.grammar.forced((), 3)
    bad = next(t for t in range(300) if not allows(request.grammar.masks()[0], t))
    drafts = Drafts((bad, good[0], good[1], bad, good[2]), (-1, -1, 1, 2, 2), (0.5,) * 5, ("x",) * 5)
    kept = allowed_part(request, drafts)
    assert kept.token_ids == tuple(good[:3]) and kept.parents == (-1, 0, 1)
    assert allowed_part(request, Drafts.chain([bad, *good], [0.5] * 4, "x")) == NO_DRAFTS


def test_a_chain_goes_on_with_what_must_come_and_with_what_was_said_before(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    earlier = tokenizer.encode('{"firstName": "Anna", "population": 20}', add_special_tokens=False)
    request = view(compiler, SPECS["object"])
    request.token_ids = [*earlier, *earlier]
    request.num_prompt_tokens = len(request.token_ids)
    ngram = NgramProposer(max_n=4, min_n=1, max_draft_tokens=32)
    grammar = GrammarProposer()
    (chain,) = grammar.propose([request], [32])

    def guarded(name: str, call: Any, otherwise: Drafts) -> Drafts:
        return call()  # type: ignore[no-any-return]

    drafts = in_grammar(request, chain, 32, [("grammar", grammar), ("ngram", ngram)], guarded)
    drafts.check(compiler.vocab_size)
    assert text_of(tokenizer, drafts.token_ids).startswith('{"firstName": "Anna", "population": ')
    assert {"grammar", "ngram"} <= set(drafts.source)
    for limit in range(1, 10):
        assert (
            len(
                in_grammar(
                    request, chain.first(limit), limit, [("grammar", grammar), ("ngram", ngram)], guarded
                )
            )
            <= limit
        )
