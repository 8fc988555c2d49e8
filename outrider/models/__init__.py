"""Checkpoints, tokenizers and model functions."""
