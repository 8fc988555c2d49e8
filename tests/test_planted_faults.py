"""A test is trusted once it has failed on a planted fault."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from planted_faults import FAULTS, hunt


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Proposers fail on purpose here, and each failure's traceback costs more than a load."""
    logging.getLogger("outrider.engine.drafting").disabled = True
    yield
    logging.getLogger("outrider.engine.drafting").disabled = False


@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    assert hunt() is not None


def test_the_hunt_finds_nothing_in_honest_code() -> None:
    assert hunt() is None
