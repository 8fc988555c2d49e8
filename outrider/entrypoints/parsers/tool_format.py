"""What all tool-call formats share: where content and calls go, and what a call looks like in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.entrypoints.parsers.reader import BLANKS, Reader, Reading, Sink


class CallSink:
    """Takes what a format finds."""

    def content(self, text: str) -> None:
        raise NotImplementedError

    def begin_call(self, name: str) -> None:
        raise NotImplementedError

    def arguments(self, text: str) -> None:
        raise NotImplementedError


class ToolFormat:
    """Reads one answer: `read` is the format.

    `markers` are texts that may be special tokens of a vocabulary and must be seen all the same.
    """

    markers: tuple[str, ...] = ()

    def __init__(self, reader: Reader, sink: CallSink, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """`tools`: name -> JSON schema of its parameters."""
        self.reader = reader
        self.tools = tools
        self._sink = sink
        self._blanks: list[str] = []  # blanks around calls are layout; elsewhere they are content
        self._has_calls = False

    def read(self) -> Reading:
        raise NotImplementedError

    def content(self, text: str) -> None:
        shown = text.rstrip(BLANKS)
        if shown:
            self._sink.content("".join(self._blanks) + shown)
            self._blanks.clear()
        self._blanks.append(text[len(shown) :])

    def begin_call(self, name: str) -> None:
        self._blanks.clear()
        self._has_calls = True
        self._sink.begin_call(name)

    def arguments(self, text: str) -> None:
        if text:
            self._sink.arguments(text)

    def end(self) -> None:
        """All has been read: blanks at its end are content where there are no calls."""
        if not self._has_calls:
            self._sink.content("".join(self._blanks))

    def json_calls(self, before: str, *, only_known: bool = False) -> Reading:
        """Read calls written as JSON objects, alone, in a row or in a list; the number of calls.

        Text that is no call becomes content, with `before`, what introduced it. `only_known`: an object
        is a call only if it names one of the tools.
        """
        number, opening = 0, ""
        while True:
            opening += yield from self.reader.blanks()
            char = yield from self.reader.peek()
            if char == "[" and not number and "[" not in opening:
                opening += "["
                yield from self.reader.literal("[")
            elif number and char and char in ",;]":
                yield from self.reader.literal(char)
            elif char == "{":
                if not (yield from _Object(self, only_known).read(before + opening)):
                    return number
                number += 1
                before = opening = ""
            else:
                if not number:
                    self.content(before + opening)
                return number


class _Object:
    """One call as a JSON object: its name under "name" or "function", its arguments under "arguments" or
    "parameters", in any order."""

    def __init__(self, form: ToolFormat, only_known: bool) -> None:
        self._form = form
        self._reader = form.reader
        self._only_known = only_known
        self._name: str | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._raw: list[str] = []  # all that was read, until it is a call
        self._has_arguments = False

    def read(self, before: str) -> Reading:
        """True if it was a call; otherwise its text, after `before`, has become content."""
        self._raw.append(before)
        yield from self._take("{")
        while self._name is not None or not self._is_refused:
            self._keep((yield from self._reader.blanks()))
            char = yield from self._reader.peek()
            if char == ",":
                yield from self._take(",")
            elif char == '"':
                if not (yield from self._member()):
                    break
            else:
                yield from self._take("}")
                break
        if self._name is None:
            self._form.content("".join(self._raw))
            return False
        if not self._has_arguments:
            self._form.arguments("{}")
        return True

    _is_refused = False

    def _member(self) -> Reading:
        """Read `"key": value`; False where the colon is missing."""
        key_text = yield from self._reader.json_text()
        blanks = yield from self._reader.blanks()
        self._keep(key_text + blanks)
        if not (yield from self._take(":")):
            return False
        self._keep((yield from self._reader.blanks()))
        key = _string(key_text)
        if key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            yield from self._arguments()
        elif key in ("name", "function") and self._name is None:
            value = yield from self._reader.json_text()
            self._keep(value)
            self._take_name(_string(value))
        else:
            yield from self._reader.json_value(self._keep)
        return True

    def _take_name(self, name: str | None) -> None:
        if not name or (self._only_known and name not in self._form.tools):
            self._is_refused = True
            return
        self._name = name
        self._form.begin_call(name)
        self._form.arguments("".join(self._early))

    def _arguments(self) -> Reading:
        if (yield from self._reader.peek()) == '"':  # JSON spelt as a string, as in the API
            text = yield from self._reader.json_text()
            self._keep(text)
            self._pass(_string(text) or "{}")
        else:
            yield from self._reader.json_value(self._keep_and_pass)

    def _keep_and_pass(self, text: str) -> None:
        self._keep(text)
        self._pass(text)

    def _pass(self, text: str) -> None:
        if self._name is None:
            self._early.append(text)
        else:
            self._form.arguments(text)

    def _keep(self, text: str) -> None:
        if self._name is None:
            self._raw.append(text)

    def _take(self, text: str) -> Reading:
        found = yield from self._reader.literal(text)
        if found:
            self._keep(text)
        return found


def _string(text: str) -> str | None:
    """The string that a JSON text spells; None if it spells something else."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class ArgumentWriter:
    """Builds a call's arguments from keys and values that a format writes one by one, as text.

    A value is a string where the tool's schema says so; elsewhere it is taken as JSON if it is JSON.
    """

    def __init__(self, form: ToolFormat, name: str) -> None:
        self._form = form
        properties = form.tools.get(name, {}).get("properties", {})
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._is_string = False
        self._held: list[str] = []
        self._number = 0

    def begin(self, key: str) -> None:
        schema = self._properties.get(key, {})
        self._is_string = isinstance(schema, Mapping) and schema.get("type") == "string"
        opening = ("{" if not self._number else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._number += 1
        self._held = []
        self._form.arguments(opening + ('"' if self._is_string else ""))

    def value(self, text: str) -> None:
        """Some of the value's text; strings are passed on at once."""
        if self._is_string:
            self._form.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._held.append(text)

    def end_value(self) -> None:
        if self._is_string:
            self._form.arguments('"')
            return
        text = "".join(self._held)
        try:
            json.loads(text)
        except ValueError:
            text = json.dumps(text, ensure_ascii=False)
        self._form.arguments(text.strip(BLANKS))

    def end(self) -> None:
        self._form.arguments("}" if self._number else "{}")


class Trimmed:
    """Passes text on without one line break at its start and one at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._is_first = True
        self._held = ""

    def __call__(self, text: str) -> None:
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._sink(text.removesuffix("\n"))
