"""What is asked: prompts that repeat themselves and prompts that do not, with every sampling parameter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.models.tokenizer import Tokenizer
from outrider.request import GrammarSpec, SamplingParams

_TOPICS = ("tides", "sourdough", "prime numbers", "old maps", "bees", "winter", "jazz", "glaciers")
_TEMPLATES = (
    "Why do people care about {a}? Answer in one sentence.",
    "Repeat this sentence three times: I read about {a} and {b} on the same day, and {a} won.",
    "Fix the bug and print the whole function again:\n\ndef mean(values):\n    # used for {a}\n"
    "    total = 0\n    for value in values:\n        total += value\n    return total / len(values) + 1\n",
    "Write a short list of five facts about {a}, then one about {b}.",
    "Rewrite politely and keep every other word: Give me the book on {a}. Give me the book on {b}. Now.",
    "Continue: one, {a}; two, {b}; three, {a}; four, {b}; five,",
)


@dataclass(frozen=True)
class Question:
    """One request of the certificate."""

    name: str  # what is particular about its parameters
    text: str
    prompt_ids: list[int]
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        """The most it can take in the cache."""
        return len(self.prompt_ids) + (self.params.max_tokens or 0)


def make_questions(
    tokenizer: Tokenizer, vocab_size: int, num_questions: int, max_tokens: int
) -> list[Question]:
    """As many questions; the ways of sampling take turns, so eight hold each of them once."""
    rng = random.Random(0)
    questions = []
    for i in range(num_questions):
        a, b = rng.sample(_TOPICS, 2)
        text = _TEMPLATES[i % len(_TEMPLATES)].format(a=a, b=b)
        prompt_ids = _encode(tokenizer, text)
        name, params = _way(i, max_tokens, vocab_size, prompt_ids, rng)
        questions.append(Question(name, text, prompt_ids, params))
    return questions


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def _way(
    index: int, max_tokens: int, vocab_size: int, prompt_ids: Sequence[int], rng: random.Random
) -> tuple[str, SamplingParams]:
    """The index-th way of sampling. Biased and forbidden tokens are such as the answer may well want."""
    likely, rare = rng.choices(prompt_ids, k=6), rng.randrange(vocab_size)
    ways: list[tuple[str, dict[str, Any]]] = [
        ("greedy", {"temperature": 0.0}),
        ("temperature 0.7", {"temperature": 0.7}),
        (
            "penalties, top_p",
            # Strong, so that a token drafted twice is felt.
            {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 1.5, "frequency_penalty": 2.0},
        ),
        (
            "logit_bias, top_k",
            {"temperature": 1.0, "top_k": 40,
             "logit_bias": {likely[0]: 4.0, likely[1]: 3.0, likely[2]: -100.0, rare: 2.0}},
        ),
        (
            "min_tokens, bad_words",
            {"temperature": 0.0, "min_tokens": max_tokens // 2, "bad_words": [[likely[3]], likely[4:6]]},
        ),
        ("logprobs", {"temperature": 0.7, "logprobs": 3}),
        ("stop string", {"temperature": 0.0, "stop": [".", "\n\n"], "include_stop_str_in_output": True}),
        ("min_p, temperature 1.5", {"temperature": 1.5, "min_p": 0.05, "ignore_eos": True}),
        (
            "greedy, repetition_penalty, logprobs",
            {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 0},
        ),
        ("grammar", {"temperature": 0.7, "grammar": GrammarSpec.regex(r"[A-Za-z ]{6,60}[.!]")}),
        (
            "forced grammar",
            {"temperature": 0.0, "grammar": GrammarSpec.regex("(the same words each time, )*")},
        ),
    ]  # fmt: skip
    name, fields = ways[index % len(ways)]
    return name, SamplingParams(max_tokens=max_tokens, seed=1000 + index, **fields)
