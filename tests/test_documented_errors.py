"""The errors that documents show below a call are the ones that it ends with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_runner import invoke
from support.native import needs_native

ROOT = Path(__file__).parent.parent
SHOWN = re.compile(r"^ *\$ chairlift (.*)\n *error: (.*)$", re.MULTILINE)
REQUEST_ID = re.compile(r"\b[0-9a-f]{32}\b")


def shown_errors() -> Iterator[tuple[str, str]]:
    """The calls that documents show with an error, and its message."""
    for document in sorted((ROOT / "docs").rglob("*.md")):
        yield from SHOWN.findall(document.read_text(encoding="utf-8"))


@needs_native
@pytest.mark.parametrize(("call", "message"), list(shown_errors()))
def test_errors_are_printed_as_shown(
    call: str, message: str, smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of requests are random, and the sizes of blocks are those of native kernels."""
    monkeypatch.chdir(tmp_path)
    if "truncated.gguf" in call:
        with smollm2_gguf.open("rb") as whole:
            Path("truncated.gguf").write_bytes(whole.read(50_000_000))
    words = shlex.split(call)
    if words[0] == "serve" and "--port" not in words:
        words += ["--port", "0"]  # Port 8000 may be in use.
    error = str(invoke(words).exception)
    assert REQUEST_ID.sub("ID", error) == REQUEST_ID.sub("ID", message)


def test_there_is_something_to_check() -> None:
    assert len(list(shown_errors())) > 8
