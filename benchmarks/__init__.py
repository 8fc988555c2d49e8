"""Measuring Outrider and its peers: scripts to run, and the few modules they share."""
