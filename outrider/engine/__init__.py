"""Scheduler, cache, batches and the step that ties them together."""
