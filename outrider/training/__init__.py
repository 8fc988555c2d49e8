"""Training draft heads: data that the target itself writes, and the trainer (needs torch)."""
