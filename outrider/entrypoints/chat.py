"""`outrider chat`: a conversation in the terminal. Tokens that came from drafts are coloured by source."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from outrider.config import EngineConfig
from outrider.entrypoints.arguments import Parser, add_config_flags, configuration_from

RESET, DIM = "\x1b[0m", "\x1b[2m"
COLOURS = {"model": "", "ngram": "\x1b[32m", "suffix": "\x1b[36m", "mtp": "\x1b[35m", "predicted": "\x1b[33m"}
OTHER = "\x1b[34m"
HELP = "/reset starts over, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


def main(arguments: Sequence[str]) -> int:
    """Talk until the input ends."""
    from outrider.entrypoints.local import LocalEngine, add_sampling_flags, sampling_fields

    parser = Parser(prog="outrider chat", usage="outrider chat [MODEL] [flags]")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--no-colour", "--no-color", dest="no_colour", action="store_true", help="plain text")
    add_sampling_flags(parser, temperature=0.7)
    add_config_flags(parser, EngineConfig)
    options = parser.parse_args(arguments)
    configuration = configuration_from(options)
    began = time.monotonic()
    engine = LocalEngine(configuration)
    interactive = sys.stdin.isatty()
    colour = sys.stdout.isatty() and not options.no_colour and not os.environ.get("NO_COLOR")
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (line editing for input())
        print(f"{configuration.engine.model_name}, loaded in {time.monotonic() - began:.1f} s. {HELP}.")
        if colour:
            print(f"Colours: the model's own tokens plain, drafted ones {COLOURS['ngram']}ngram{RESET}.")
    Conversation(engine, sampling_fields(options), options.system, colour).talk("> " if interactive else "")
    return 0


class Conversation:
    """Messages so far, and how answers are shown."""

    def __init__(self, engine: Any, fields: dict[str, Any], system: str | None, colour: bool) -> None:
        self._engine = engine
        self._fields = fields
        self._colour = colour
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = list(self._opening)

    def talk(self, prompt: str) -> None:
        """Read lines and answer each."""
        while True:
            try:
                line = input(prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                self._messages = list(self._opening)
            elif line.startswith("/"):
                print(HELP)
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        from outrider.entrypoints.protocol import ChatCompletionRequest

        asked = [*self._messages, {"role": "user", "content": line}]
        try:
            prepared = self._engine.prepare(
                ChatCompletionRequest.model_validate({"messages": asked, **self._fields})
            )
        except ValueError as error:
            print(f"{error} (/reset starts over)", file=sys.stderr)
            return
        answer = self._show(prepared)
        self._messages = [*asked, {"role": "assistant", "content": answer}]

    def _show(self, prepared: Any) -> str:
        """Print the answer as it comes and figures under it; Ctrl-C ends it early. Returns the text."""
        writer = TokenWriter(self._engine.tokenizer, self._colour)
        text: list[str] = []
        began, first, last = time.monotonic(), 0.0, None
        outputs = self._engine.run([prepared])
        try:
            with contextlib.closing(outputs):
                for _, _, output in outputs:
                    first = first or time.monotonic()
                    writer.write(output.token_ids, output.sources)
                    text.append(output.text)
                    last = output
        except KeyboardInterrupt:
            writer.note("(stopped)")
        writer.note(figures(last, began, first, time.monotonic()))
        return "".join(text)


class TokenWriter:
    """Writes tokens in the colour of their source, in whole characters."""

    def __init__(self, tokenizer: Any, colour: bool) -> None:
        self._table = tokenizer.token_bytes()
        self._special = tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._colour = colour

    def write(self, token_ids: Sequence[int], sources: Sequence[str]) -> None:
        for token_id, source in zip(token_ids, sources, strict=True):
            piece = b"" if token_id in self._special else self._table[token_id]
            text = self._decoder.decode(piece)
            colour = COLOURS.get(source, OTHER) if self._colour else ""
            sys.stdout.write(f"{colour}{text}{RESET}" if colour and text else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line of its own, dimmed."""
        sys.stdout.write(f"\n{DIM}{text}{RESET}\n" if self._colour else f"\n{text}\n")
        sys.stdout.flush()


def figures(last: Any, began: float, first: float, end: float) -> str:
    """Speed and acceptance of an answer, in a line."""
    if last is None:
        return "no tokens"
    count, seconds = last.num_output_tokens, max(end - first, 1e-9)
    parts = [f"{count} tokens", f"first after {first - began:.2f} s"]
    if count > 1:
        parts.append(f"{(count - 1) / seconds:.1f} tokens/s")
    stats = last.speculation
    if stats is not None and stats.draft_tokens:
        parts.append(f"{stats.mean_acceptance_length:.2f} tokens a step")
        parts += [
            f"{source} {accepted}/{drafted} accepted"
            for source, (drafted, accepted) in stats.by_source.items()
        ]
    return ", ".join(parts)
