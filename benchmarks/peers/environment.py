"""Installs each peer from packages into its own environment. An existing environment is not changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from chairlift.errors import ChairliftError
from chairlift.loading.cache import cache_dir, write_atomically


class SetupError(ChairliftError):
    """Raised if a peer cannot be installed or built, or its model cannot be converted."""


def default_folder() -> Path:
    return cache_dir() / "peers"


def torch_requirement() -> str:
    """The requirement of the torch version that Chairlift runs on, so that both engines use the same one."""
    return f"torch=={version('torch').partition('+')[0]}"


def run(command: Sequence[str | Path], folder: Path | None = None) -> None:
    """Run a command in `folder` to its end, with its output on standard error.

    Raises:
        SetupError: the command failed. The message has the command and its exit code.
    """
    words = [str(word) for word in command]
    print(f"$ {' '.join(words)}", file=sys.stderr, flush=True)
    code = subprocess.run(words, cwd=folder, stdout=sys.stderr, check=False).returncode
    if code != 0:
        raise SetupError(f"`{' '.join(words)}` failed with exit code {code}; its output is above")


def environment(folder: Path, requirements: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """The Python of the virtual environment in `folder` with these requirements. It is created if it is missing.

    Args:
        unwanted: dependencies that break other packages; they are uninstalled.

    Raises:
        SetupError: the environment cannot be created, or pip fails.
    """
    python, marker = folder / "bin" / "python", folder / "requirements.json"
    wanted = json.dumps([*requirements, *(f"not {name}" for name in unwanted)])
    if python.exists() and marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        return python
    if not python.exists():
        run([sys.executable, "-m", "venv", folder])
    pip: list[str | Path] = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run([*pip, "install", *requirements])
    if unwanted:
        run([*pip, "uninstall", "--yes", *unwanted])
    write_atomically(marker, wanted)
    return python
