"""`outrider pull`: get a model and say where it is."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.config import DEFAULT_MODEL
from outrider.entrypoints.arguments import Parser


def main(arguments: Sequence[str]) -> int:
    """Print the path of the model, which is downloaded if it is not here yet."""
    parser = Parser(prog="outrider pull", description="Get a model: built-in name, hub id or path.")
    parser.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--revision", help="hub revision")
    options = parser.parse_args(arguments)
    from outrider.models.loader import resolve_model

    print(resolve_model(options.model, revision=options.revision))
    return 0
