"""`outrider chat`: a conversation in the terminal. Tokens that came from drafts are coloured by source."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.config import EngineConfig
from outrider.entrypoints.arguments import Parser, add_config_flags, configuration_from
from outrider.entrypoints.terminal import TokenWriter, figures, legend, speed, stoppable

HELP = """\
/help              this list
/reset             starts the conversation over
/system [TEXT]     sets the system message, or removes it
/set [NAME VALUE]  shows the settings, or changes one; without a VALUE it is unset
/race [TEXT]       answers TEXT (or the last message) without and with speculation, and compares
/stats             what speculation has done so far
/exit              ends, as Ctrl-D does; Ctrl-C stops an answer"""
SETTINGS: dict[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
}


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
        loaded = f"loaded in {time.monotonic() - began:.1f} s"
        print(f"{configuration.engine.model_name}, {loaded}. /help lists commands.")
        if colour:
            print(f"The model's own tokens are plain, drafted ones coloured by source: {legend()}")
    Conversation(engine, sampling_fields(options), options.system, colour).talk("> " if interactive else "")
    return 0


@dataclass
class Shown:
    """An answer that has been printed."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    speed: float | None = None
    is_stopped: bool = False


class Conversation:
    """Messages so far, and how answers are shown."""

    def __init__(self, engine: Any, fields: dict[str, Any], system: str | None, colour: bool) -> None:
        self._engine = engine
        self._fields = fields
        self._colour = colour
        self._system = system
        self._messages: list[dict[str, str]] = []

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
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        commands = {
            "/reset": lambda text: self._messages.clear(),
            "/system": self._set_system,
            "/set": self._set,
            "/race": self._race,
            "/stats": self._stats,
        }
        commands.get(name, lambda text: print(HELP))(rest.strip())

    def _set_system(self, text: str) -> None:
        self._system = text or None

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            print(", ".join(f"{name} = {self._fields.get(name, 'unset')}" for name in SETTINGS))
        elif name not in SETTINGS:
            print(f"there is no setting {name!r}; settings: {', '.join(SETTINGS)}")
        elif not value.strip():
            self._fields.pop(name, None)
        else:
            self._change(name, value.strip())

    def _change(self, name: str, value: str) -> None:
        try:
            fields = {**self._fields, name: SETTINGS[name](value)}
            self._prepare([{"role": "user", "content": "?"}], fields)
        except ValueError as error:
            print(f"{name} stays as it was: {error}")
        else:
            self._fields = fields

    def _stats(self, text: str) -> None:
        stats = self._engine.stats()
        for source, drafted in stats.get("num_draft_tokens", {}).items():
            accepted = stats["num_accepted_tokens"].get(source, 0)
            print(f"{source}: {accepted} of {drafted} drafted tokens accepted")
        tokens, windows = stats.get("num_generation_tokens", 0), stats.get("num_emitting_windows", 0)
        print(f"{tokens} tokens, {tokens / max(windows, 1):.2f} a step")
        profit = (stats.get("speculation") or {}).get("profit")
        if profit is not None:
            print(f"{profit['ratio']:.2f} times the speed of plain decoding, of late")

    def _turn(self, line: str) -> None:
        asked = [*self._messages, {"role": "user", "content": line}]
        shown = self._answer(asked, self._fields)
        if shown is not None:
            self._messages = [*asked, {"role": "assistant", "content": shown.text}]

    def _race(self, text: str) -> None:
        """The same prompt and seed twice, each run with a salt of its own: no cache, no past output helps."""
        asked = [*self._messages, {"role": "user", "content": text}] if text else self._last_question()
        if not asked:
            print("there is nothing to race yet: /race TEXT")
            return
        fields = {**self._fields, "seed": self._fields.get("seed", random.getrandbits(32))}
        lanes = []
        for title, extra in (("speculation off", {"speculation": "off"}), ("speculation on", {})):
            print(f"--- {title}")
            shown = self._answer(asked, {**fields, **extra}, cache_salt=f"race {time.monotonic_ns()}")
            if shown is None or shown.is_stopped:
                return
            lanes.append(shown)
        print(verdict(*lanes))
        self._messages = [*asked, {"role": "assistant", "content": lanes[1].text}]

    def _last_question(self) -> list[dict[str, str]]:
        roles = [message["role"] for message in self._messages]
        return self._messages[: len(roles) - roles[::-1].index("user")] if "user" in roles else []

    def _prepare(self, messages: list[dict[str, str]], fields: dict[str, Any]) -> Any:
        from outrider.entrypoints.protocol import ChatCompletionRequest

        opening = [{"role": "system", "content": self._system}] if self._system else []
        return self._engine.prepare(
            ChatCompletionRequest.model_validate({"messages": opening + messages, **fields})
        )

    def _answer(
        self, messages: list[dict[str, str]], fields: dict[str, Any], cache_salt: str = ""
    ) -> Shown | None:
        try:
            prepared = self._prepare(messages, fields)
        except ValueError as error:
            print(f"{error} (/reset starts over)", file=sys.stderr)
            return None
        return self._show(prepared, cache_salt)

    def _show(self, prepared: Any, cache_salt: str) -> Shown:
        """Print the answer as it comes and figures under it; Ctrl-C ends it early."""
        writer = TokenWriter(self._engine.tokenizer, self._colour)
        shown = Shown("")
        began = first = time.monotonic()
        first_count, last = 0, None
        try:
            with (
                stoppable() as is_stopped,
                contextlib.closing(self._engine.run([prepared], cache_salt)) as run,
            ):
                for _, _, output in run:
                    if last is None:
                        first, first_count = time.monotonic(), output.num_output_tokens
                    writer.write(output.token_ids, output.sources)
                    shown.text += output.text
                    shown.token_ids += output.token_ids
                    last = output
                    if is_stopped() and output.finish_reason is None:
                        shown.is_stopped = True
                        break
        except KeyboardInterrupt:
            shown.is_stopped = True
        seconds = time.monotonic() - first
        if shown.is_stopped:
            writer.note("(stopped)")
        writer.note(figures(last, first_count, first - began, seconds, self._colour))
        shown.speed = None if last is None else speed(last, first_count, seconds)
        return shown


def verdict(off: Shown, on: Shown) -> str:
    """Whether the two answers of a race are equal, and their speeds."""
    if off.token_ids == on.token_ids and off.text == on.text:
        result = f"the texts are equal, all {len(on.token_ids)} tokens"
    else:
        pairs = zip(off.token_ids, on.token_ids, strict=False)
        shorter = min(len(off.token_ids), len(on.token_ids))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        result = f"THE TEXTS DIFFER from token {place + 1} on"
    if off.speed and on.speed:
        result += f"; {on.speed / off.speed:.2f} times the speed, {off.speed:.1f} -> {on.speed:.1f} tokens/s"
    return result
