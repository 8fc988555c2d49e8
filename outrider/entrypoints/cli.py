"""The `outrider` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from outrider import __version__

COMMANDS = {
    "serve": "serve a model over the OpenAI API",
    "chat": "chat in the terminal; tokens that came from drafts are coloured",
    "run-batch": "answer a file of requests in OpenAI's batch format; resumes where it stopped",
    "generate": "answer a prompt, or every line of a JSONL file",
    "verify": "prove on this machine that speculation changes no token",
    "doctor": "say what works on this machine, what does not, and what to do",
    "bench": "run a benchmark: serving, kernels, engine or peers",
    "pull": "get a model: built-in name, hub id or path",
    "train-mtp": "train a draft head for a model on what it writes itself",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 2 for what the user can mend in the command, 1 for other failures."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"outrider {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"commands: {', '.join(COMMANDS)}"
        print(f"outrider: error: there is no command {name!r}; {hint}", file=sys.stderr)
        return 2
    return run(_command(name), arguments[1:])


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command and turn its failures into one sentence and an exit code."""
    try:
        return command(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            raise
        text = str(error) if isinstance(error, (ValueError, OSError, RuntimeError)) else ""
        print(f"outrider: error: {text or repr(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _command(name: str) -> Callable[[Sequence[str]], int]:
    import importlib

    module = "api_server" if name == "serve" else name.replace("-", "_")
    function: Callable[[Sequence[str]], int] = importlib.import_module(f"outrider.entrypoints.{module}").main
    return function


def _help() -> str:
    lines = ["usage: outrider COMMAND [MODEL] [flags]", "", "commands:"]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    lines += [
        "",
        "MODEL is a directory, a .gguf file, a hub id or a built-in name (default: smollm2-135m).",
        "outrider COMMAND --help shows a command's flags; outrider --version the version.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
