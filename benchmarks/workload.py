"""What is sent and when: data sets as lists of `Item`, and arrival times.

Everything here is a function of its arguments and the seed, so that two runs, or the two sides of a
comparison, send the same requests in the same order at the same offsets.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS_DIR = Path(__file__).resolve().parent / "prompts"


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a data set. Exactly one of `messages` and `token_ids` is set."""

    id: str
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    max_tokens: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # other request fields the data set asks for

    @property
    def text(self) -> str:
        """The last message's text: what a completion endpoint gets, and what reports show."""
        if self.messages is None:
            return f"<{len(self.token_ids or [])} token ids>"
        content = self.messages[-1]["content"]
        if isinstance(content, str):
            return content
        return "".join(part.get("text", "") for part in content)


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """How a data set is read or made. Lengths of random sets are uniform in [L(1-r), L(1+r)]."""

    path: Path | None = None
    num_prompts: int | None = None  # None: every line of the file once, or 100 random prompts
    seed: int = 0
    shuffle: bool = False
    output_len: int | None = None  # for sets whose file gives none
    random_input_len: int = 200
    random_output_len: int = 128
    random_range_ratio: float = 0.1


def load_dataset(name: str, options: DatasetOptions) -> list[Item]:
    """The requests of data set `name`.

    A file shorter than `num_prompts` is gone through again from its start, so that every line is
    used equally often; repeats get ids of their own.
    """
    if name not in DATASETS:
        raise ValueError(f"--dataset-name must be one of {', '.join(DATASETS)}; got {name!r}")
    items = DATASETS[name](options)
    if not items:
        raise ValueError(f"data set {name} ({options.path}) holds no request")
    if options.shuffle:
        random.Random(options.seed).shuffle(items)
    count = options.num_prompts or len(items)
    return [
        items[i] if i < len(items) else _repeat(items[i % len(items)], i // len(items)) for i in range(count)
    ]


def _repeat(item: Item, turn: int) -> Item:
    return Item(f"{item.id}#{turn}", item.messages, item.token_ids, item.max_tokens, item.fields)


def arrival_offsets(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent.

    Gaps are gamma distributed with mean 1/rate and shape `burstiness` (1: Poisson arrivals, under 1
    burstier, above 1 more even); an infinite rate sends everything at once.
    """
    if request_rate <= 0 or burstiness <= 0:
        raise ValueError(
            f"--request-rate and --burstiness must be above 0; got {request_rate} and {burstiness}"
        )
    if request_rate == float("inf"):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (request_rate * burstiness), size=count)
    gaps[:1] = 0  # the first request opens the run
    return [float(offset) for offset in np.cumsum(gaps)]


def _lines(options: DatasetOptions, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    path = _require_path(options, name)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number}: not a JSON line ({error}); {name} wants one object a line"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: {name} wants an object a line, got {type(row).__name__}")
        yield number, row


def _require_path(options: DatasetOptions, name: str) -> Path:
    if options.path is None:
        raise ValueError(f"data set {name} is read from a file: give --dataset-path")
    if not options.path.exists():
        raise ValueError(f"--dataset-path {options.path} does not exist")
    return options.path


# Request fields an EBChat line may carry besides messages and max_tokens.
EBCHAT_FIELDS = (
    *("min_tokens", "response_format", "tools", "tool_choice"),
    *("temperature", "top_p", "seed", "stop", "prediction"),
)


def _ebchat(options: DatasetOptions, name: str = "EBChat") -> list[Item]:
    items = []
    for number, row in _lines(options, name):
        if not row.get("messages"):
            raise ValueError(f"{options.path}:{number}: no `messages`")
        fields = {key: row[key] for key in EBCHAT_FIELDS if row.get(key) is not None}
        max_tokens = row.get("max_tokens") or options.output_len
        items.append(Item(str(row.get("id", number)), row["messages"], None, max_tokens, fields))
    return items


# EB line -> OpenAI request field.
EB_FIELDS = {
    "temperature": "temperature",
    "topp": "top_p",
    "penalty_score": "repetition_penalty",
    "frequency_score": "frequency_penalty",
    "presence_score": "presence_penalty",
}


def _eb(options: DatasetOptions) -> list[Item]:
    items = []
    for number, row in _lines(options, "EB"):
        if not isinstance(row.get("text"), str):
            raise ValueError(f"{options.path}:{number}: no `text`")
        fields = {ours: row[theirs] for theirs, ours in EB_FIELDS.items() if row.get(theirs) is not None}
        messages = [{"role": "user", "content": row["text"]}]
        items.append(Item(str(number), messages, None, row.get("max_dec_len") or options.output_len, fields))
    return items


def _prompts(options: DatasetOptions) -> list[Item]:
    """The project's own sets: a path, or the name of a file in benchmarks/prompts (default chat); `mixed` is
    chat, edit and code in turns."""
    path = options.path or Path("chat")
    if str(path) == "mixed":
        sets = [_prompts(replace(options, path=Path(name))) for name in ("chat", "edit", "code")]
        return [item for turn in zip(*sets, strict=False) for item in turn]
    if not path.exists() and (PROMPTS_DIR / f"{path}.jsonl").exists():
        path = PROMPTS_DIR / f"{path}.jsonl"
    return _ebchat(DatasetOptions(path=path, output_len=options.output_len), "prompts")


def _sharegpt(options: DatasetOptions) -> list[Item]:
    """First human turn of every conversation; output as long as the reply, at 4 characters a token."""
    path = _require_path(options, "sharegpt")
    items = []
    for number, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        turns = row.get("conversations") or []
        if len(turns) < 2 or turns[0].get("from") not in ("human", "user"):
            continue
        max_tokens = options.output_len or max(1, len(turns[1]["value"]) // 4)
        messages = [{"role": "user", "content": turns[0]["value"]}]
        items.append(Item(str(row.get("id", number)), messages, None, max_tokens))
    return items


# Common English words, nearly all of them one token in any vocabulary.
_WORD_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by
word but not what all were we when your can said there use an each which she do how their if will up
other about out many then them these so some her would make like him into time has look two more write go
see number no way could people my than first water been call who oil its now find long down day did get
come made may part over new sound take only little work know place year live me back give most very after
thing our just name good sentence man think say great where help through much before line right too mean
old any same tell boy follow came want show also around form three small set put end does another well
large must big even such because turn here why ask went men read need land different home us move try
kind hand picture again change off play spell air away animal house point page letter mother answer found
study still learn should world
"""
WORDS = _WORD_TEXT.split()

TOKEN_ID_RANGE = (2000, 10000)  # inside every real vocabulary, clear of special tokens and bytes


def _random_lengths(options: DatasetOptions) -> Iterator[tuple[random.Random, int, int]]:
    rng = random.Random(options.seed)

    def draw(mean: int) -> int:
        spread = options.random_range_ratio
        return rng.randint(max(1, int(mean * (1 - spread))), max(1, int(mean * (1 + spread))))

    for _ in range(options.num_prompts or 100):
        yield rng, draw(options.random_input_len), draw(options.random_output_len)


def _random_words(options: DatasetOptions) -> list[Item]:
    items = []
    for i, (rng, input_len, output_len) in enumerate(_random_lengths(options)):
        messages = [{"role": "user", "content": " ".join(rng.choices(WORDS, k=input_len))}]
        items.append(Item(f"random-{i}", messages, None, output_len, {"ignore_eos": True}))
    return items


def _random_token_ids(options: DatasetOptions) -> list[Item]:
    items = []
    for i, (rng, input_len, output_len) in enumerate(_random_lengths(options)):
        token_ids = [rng.randrange(*TOKEN_ID_RANGE) for _ in range(input_len)]
        items.append(Item(f"ids-{i}", None, token_ids, output_len, {"ignore_eos": True}))
    return items


DATASETS: dict[str, Callable[[DatasetOptions], list[Item]]] = {
    "EBChat": _ebchat,
    "EB": _eb,
    "sharegpt": _sharegpt,
    "random": _random_words,
    "random_token_ids": _random_token_ids,
    "prompts": _prompts,
}
