"""Write the option tables of docs/configuration.md from the dataclasses: `python tools/config_tables.py`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from outrider.config import EngineConfig, ServerConfig, SpeculativeConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
TABLES = {"engine": EngineConfig, "speculation": SpeculativeConfig, "server": ServerConfig}


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.name == "speculative_config":
        return '`{"method": "auto"}`'
    if field.default is None or field.default == ():
        return "none"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default}`"


def allowed_of(field: dataclasses.Field[Any]) -> str:
    meta = field.metadata
    if meta["later"] == ():
        return "only the default in this version"
    parts = []
    if meta["choices"]:
        parts.append(", ".join(str(c) for c in meta["choices"]))
    if meta["low"] is not None and meta["high"] is not None:
        parts.append(f"{meta['low']}..{meta['high']}")
    elif meta["low"] is not None:
        parts.append(f"at least {meta['low']}")
    if meta["above"] is not None:
        parts.append(f"above {meta['above']}" + (f", at most {meta['high']}" if meta["high"] else ""))
    return "; ".join(parts)


def table(cls: Any) -> str:
    lines = ["| name | default | meaning | allowed |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        lines.append(
            f"| `{field.name}` | {default_of(field)} | {field.metadata['help']} | {allowed_of(field)} |"
        )
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with each table between its markers renewed."""
    for name, cls in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(pattern, lambda m, cls=cls: m[1] + table(cls) + "\n" + m[2], page, flags=re.S)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
