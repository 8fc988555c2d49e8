"""Proposers of draft tokens, and how many of them are worth verifying."""
