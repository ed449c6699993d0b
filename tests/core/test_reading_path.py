"""The files from which continuous batching over paged memory is learned, and what keeps them readable."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "chairlift"
MAX_LINES = 1100


def reading_path() -> list[str]:
    """The files that the section of docs/architecture.md names, relative to the package."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## The reading path\n")[1].split("\n## ")[0]
    return re.findall(r"^\d\. `([\w/]+\.py)`", section, re.MULTILINE)


def writers(attribute: str) -> Iterator[str]:
    """The modules that assign this attribute of any object."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if attribute in text else ():
            if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Store):
                yield path.relative_to(SOURCE).as_posix()


def test_six_files_have_at_most_1100_lines() -> None:
    files = reading_path()
    assert len(files) == 6
    lines = {name: len((SOURCE / name).read_text(encoding="utf-8").splitlines()) for name in files}
    assert sum(lines.values()) <= MAX_LINES, lines


def test_only_batches_write_the_progress_of_a_request() -> None:
    rows_of_the_device = {"worker/request_rows.py", "worker/draft_model.py"}
    batches = {"core/continuous_batching.py", "core/beam_scheduler.py"}
    assert set(writers("num_computed_tokens")) == batches | rows_of_the_device
