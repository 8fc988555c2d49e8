"""One answer's text, taken in pieces and told apart: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.entrypoints.parsers.reader import Reader, Reading, Sink
from outrider.entrypoints.parsers.reasoning import ReasoningFormat, split_reasoning
from outrider.entrypoints.parsers.tool_format import CallSink, ToolFormat

_PIECE = 1024  # characters


@dataclass
class CallDelta:
    """What a piece of text adds to one tool call; id and name come with its first."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass
class Delta:
    """What a piece of text adds to a message, coalesced."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


@dataclass(frozen=True)
class Parsing:
    """How answers to one request are taken apart."""

    reasoning: ReasoningFormat | None = None
    reasoning_is_open: bool = False  # the prompt ends inside the thoughts
    tool_format: type[ToolFormat] | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> schema of the parameters
    parallel: bool = True  # False: calls after the first are dropped
    only_calls: bool = False  # a grammar forces calls: the start of one that was cut off is nothing to show
    make_id: Callable[[], str] = str

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be seen, be they special tokens or not."""
        reasoning = () if self.reasoning is None else self.reasoning.markers
        return (*reasoning, *(() if self.tool_format is None else self.tool_format.markers))


class MessageParser(CallSink):
    """Feeds an answer's text to the reasoning format and what that leaves to the tool format."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[CallDelta, list[str]]] = []  # each with pieces of its arguments
        self.num_calls = 0
        self._stages: list[_Stage] = []
        content: Sink = self.content
        self._tool_format: ToolFormat | None = None
        if parsing.tool_format is not None:
            self._tool_format = parsing.tool_format(Reader(), self, parsing.tools)
            self._stages.append(_Stage(self._tool_format.read()))
            content = self._stages[0].feed
        if parsing.reasoning is not None:
            reading = split_reasoning(
                Reader(), parsing.reasoning, is_inside=parsing.reasoning_is_open,
                reasoning=self._thoughts.append, content=content,
            )  # fmt: skip
            self._stages.insert(0, _Stage(reading))

    def feed(self, text: str) -> Delta:
        """Take some text; what is certain by now."""
        # Readers cut what they have read off their text: in small pieces that costs the same per character.
        for start in range(0, len(text), _PIECE):
            self._stages[0].feed(text[start : start + _PIECE])
        return self._taken()

    def finish(self) -> Delta:
        """The text has ended: what was held back."""
        for stage in self._stages:
            stage.end()
        if self._tool_format is not None:
            self._tool_format.end()
        return self._taken()

    def _taken(self) -> Delta:
        for call, arguments in self._calls:
            call.arguments = "".join(arguments)
        calls = [call for call, _ in self._calls]
        delta = Delta("".join(self._content), "".join(self._thoughts), calls)
        for pieces in (self._content, self._thoughts, self._calls):
            pieces.clear()
        return delta

    def content(self, text: str) -> None:
        if not self._parsing.only_calls:
            self._content.append(text)

    def begin_call(self, name: str) -> None:
        self.num_calls += 1
        if self._is_wanted():
            call = CallDelta(self.num_calls - 1, id=self._parsing.make_id(), name=name)
            self._calls.append((call, []))

    def arguments(self, text: str) -> None:
        if not self._is_wanted():
            return
        if not self._calls or self._calls[-1][0].index != self.num_calls - 1:
            self._calls.append((CallDelta(self.num_calls - 1), []))
        self._calls[-1][1].append(text)

    def _is_wanted(self) -> bool:
        return self._parsing.parallel or self.num_calls == 1


class _Stage:
    """A format at work: a generator that waits for text."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._is_done = False
        self._send(None)  # to where it first waits

    def feed(self, text: str) -> None:
        if text:
            self._send(text)

    def end(self) -> None:
        self._send(None)

    def _send(self, text: str | None) -> None:
        if self._is_done:
            return
        try:
            self._reading.send(text)
        except StopIteration:
            self._is_done = True
