"""Command-line flags from the configuration's dataclasses, and errors that help.

Flags carry text; the configuration reads it, exactly as it reads YAML and keywords. Only flags that were
typed are passed on, so that a typed flag beats the YAML file even where it repeats a default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from typing import Any, NoReturn

from outrider.config import FASTDEPLOY_KEYS, ConfigError, Configuration, EngineConfig, ServerConfig, load
from outrider.config_fields import field_kinds, shown


class Parser(argparse.ArgumentParser):
    """No abbreviations; an unknown flag names the nearest known one; errors are one sentence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._explain(unknown[0]))
        return parsed

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)

    def _explain(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r}; see {self.prog} --help"
        flag = argument.split("=", 1)[0]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        close = difflib.get_close_matches(flag, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"see {self.prog} --help"
        return f"unknown flag {flag}; {hint}"


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def add_config_flags(parser: argparse.ArgumentParser, *classes: type) -> None:
    """MODEL, --config and a flag for every field of the dataclasses."""
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", default=None, help=argparse.SUPPRESS)
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="YAML file with the same names; typed flags win"
    )
    for cls in classes:
        group = parser.add_argument_group("server" if cls is ServerConfig else "engine")
        for field in dataclasses.fields(cls):
            _add_flag(group, cls, field)
    for name in FASTDEPLOY_KEYS:
        parser.add_argument(_flag(name), dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_flag(group: Any, cls: type, field: dataclasses.Field[Any]) -> None:
    flags = [_flag(name) for name in (field.name, *field.metadata["aliases"])]
    default = shown(field.default, field)
    text = f"{field.metadata['help']} [{default}]" if default != "none" else field.metadata["help"]
    options: dict[str, Any] = {
        "dest": field.name,
        "default": argparse.SUPPRESS,
        "help": text.replace("%", "%%"),
    }
    if field.metadata["later"] == ():  # part of the contract, not of this version: say so when it is used
        options["help"] = argparse.SUPPRESS
    kinds = field_kinds(cls)[field.name]
    if bool in kinds:
        group.add_argument(*flags, nargs="?", const="true", metavar="true|false", **options)
        options["help"] = argparse.SUPPRESS
        group.add_argument(f"--no-{flags[0][2:]}", action="store_const", const="false", **options)
        return
    choices = "|".join(map(str, field.metadata["choices"]))
    action = "append" if field.default == () else "store"
    group.add_argument(*flags, action=action, metavar=choices or field.name.upper().split("_")[-1], **options)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def configuration_from(arguments: argparse.Namespace) -> Configuration:
    """The configuration of parsed arguments; ConfigError says what is wrong with it."""
    names = {f.name for cls in (EngineConfig, ServerConfig) for f in dataclasses.fields(cls)} | set(
        FASTDEPLOY_KEYS
    )
    flags = {name: value for name, value in vars(arguments).items() if name in names}
    if arguments.model_argument is not None:
        if "model" in flags:
            raise ConfigError(
                f"the model is given twice, as {arguments.model_argument!r} and as "
                f"--model {flags['model']!r}; remove one"
            )
        flags["model"] = arguments.model_argument
    return load(flags, arguments.config)
