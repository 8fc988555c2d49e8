"""The documents tell the truth: paths exist, tables equal the code, snippets run, layers and sizes hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
SOURCES = sorted((ROOT / "outrider").rglob("*.py"))

# A file's layer may import its own and the later ones.
LAYERS = [
    ["entrypoints"],
    ["verification"],
    ["training"],
    ["llm"],
    ["engine"],
    ["spec_decode", "sampling", "models"],
    ["backends"],
    ["_native"],
]
ALLOWED_BY_ALL = {"request", "config", "config_fields", "logs", "_native"}


def layer_of(module: str) -> int:
    for i, names in enumerate(LAYERS):
        if module in names:
            return i
    raise AssertionError(f"module outrider.{module} belongs to no layer; add it to LAYERS")


def runtime_imports(path: Path) -> set[str]:
    """First components under `outrider` that a file imports outside `if TYPE_CHECKING`."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                names = [a.name for a in child.names]
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                names = [child.module]
                if child.module == "outrider":
                    names = [f"outrider.{a.name}" for a in child.names]
            else:
                names = []
            found.update(n.split(".")[1] for n in names if n.startswith("outrider."))
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_layer_imports_only_what_lies_below_it(path: Path) -> None:
    parts = path.relative_to(ROOT / "outrider").with_suffix("").parts
    if parts[0] == "__init__":
        return
    imports = runtime_imports(path)
    if parts[0] in ("request", "config", "config_fields", "logs"):
        assert not imports - {"config_fields"}, f"{path.name} imports {imports}"
        return
    own = layer_of(parts[0])
    for name in imports - ALLOWED_BY_ALL - {parts[0], "__version__"}:
        assert layer_of(name) >= own, f"{'.'.join(parts)} imports outrider.{name}, a layer above it"


@pytest.mark.parametrize("name", ["engine/scheduler.py", "engine/kv_cache.py", "request.py", "config.py"])
def test_scheduling_needs_no_array_library(name: str) -> None:
    text = (ROOT / "outrider" / name).read_text()
    assert not re.search(r"^\s*(import|from) (numpy|torch)", text, re.M)


def test_the_core_does_not_import_torch() -> None:
    modules = "outrider.llm, outrider.entrypoints.app, outrider.engine.core_process"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_keep_their_size(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 450, "is there a seam?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            start = body[0].end_lineno or 0 if ast.get_docstring(node) else node.lineno
            length = (node.end_lineno or 0) - start
            assert length <= 60, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_path_and_link_in_the_documents_exists(path: Path) -> None:
    text = path.read_text()
    named = re.findall(r"`((?:outrider|csrc|benchmarks|docs|tests|tools)/[\w./-]+)`", text)
    missing = [n for n in named if not (ROOT / n).exists()]
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    missing += [n for n in links if not (path.parent / n).exists()]
    assert not missing


def test_generated_tables_are_fresh() -> None:
    """Option tables equal the dataclasses, and every source file is on the tour with its own first line."""
    sys.path.insert(0, str(ROOT / "tools"))
    import doc_tables

    for path in doc_tables.PAGES:
        page = path.read_text()
        assert page == doc_tables.filled(page), "run python tools/doc_tables.py"
        assert page.count("\n| `") > 50
        silent = re.findall(r"^\| (`[^|]*`) \|\s*\|$", page, re.M)
        assert not silent, f"{silent} say nothing of themselves"


def snippets(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


@pytest.mark.model
@pytest.mark.parametrize(
    ("path", "index"),
    [(p, i) for p in DOCS if p.exists() for i in range(len(snippets(p, "python")))],
    ids=lambda v: str(v.relative_to(ROOT)) if isinstance(v, Path) else str(v),
)
def test_python_snippets_run(path: Path, index: int, served_model: str) -> None:
    """Snippets speak to http://127.0.0.1:8000; here that is the test's own server."""
    code = snippets(path, "python")[index].replace("http://127.0.0.1:8000", served_model)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


@pytest.mark.model
@pytest.mark.parametrize(
    ("path", "index"),
    [(p, i) for p in DOCS if p.exists() for i in range(len(snippets(p, "bash")))],
    ids=lambda v: str(v.relative_to(ROOT)) if isinstance(v, Path) else str(v),
)
def test_shell_snippets_run(path: Path, index: int, served_model: str) -> None:
    """Blocks marked `bash` are run as they stand; what only shows is marked `text` or `sh`."""
    code = snippets(path, "bash")[index].replace("http://127.0.0.1:8000", served_model)
    bin_dir = Path(sys.executable).parent
    env = {"PATH": f"{bin_dir}:/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home())}
    subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True, cwd=ROOT, timeout=180, env=env)
