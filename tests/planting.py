"""The list of planted faults; `planted_faults.py` says what they are for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Patch = pytest.MonkeyPatch
FAULTS: dict[str, Callable[[Patch], None]] = {}


def fault(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Put a function that plants a fault on the list, under its own name."""
    FAULTS[plant.__name__.replace("_", " ")] = plant
    return plant
