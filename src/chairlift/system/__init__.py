"""Limits that the operating system sets: memory, control groups, files."""
