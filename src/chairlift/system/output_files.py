"""Checks that output files can be written before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from chairlift.errors import ConfigError


def check_writable(field: str, path: Path) -> None:
    """Check that a file can be written, without changing it.

    Raises:
        ConfigError: the file cannot be written; the message has the field, the path, the reason and what to do.
    """
    is_new = not os.path.lexists(path)
    if not (is_new or path.is_file() or path.is_dir()):
        return  # Opening a pipe would block until it has a reader, and closing it would end the reader.
    try:
        path.open("ab").close()
    except OSError as error:
        raise unwritable_file_error(field, path, error) from None
    if is_new:
        path.unlink()


def unwritable_file_error(field: str, path: Path, error: OSError) -> ConfigError:
    """The error that an output file cannot be written, with the reason and what to do."""
    if isinstance(error, FileNotFoundError):
        advice = f"create the folder {path.parent}, or use another file"
    elif isinstance(error, IsADirectoryError):
        advice = "use a file in this folder"
    else:
        advice = "use a file that can be written"
    return ConfigError(f"{field}={path}: {error.strerror or error}; {advice}")
