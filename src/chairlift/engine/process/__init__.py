"""Runs the engine core in a thread or a process of its own, behind a client."""
