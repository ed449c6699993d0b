"""Runs the engine core in a separate thread or process, behind a client."""
