"""Files that are written while requests are served: that they can be is found out before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from chairlift.errors import ConfigError


def check_writable(field: str, path: Path) -> None:
    """Refuse a file that cannot be written, and leave it as it is.

    Raises:
        ConfigError: names the field, the path, the reason and the way out.
    """
    is_new = not os.path.lexists(path)
    if not (is_new or path.is_file() or path.is_dir()):
        return  # opening a pipe waits for its reader, and closing it sends that one away
    try:
        path.open("ab").close()
    except OSError as error:
        raise unwritable_file_error(field, path, error) from None
    if is_new:
        path.unlink()


def unwritable_file_error(field: str, path: Path, error: OSError) -> ConfigError:
    """What `check_writable` raises."""
    if isinstance(error, FileNotFoundError):
        way_out = f"make the folder {path.parent}, or name another file"
    elif isinstance(error, IsADirectoryError):
        way_out = "name a file in it"
    else:
        way_out = "name a file that can be written"
    return ConfigError(f"{field}={path}: {error.strerror or error}; {way_out}")
