"""Where Chairlift keeps files between runs, and how it writes them."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Final

CACHE_VARIABLE: Final = "CHAIRLIFT_CACHE"


def cache_dir() -> Path:
    """`$CHAIRLIFT_CACHE`, else `$XDG_CACHE_HOME/chairlift`, else `~/.cache/chairlift`. May not exist yet."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "chairlift"


def models_dir() -> Path:
    """Where models that Chairlift fetched itself lie."""
    return cache_dir() / "models"


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 file so that readers see the old one or the new one, never a part.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
