"""The losslessness certificate: every way to decode gives the tokens of plain decoding."""
