"""Reads the JSON files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chairlift.errors import ModelLoadError
from chairlift.system.input_files import read_text


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file; it is empty if there is no such file.

    Raises:
        ModelLoadError: the file cannot be read or contains no JSON object.
    """
    try:
        value = json.loads(read_text(file))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: must contain a JSON object, got {type(value).__name__}")
    return value
