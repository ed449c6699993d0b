"""Limits of the operating system: memory, control groups and writable files."""
