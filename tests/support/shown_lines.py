"""The log lines that documents show, and the form in which they are compared with those of real runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOG_LINE = re.compile(r"^(?:INFO|WARNING|ERROR) .+$", re.MULTILINE)

OF_THE_START = ("README.md", "docs/guide/getting-started.md")
OF_FAILURES = "docs/guide/operations.md"

VARIABLE = {
    r"^\S+ (?=(?:INFO|WARNING|ERROR) )": "",  # the time
    r"\[failure \w+\]": "[failure ID]",
    r"native \([\w-]+\)": "native (SET)",
    r", where its control group allows [\d.]+ \w+": "",
    r"\d+(?:\.\d+)*": "N",
    r"\b[KMG]iB": "SIZE",
}
"""What depends on the machine or the run, as patterns -> what replaces it."""


def log_form(line: str) -> str:
    """A log line without what depends on the machine or the run."""
    for pattern, replacement in VARIABLE.items():
        line = re.sub(pattern, replacement, line)
    return line.rstrip("\n")


def lines_not_printed(document: str, printed: Iterable[str]) -> list[str]:
    """The log lines in a document that are not among those of a run."""
    forms = {log_form(line) for line in printed}
    shown = LOG_LINE.findall((ROOT / document).read_text(encoding="utf-8"))
    assert shown
    return [line for line in shown if log_form(line) not in forms]
