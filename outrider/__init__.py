"""Outrider: an LLM serving engine built around speculative decoding."""

__version__ = "0.1.0"
