"""The tool-call formats of the supported model families."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.entrypoints.parsers.reader import Reading, drop
from outrider.entrypoints.parsers.tool_format import ArgumentWriter, ToolFormat, Trimmed


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`: Hermes, Qwen, ERNIE, SmolLM."""

    markers = ("<tool_call>", "</tool_call>")

    def read(self) -> Reading:
        while marker := (yield from self.reader.until(self.markers, self.content)):
            if marker == self.markers[0] and (yield from self.json_calls(marker)):
                # Some models forget the end mark; nothing but it may be read over here.
                yield from self.reader.blanks()
                yield from self.reader.literal(self.markers[1])


class Llama3(ToolFormat):
    """`{"name": ..., "parameters": ...}` as the whole answer, or behind `<|python_tag|>`; several are
    separated by semicolons."""

    markers = ("<|python_tag|>",)

    def read(self) -> Reading:
        blanks = yield from self.reader.blanks()
        if (yield from self.reader.peek()) in ("{", "["):
            yield from self.json_calls(blanks, only_known=True)
        else:
            self.content(blanks)
        while marker := (yield from self.reader.until(self.markers, self.content)):
            yield from self.json_calls(marker, only_known=True)


class Mistral(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}]`, and since version 11 of its tokenizers
    `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def read(self) -> Reading:
        while marker := (yield from self.reader.until(self.markers[:1], self.content)):
            blanks = yield from self.reader.blanks()
            if (yield from self.reader.peek()) in ("{", "["):
                yield from self.json_calls(marker + blanks)
            else:
                yield from self._named_call(marker)

    def _named_call(self, marker: str) -> Reading:
        name: list[str] = []
        found = yield from self.reader.until((*self.markers[1:], "{"), name.append)
        if not found or not "".join(name).strip():
            self.content(marker + "".join(name) + (found or ""))
            return
        self.begin_call("".join(name).strip())
        if found == "[CALL_ID]":
            found = yield from self.reader.until(("[ARGS]", "{"), drop)
        if found == "{":
            self.reader.unread("{")
        yield from self.reader.json_value(self.arguments)


class DeepSeek(ToolFormat):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` (V3.1), or "function",
    the separator, the name and a fenced block of JSON (V3, R1); all between marks of their own."""

    markers = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )

    def read(self) -> Reading:
        begin_all, begin, separator, _, end_all = self.markers
        sink = self.content
        while marker := (yield from self.reader.until((begin_all, begin, end_all), sink)):
            sink = drop if marker != end_all else self.content
            if marker == begin:
                head: list[str] = []
                if (yield from self.reader.until((separator,), head.append)):
                    yield from self._call("".join(head).strip())
                else:
                    self.content(marker + "".join(head))

    def _call(self, name: str) -> Reading:
        yield from self.reader.blanks()
        if (yield from self.reader.peek()) != "{":
            parts: list[str] = []
            yield from self.reader.until(("\n",), parts.append)
            name = "".join(parts).strip()
            yield from self.reader.literal("```json")
        self.begin_call(name)
        yield from self.reader.json_value(self.arguments)
        yield from self.reader.until(self.markers[3:4], drop)


class Glm45(ToolFormat):
    """`<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` for each argument."""

    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read(self) -> Reading:
        begin, end, begin_key, end_key, begin_value, end_value = self.markers
        while (yield from self.reader.until((begin,), self.content)):
            name: list[str] = []
            marker = yield from self.reader.until((begin_key, end), name.append)
            if marker is None and not "".join(name).strip():
                self.content(begin + "".join(name))
                return
            self.begin_call("".join(name).strip())
            writer = ArgumentWriter(self, "".join(name).strip())
            while marker == begin_key:
                key: list[str] = []
                yield from self.reader.until((end_key,), key.append)
                if not (yield from self.reader.until((begin_value,), drop)):
                    break
                writer.begin("".join(key).strip())
                if not (yield from self.reader.until((end_value,), writer.value)):
                    return
                writer.end_value()
                marker = yield from self.reader.until((begin_key, end), drop)
            writer.end()


class Qwen3Coder(ToolFormat):
    """`<function=name>`, then `<parameter=key>value</parameter>` for each argument, in `<tool_call>`."""

    markers = ("<tool_call>", "</tool_call>")

    def read(self) -> Reading:
        while marker := (yield from self.reader.until((*self.markers, "<function="), self.content)):
            if marker != "<function=":
                continue
            name: list[str] = []
            if not (yield from self.reader.until((">",), name.append)):
                self.content(marker + "".join(name))
                return
            self.begin_call("".join(name).strip())
            writer = ArgumentWriter(self, "".join(name).strip())
            while (yield from self.reader.until(("<parameter=", "</function>"), drop)) == "<parameter=":
                key: list[str] = []
                if not (yield from self.reader.until((">",), key.append)):
                    return
                writer.begin("".join(key).strip())
                if not (yield from self.reader.until(("</parameter>",), Trimmed(writer.value))):
                    return
                writer.end_value()
            writer.end()


TOOL_FORMATS: Mapping[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "llama3_json": Llama3,
    "mistral": Mistral,
    "deepseek_v3": DeepSeek,
    "glm45": Glm45,
    "qwen3_coder": Qwen3Coder,
    "ernie45": Hermes,
}
