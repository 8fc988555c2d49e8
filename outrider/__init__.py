"""Outrider: an LLM serving engine built around speculative decoding.

The public API is `LLM`, `SamplingParams`, `GrammarSpec`, `EngineConfig` and `SpeculativeConfig`; importing
the package loads none of them, so that commands start at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "GrammarSpec", "SamplingParams", "SpeculativeConfig", "__version__"]

if TYPE_CHECKING:
    from outrider.config import EngineConfig, SpeculativeConfig
    from outrider.llm import LLM
    from outrider.request import GrammarSpec, SamplingParams

_HOMES = {
    "LLM": "outrider.llm",
    "SamplingParams": "outrider.request",
    "GrammarSpec": "outrider.request",
    "EngineConfig": "outrider.config",
    "SpeculativeConfig": "outrider.config",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
