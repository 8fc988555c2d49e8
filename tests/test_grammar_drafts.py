"""What must come is drafted, what cannot come is not."""

# ruff: noqa: F811 (fixtures of another file)
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from test_grammar import SPECS, compiler, text_of, tokenizer  # noqa: F401 (two are fixtures)

from outrider.models.tokenizer import Tokenizer
from outrider.request import GrammarSpec, SamplingParams, SpeculationParams
from outrider.sampling.grammar import GrammarCompiler, GrammarMatcher
from outrider.spec_decode.grammar import GrammarProposer, allowed_part, in_grammar
from outrider.spec_decode.ngram import NgramProposer
from outrider.spec_decode.proposer import NO_DRAFTS, Drafts


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


def test_what_must_come_is_drafted(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    source = GrammarProposer()
    (drafts,) = source.propose([view(compiler, SPECS["object"])], [32])
    drafts.check(compiler.vocab_size)
    assert '{"firstName": "'.startswith(text_of(tokenizer, drafts.token_ids)) and len(drafts) > 2
    assert set(drafts.survival) == {1.0} and set(drafts.source) == {"grammar"}
    assert len(source.propose([view(compiler, SPECS["object"])], [2])[0]) == 2
    assert source.propose([View(None)], [8]) == [NO_DRAFTS]  # type: ignore[list-item]
    off = view(compiler, SPECS["object"], speculation=SpeculationParams(method="ngram"))
    assert source.propose([off], [8]) == [NO_DRAFTS]


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
    bad = compiler._words.tokens.index(b"z")
    drafts = Drafts((bad, good[0], good[1], bad, good[2]), (-1, -1, 1, 2, 2), (0.5,) * 5, ("x",) * 5)
    kept = allowed_part(request, drafts)
    assert kept.token_ids == tuple(good[:3]) and kept.parents == (-1, 0, 1)
    assert allowed_part(request, Drafts.chain([bad, *good], [0.5] * 4, "x")) == NO_DRAFTS


def test_a_chain_goes_on_with_what_must_come_and_with_what_was_said_before(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
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
