"""Renew the generated tables of the documents: `python tools/doc_tables.py`.

Option tables come from the dataclasses, the tour from the first line of each file.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

from outrider.config import EngineConfig, ServerConfig, SpeculativeConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "configuration.md", ROOT / "docs" / "index.md"]
CONFIGS = {
    "engine options": EngineConfig,
    "speculation options": SpeculativeConfig,
    "server options": ServerConfig,
}
FOLDERS = [
    ("outrider", "*.py"),
    ("outrider/entrypoints", "*.py"),
    ("outrider/engine", "*.py"),
    ("outrider/sampling", "*.py"),
    ("outrider/spec_decode", "*.py"),
    ("outrider/training", "*.py"),
    ("outrider/models", "*.py"),
    ("outrider/backends", "*.py"),
    ("csrc", "*.cpp"),
    ("csrc/kernels", "*.*"),
    ("benchmarks", "*.py"),
]


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


def first_line(path: Path) -> str:
    """What a file says of itself: the first line of its docstring or of its leading comment."""
    text = path.read_text()
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    comment = re.match(r"(?://[^\n]*\n)+", text)
    header = path.with_suffix(".h")
    if not comment and path.suffix == ".cpp" and header.exists():
        return first_line(header)
    words = " ".join(line.lstrip("/ ") for line in comment[0].splitlines()) if comment else ""
    return re.split(r"(?<=[.:])\s", words + " ")[0]


def tour(folder: str, pattern: str) -> str:
    lines = ["| file | what it is for |", "|---|---|"]
    for path in sorted((ROOT / folder).glob(pattern)):
        if path.name != "__init__.py" or folder == "outrider":
            lines.append(f"| `{path.relative_to(ROOT)}` | {first_line(path)} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with each table between its markers renewed."""
    tables = {name: table(cls) for name, cls in CONFIGS.items()}
    tables |= {folder: tour(folder, pattern) for folder, pattern in FOLDERS}
    for name, text in tables.items():
        pattern = rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)"
        page = re.sub(pattern, lambda m, text=text: m[1] + text + "\n" + m[2], page, flags=re.S)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
