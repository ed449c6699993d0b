"""Recorded runs: the batch and the kinds of KV memory over time, from events."""
