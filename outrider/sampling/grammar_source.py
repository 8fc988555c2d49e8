"""From what a client may ask for to llguidance's own notation, and errors in the client's terms."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.request import GrammarSpec

if TYPE_CHECKING:
    import llguidance

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_REGEX_BYTES = 8 * 1024

_MOST_LEXER_STATES = 25_000  # of about 1 kB each
_STEP_FUEL = 1_000_000  # about 0.1 s of work for one mask
_MOST_REASON = 400  # characters
# How JSON is spaced: as Python writes it. Nothing is left open, so that what must come is known in advance
# and no model loses itself in blanks. A schema may ask for another style with "x-guidance".
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_STYLE_KEYS = frozenset({*_JSON_STYLE, "whitespace_pattern", "coerce_one_of", "lenient"})
_NAMES = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
    "structural_tag": "the structural tag",
}


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why, for the user."""


@functools.lru_cache(maxsize=64)
def check_grammar(spec: GrammarSpec) -> None:
    """Raise GrammarError unless `spec` is a grammar. Takes up to a few tenths of a second."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(translate(spec), limits=limits())
    if is_error:
        raise explain(spec, messages[0])


def limits() -> llguidance.LLParserLimits:
    """What bounds the work and the memory of a grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=_MOST_LEXER_STATES, step_lexer_fuel=_STEP_FUEL, verbose_errors=False
    )


def explain(spec: GrammarSpec, message: str) -> GrammarError:
    """The library's message as an error for the client."""
    name = _NAMES[spec.kind]
    message = re.sub(r"\(in regex\): |<non-verbose/>", "", message)
    unsupported = re.search(r"Unimplemented keys: (\[.*?\])", message)
    if unsupported:
        keys = ", ".join(json.loads(unsupported[1]))
        return GrammarError(f"{name} uses keywords that are not supported: {keys}")
    if "panic" in message:  # the library's own fault: its message is no reason a client can use
        return GrammarError(f"{name} is more than the grammar library can work with")
    if message.startswith("NoExtension"):
        return GrammarError(f"{name} allows no text at all")
    return GrammarError(f"{name} is not usable: {one_line(message)}")


def one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _MOST_REASON else line[: _MOST_REASON - 3] + "..."


def translate(spec: GrammarSpec) -> str:
    """The grammar for the library. Only its outer form is checked here; GrammarError says what is wrong."""
    if spec.kind not in _NAMES:
        raise GrammarError(f"grammar kind must be one of {', '.join(_NAMES)}, got {spec.kind!r}")
    limit = MAX_REGEX_BYTES if spec.kind == "regex" else MAX_GRAMMAR_BYTES
    size = len(spec.text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise GrammarError(f"{_NAMES[spec.kind]} has {size} bytes; at most {limit} are allowed")
    try:
        return _TRANSLATORS[spec.kind](spec)
    except GrammarError:
        raise
    except UnicodeEncodeError:
        raise GrammarError(f"{_NAMES[spec.kind]} has a lone surrogate") from None
    except RecursionError:
        raise GrammarError(f"{_NAMES[spec.kind]} is nested too deeply") from None
    except ValueError as error:
        raise explain(spec, str(error)) from None


def _json_schema(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    schema = _styled(json.loads(spec.text), spec)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _styled(schema: Any, spec: GrammarSpec) -> dict[str, Any]:
    """The schema with what is to be said about blanks, which its own "x-guidance" may override."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema must be an object, got {json.dumps(schema)[:80]}")
    own = schema.get("x-guidance", {})
    unknown = sorted(set(own) - _STYLE_KEYS) if isinstance(own, dict) else ["(not an object)"]
    if unknown:
        raise GrammarError(
            f"x-guidance: unknown option {unknown[0]}; known: {', '.join(sorted(_STYLE_KEYS))}"
        )
    style: dict[str, Any] = {**_JSON_STYLE, "lenient": spec.lenient, "coerce_one_of": spec.lenient}
    if own.get("whitespace_pattern") is not None:
        style["whitespace_flexible"] = True
    return {**schema, "x-guidance": {**style, **own}}


def _regex(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(spec.text)


def _choice(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    choices = json.loads(spec.text)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
        raise GrammarError("a choice needs a list of one or more texts")
    if "" in choices:
        raise GrammarError("a choice must not be empty text")
    # Regular expressions are the library's fastest form, and take any character.
    return LLMatcher.grammar_from_regex("|".join(f"(?:{_quoted(text)})" for text in dict.fromkeys(choices)))


def _quoted(text: str) -> str:
    return re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", text)


def _grammar(spec: GrammarSpec) -> str:
    from llguidance import grammar_from

    return grammar_from("grammar", spec.text)


def _structural_tag(spec: GrammarSpec) -> str:
    from llguidance import StructTag

    asked = json.loads(spec.text)
    structures, triggers = asked.get("structures"), asked.get("triggers")
    if not structures or not triggers:
        raise GrammarError("a structural tag needs one or more structures and triggers")
    tags = []
    for i, structure in enumerate(structures):
        begin = structure["begin"]
        trigger = next((t for t in triggers if t and begin.startswith(t)), None)
        if trigger is None:
            raise GrammarError(f"structures[{i}].begin {begin!r} starts with none of the triggers")
        schema = _styled(_schema_of(structure), spec)
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure.get("end", "")))
    return StructTag.to_grammar(tags, assume_special=False)


def _schema_of(structure: Mapping[str, Any]) -> Any:
    schema = structure.get("schema", structure.get("structure"))
    return json.loads(schema) if isinstance(schema, str) else True if schema is None else schema


_TRANSLATORS = {
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
