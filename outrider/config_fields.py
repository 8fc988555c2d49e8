"""How a configuration field is declared, coerced and checked.

A field's annotation says its type, `option` the rest: choices, bounds, aliases, help. The command
line, the YAML reader, the keywords of `LLM` and the documentation's tables all come from these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one sentence for the user."""

    field: str = ""  # the outermost field at fault, when one field is


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str | int, ...] = (),
    rename: Mapping[str, str] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    aliases: tuple[str, ...] = (),
    later: tuple[str, ...] | None = None,
    secret: bool = False,
    note: str = "",
) -> Any:
    """A dataclass field with what the command line and the checks need to know of it.

    `choices` bind text; `low`, `high` and `above` bind numbers. `later` lists values that are part of
    the contract and that this version does not offer; an empty tuple stands for all but the default.
    """
    metadata = {
        "help": help, "choices": choices, "rename": rename or {}, "low": low, "high": high, "above": above,
        "aliases": aliases, "later": later, "secret": secret, "note": note,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def changed(config: Any) -> list[str]:
    """Names of the fields that differ from their defaults."""
    return [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != f.default]


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)`, or the known names when none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(known)})"


def where(cls: type, name: str) -> str:
    """Where the user changes a field."""
    if cls.__name__ == "SpeculativeConfig":
        return f"change {name} in --speculative-config (speculative_config in the YAML file)"
    return f"change --{name.replace('_', '-')} ({name} in the YAML file)"


@functools.cache
def field_kinds(cls: Any) -> dict[str, tuple[Any, ...]]:
    """Field name -> the types its annotation allows."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for field in dataclasses.fields(cls)
        for hint in [hints[field.name]]
    }


@functools.cache
def field_aliases(cls: Any) -> dict[str, str]:
    """Accepted other name -> field."""
    return {alias: f.name for f in dataclasses.fields(cls) for alias in f.metadata["aliases"]}


def canonical(cls: type, raw: Any) -> str:
    """The field's own name for a name as the user may write it: hyphens count as underscores."""
    name = str(raw).replace("-", "_")
    return field_aliases(cls).get(name, name)


def build(cls: Any, values: Mapping[str, Any]) -> Any:
    """An instance of `cls` from a mapping, or `ConfigError`."""
    known = field_kinds(cls)
    given: dict[str, Any] = {}
    for raw, value in values.items():
        name = canonical(cls, raw)
        if name not in known:
            place = " in --speculative-config" if cls.__name__ == "SpeculativeConfig" else ""
            raise ConfigError(f"unknown configuration key {raw!r}{place}{nearest(str(raw), known)}")
        if name in given:
            raise ConfigError(f"{name} is given twice (once as {raw!r}); {where(cls, name)}")
        given[name] = value
    config = cls(**given)
    if hasattr(config, "check_keys"):
        config.check_keys(given)
    return config


def normalise(config: Any) -> None:
    """Coerce and check every field of a frozen dataclass; called at its construction."""
    cls = type(config)
    for field in dataclasses.fields(config):
        try:
            value = _coerce(getattr(config, field.name), field, cls)
            _check_offered(value, field, cls)
            _check_choice(value, field, cls)
            _check_bounds(value, field, cls)
        except ConfigError as error:
            error.field = field.name
            raise
        object.__setattr__(config, field.name, value)


def shown(value: Any, field: dataclasses.Field[Any]) -> str:
    """A value as logs and errors may show it: secrets never appear."""
    if field.metadata["secret"]:
        return "(hidden)" if value else "none"
    if dataclasses.is_dataclass(value):
        value = {"method": getattr(value, "method", None)} | {n: getattr(value, n) for n in changed(value)}
    if value is None or isinstance(value, str):
        return str(value or "none")
    return json.dumps(value)


def _check_offered(value: Any, field: dataclasses.Field[Any], cls: type) -> None:
    later = field.metadata["later"]
    if later is None or value == field.default or (later and value not in later):
        return
    offered = " or ".join(map(str, field.metadata["choices"])) or shown(field.default, field)
    raise ConfigError(
        f"{field.name} {shown(value, field)} is not offered by this version of Outrider, "
        f"only {offered}; {where(cls, field.name)}"
    )


def _check_choice(value: Any, field: dataclasses.Field[Any], cls: type) -> None:
    only = (field.default,) if field.metadata["later"] else ()
    choices: tuple[Any, ...] = field.metadata["choices"] or only
    bounded = isinstance(value, int) and field.metadata["low"] is not None
    if value is None or not choices or value in choices or bounded:
        return
    names = [str(choice) for choice in choices]
    note = field.metadata["note"]
    hint = "" if isinstance(value, int) else nearest(value, names) if len(names) > 1 else ""
    raise ConfigError(
        f"{field.name} must be {' or '.join(names)}, got {value!r}{hint}{note and f': {note}'}; "
        f"{where(cls, field.name)}"
    )


def _check_bounds(value: Any, field: dataclasses.Field[Any], cls: type) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    low, high, above = (field.metadata[name] for name in ("low", "high", "above"))
    fits = math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high)
    if fits and (above is None or value > above):
        return
    bounds = [f"at least {low}"] if low is not None else [f"above {above}"] if above is not None else []
    bounds += [f"at most {high}"] if high is not None else []
    raise ConfigError(
        f"{field.name} must be {' and '.join(bounds) or 'a finite number'}, got {value}; "
        f"{where(cls, field.name)}"
    )


def _coerce(value: Any, field: dataclasses.Field[Any], cls: type) -> Any:
    """`value` as one of the annotated types. Text is read as the command line reads it."""
    kinds = field_kinds(cls)[field.name]
    if isinstance(value, bool) and "off" in field.metadata["choices"]:
        value = "auto" if value else "off"  # YAML 1.1 reads a bare on or off as a truth value
    if isinstance(value, int) and str(value) in field.metadata["rename"]:
        value = str(value)
    if isinstance(value, str):
        value = _from_text(value, kinds, field, cls)
    for kind in kinds:
        base = typing.get_origin(kind) or kind
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            return build(kind, value)
        if base is tuple and isinstance(value, (list, tuple, str)):
            value = (value,) if isinstance(value, str) else tuple(value)
        if base is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        fits = isinstance(value, base) and not (isinstance(value, bool) and base is not bool)
        if fits and all(isinstance(member, str) for member in _text_members(value, kind)):
            return value
    raise ConfigError(
        f"{field.name} must be {' or '.join(_kind_name(kind) for kind in kinds)}, "
        f"got {'(hidden)' if field.metadata['secret'] else repr(value)} ({type(value).__name__}); "
        f"{where(cls, field.name)}"
    )


def _text_members(value: Any, kind: Any) -> Iterable[Any]:
    """The members of a list or mapping that must be text."""
    if isinstance(value, tuple):
        return value
    return [*value, *value.values()] if kind == dict[str, str] else []


def _from_text(text: str, kinds: tuple[Any, ...], field: dataclasses.Field[Any], cls: type) -> Any:
    lower = text.strip().lower()
    if type(None) in kinds and lower in ("", "none", "null", "auto"):
        return None
    if bool in kinds and lower in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        return lower in ("true", "yes", "on", "1")
    mapping = any(dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict for kind in kinds)
    if mapping and lower.startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{field.name} is not valid JSON ({error}): {text}; {where(cls, field.name)}"
            ) from None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if kind in kinds:
                return kind(text)
    name = field.metadata["rename"].get(lower, text)
    return lower if lower in field.metadata["choices"] else name


def _kind_name(kind: Any) -> str:
    names = {
        int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "none",
        tuple: "a list of texts", dict: "a mapping",
    }  # fmt: skip
    return names.get(typing.get_origin(kind) or kind, "a mapping (or JSON text)")
