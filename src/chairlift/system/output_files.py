"""Files that a server appends to: checks before a model is loaded, and files that are opened again."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import IO, Any

from chairlift.errors import ConfigError

logger = logging.getLogger("chairlift")


def check_writable(field: str, path: Path) -> None:
    """Check that a file can be written, without changing it.

    Raises:
        ConfigError: the file cannot be written; the message has the field, the path, the reason and what to do.
    """
    is_new = not os.path.lexists(path)
    if _is_pipe_or_device(path):
        return
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


def _is_pipe_or_device(path: Path) -> bool:
    """Opening a pipe would block until it has a reader, and closing it would end the reader."""
    return os.path.lexists(path) and not (path.is_file() or path.is_dir())


def reopen(field: str, file: IO[Any]) -> str:
    """Let a file that is open for writing continue at the end of the file that has its path now, such as a new one
    after a rotation. Other threads may write to it in the meantime.

    Returns:
        What was opened, for a log line. Empty if nothing was: the file is closed, is a pipe or a device, or cannot be
        opened. This is logged as an error, and the file that is open remains in use.
    """
    path = Path(file.name)
    if file.closed or _is_pipe_or_device(path):
        return ""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        problem = unwritable_file_error(field, path, error)
        logger.error("%s and send SIGHUP; until then lines go to the file that was open before", problem)
        return ""
    # The descriptor of the file object is replaced, which keeps its encoding, its buffer and the lock of its buffer.
    os.dup2(descriptor, file.fileno(), inheritable=False)
    os.close(descriptor)
    return f"{field}={path}"


def write_output(option: str, path: Path, text: str) -> None:
    """Write the file of an option. Raises ConfigError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable_file_error(option, path, error) from None
