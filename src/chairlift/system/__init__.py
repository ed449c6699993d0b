"""Limits of the operating system: memory, control groups, writable files and optional packages."""
