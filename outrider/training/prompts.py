"""Scripts of conversations for the target to act out.

A script is a list of turns: tokens that are given, and stretches that the target writes. The simplest is
Magpie's: open the user's turn of the chat template and the target writes the question too.
Everything about script number n is a function of (seed, n), so a data set can be continued or made again.
"""

from __future__ import annotations

import ast
import gzip
import random
import re
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.models.tokenizer import Tokenizer
from outrider.training.topics import CODE_TASKS, LANGUAGES, PEOPLE, PLACES, SUBJECTS, split_items

KINDS = ("magpie", "chat", "text", "code")
MIX = {"magpie": 0.35, "chat": 0.27, "text": 0.18, "code": 0.20}
TEMPERATURES = ((0.0, 0.35), (0.4, 0.1), (0.7, 0.3), (1.0, 0.25))  # of answers, with their shares

CHAT = """
What is {s}?; Explain {s} to {p}.; How does {s} work?; Why is {s} important?; Tell me about {s}.; What are
the main facts about {s}?; Give me five tips about {s}.; Write a short paragraph about {s}.; What are the
advantages and disadvantages of {s}?; Describe the history of {s}.; Write a poem about {s}.; Write a short
story about {s} and {p}.; What should {p} know about {s}?; How do I start with {s}?; List three common
mistakes people make with {s}.; Compare {s} and {t}.; What is the connection between {s} and {t}?; Can you
recommend a plan to learn about {s} in one week?; What are some myths about {s}?; Summarize what is known
about {s}.; Write an email to {p} about {s}.; Give me a definition of {s} and an example.; What would happen
without {s}?; What is the best time of year to visit {c}?; What is {c} known for?; Plan a three day trip to
{c}.; What are traditional dishes from {c}?; Write a dialogue between {p} and {q} about {s}.; How is {s}
taught in schools?; Write a product description for something related to {s}.; I am {p}. How can {s} help
me?; Is {s} still relevant today?; Give me ideas for a blog post about {s}.; Create a quiz with four
questions about {s}.; What is the future of {s}?; How has {s} changed over time?; Write a speech about {s}
for {p}.; Explain the difference between {s} and {t}.; What equipment do I need for {s}?; How much does {s}
cost?; Write a recipe that reminds you of {c}.; Who invented {s}?
"""

TEXT = """
Summarize the following text.; Summarize this text in two sentences.; Summarize the text below in one
sentence.; List the key points of this text.; Rewrite the following text in simpler words.; Rewrite this
text more formally.; Correct the spelling and grammar of this text. Output the full text.; Repeat the
following text exactly.; Give this text a title and explain your choice.; What is this text about?; Shorten
the following text.; Turn the following text into bullet points.; Continue the following text.; Rewrite the
text in the present tense.; Replace every "{w}" with "{v}" in the following text and output the whole text.;
Extract the names in this text.; Write three questions about this text and answer them.; Explain the
following text to {p}.; Translate this text to French.; Copy the following text, but add a short
introduction.; Rewrite the following text as an email to {p}.
"""

CODE_EDITS = """
Explain what this code does.; Add type hints to this code.; Add a docstring to this function.; Write a unit
test for this function.; Rename the variable `{w}` to `{v}` and print the whole code.; Refactor this code to
make it easier to read.; Find possible bugs in this code.; Add comments to every line of this code.; Print
the following code unchanged.; Add error handling to this code and print the whole code.; Rewrite this code
in JavaScript.; Add logging to this function.; Simplify this code.; What does this function return?; Add a
parameter `verbose=False` that prints what happens.
"""

CODE_NEW = """
Write a {l} function that {f}.; Write a {l} program that {f}.; How do I write a function in {l} that {f}?;
Show me {l} code that {f}, with comments.; Write a function that {f} and explain it step by step.; Implement
a {l} class that {f}.; Write a {l} function that {f}. Then write a test for it.; Give me an example of {l}
code that {f}.
"""


@dataclass(frozen=True)
class Turn:
    """Given tokens, or (ids is None) up to `limit` tokens that the target draws at `temperature`."""

    ids: tuple[int, ...] | None
    role: int = 0  # of the tokens: GIVEN, QUESTION or ANSWER
    temperature: float = 0.0
    limit: int = 0


GIVEN, QUESTION, ANSWER = 0, 1, 2


@dataclass(frozen=True)
class Script:
    """Conversation number `index`; `seed` is of its noise."""

    index: int
    kind: str
    turns: tuple[Turn, ...]
    seed: int


class PromptSource:
    """Scripts by number, from built-in questions, the texts of Python's library, and the user's files."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        heldout: bool = False,
        kinds: Sequence[str] = KINDS,
        files: Sequence[str] = (),
        temperature: float | None = None,
        max_answer: int = 320,
    ) -> None:
        """`temperature` fixes that of all answers. Held-out scripts have topics and texts of their own."""
        self._tokenizer = tokenizer
        self._seed = f"{'heldout' if heldout else 'train'}:{seed}"
        self._kinds = [kind for kind in KINDS if kind in kinds]
        self._temperature = temperature
        self._max_answer = max_answer
        self._lists = {
            "s": split_items(SUBJECTS, heldout), "t": split_items(SUBJECTS, heldout),
            "p": split_items(PEOPLE, heldout), "q": split_items(PEOPLE, heldout),
            "c": split_items(PLACES, heldout), "f": split_items(CODE_TASKS, heldout), "l": LANGUAGES,
        }  # fmt: skip
        is_mine = _in_split(heldout)
        self._texts, self._functions = _read_texts(files, is_mine), _read_functions(is_mine)
        self._open_user, self._open_answer = self._template_parts()

    def _template_parts(self) -> tuple[str, str]:
        """What a chat's text has before the user's words, and between these and the answer."""
        mark = "\x1a"
        messages = [{"role": "user", "content": mark}]
        before, _, after = self._tokenizer.apply_chat_template(messages).partition(mark)
        return before, after

    def script(self, index: int) -> Script:
        """Conversation number `index`."""
        rng = random.Random(f"{self._seed}:{index}")
        kind = rng.choices(self._kinds, [MIX[kind] for kind in self._kinds])[0]
        encode = self._tokenizer.encode
        before = encode(self._open_user, add_special_tokens=False)
        # The first special token of what follows the question ends it; the target emits that itself.
        after = encode(self._open_answer, add_special_tokens=False)
        turns: list[Turn] = []
        if kind == "magpie":
            turns += [Turn(tuple(before)), Turn(None, QUESTION, rng.choice((0.8, 1.0)), 120)]
            turns.append(Turn(tuple(after[1:])))
        else:
            question: str = getattr(self, f"_{kind}")(rng)
            turns.append(Turn(tuple(before + encode(question, add_special_tokens=False) + after)))
        turns.append(self._answer(rng))
        if kind in ("magpie", "chat") and rng.random() < 0.15:
            again = encode("\n<|im_start|>user\n", add_special_tokens=False)
            turns += [Turn(tuple(again)), Turn(None, QUESTION, 0.9, 80), Turn(tuple(after[1:]))]
            turns.append(self._answer(rng))
        return Script(index, kind, tuple(turns), zlib.crc32(f"{self._seed}:{index}".encode()))

    def _answer(self, rng: random.Random) -> Turn:
        values, shares = zip(*TEMPERATURES, strict=True)
        temperature = rng.choices(values, shares)[0]
        if self._temperature is not None:
            temperature = self._temperature
        return Turn(None, ANSWER, temperature, self._max_answer)

    def _fill(self, template: str, rng: random.Random, **words: str) -> str:
        values = {name: rng.choice(items) for name, items in self._lists.items()}
        return " ".join(template.split()).format(**{**values, **words})

    def _chat(self, rng: random.Random) -> str:
        return self._fill(rng.choice(CHAT.split(";")), rng)

    def _text(self, rng: random.Random) -> str:
        body = rng.choice(self._texts)
        words = re.findall(r"[a-z]{4,}", body) or ["the"]
        task = self._fill(rng.choice(TEXT.split(";")), rng, w=rng.choice(words), v=rng.choice(words))
        return f"{task}\n\n{body}" if rng.random() < 0.8 else f"{body}\n\n{task}"

    def _code(self, rng: random.Random) -> str:
        draw = rng.random()
        if draw < 0.5:
            return self._fill(rng.choice(CODE_NEW.split(";")), rng)
        body = rng.choice(self._functions)
        if draw < 0.62:
            head = re.match(r'(?s).*?:\n\s+r?""".*?"""', body)
            if head is not None:
                return f"Complete this Python function.\n\n```python\n{head.group()}\n```"
        words = re.findall(r"\b[a-z_]{3,}\b", body) or ["x"]
        task = self._fill(
            rng.choice(CODE_EDITS.split(";")), rng, w=rng.choice(words), v=f"new_{rng.choice(words)}"
        )
        return f"{task}\n\n```python\n{body}\n```"


def _in_split(heldout: bool) -> Callable[[str], bool]:
    """Whether a text belongs here: one in ten, by its checksum, is held out."""
    return lambda text: (zlib.crc32(text.encode("utf-8", "replace")) % 10 == 3) == heldout


def _read_texts(files: Sequence[str], is_mine: Callable[[str], bool]) -> list[str]:
    """Passages of 40 to 200 words."""
    if files:
        whole = [_read(Path(file)) for file in files]
    else:
        from pydoc_data.topics import topics  # the language reference, part of every Python

        whole = list(topics.values())
    passages: list[str] = []
    for text in whole:
        passages += _passages(text)
    passages = [passage for passage in passages if is_mine(passage)]
    if not passages:
        raise ValueError(
            "the data files hold no passage of 40 or more words; give more text with --data-files"
        )
    return passages


def _passages(text: str) -> list[str]:
    """Paragraphs joined until they have 40 words, at most 200, lines unwrapped."""
    result: list[str] = []
    current = ""
    for paragraph in re.split(r"\n\s*\n", text.replace("\r", "")):
        paragraph = " ".join(paragraph.split())
        letters = sum(character.isalpha() or character == " " for character in paragraph)
        if letters < 0.85 * len(paragraph) or len(paragraph) < 60:
            continue
        current = f"{current}\n\n{paragraph}" if current else paragraph
        if len(current.split()) >= 40 + 80 * (len(result) % 2):
            if len(current.split()) <= 200:
                result.append(current)
            current = ""
    return result


def _read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return data.decode("utf-8", "replace")


def _read_functions(is_mine: Callable[[str], bool]) -> list[str]:
    """Functions and small classes of Python's standard library."""
    functions = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                body = "\n".join(line[node.col_offset :] for line in lines)
                if 5 <= len(lines) <= 30 and len(body) < 1100 and is_mine(body):
                    functions.append(body)
    return functions
