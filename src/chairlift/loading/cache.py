"""The folder in which Chairlift stores files between runs, and atomic writes."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Final

CACHE_VARIABLE: Final = "CHAIRLIFT_CACHE"


def cache_dir() -> Path:
    """Return `$CHAIRLIFT_CACHE`, else `$XDG_CACHE_HOME/chairlift`, else `~/.cache/chairlift`; it may not exist."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "chairlift"


def models_dir() -> Path:
    """Return the folder of the models that Chairlift has downloaded."""
    return cache_dir() / "models"


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 file so that readers see either the old or the new content, and never a part of it.

    Raises:
        OSError: the folder cannot be created or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
