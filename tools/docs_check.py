"""Runs the commands of README and guides whose output is shown, and compares the output: `make docs-check`.

A command is a line of a code block that begins with `$ chairlift`; its output is the lines below it. A call of a server
is `curl` in a block that a block of JSON follows. Numbers, ids and times may differ. Lines may be left out where `...`
stands, and at both ends.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
DOCUMENTS: Final = ("README.md", "docs/guide/*.md", "docs/policies/*.md")
BLOCK: Final = re.compile(r"^( *)```\w*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
SERVER: Final = "http://127.0.0.1:8000"
SECONDS: Final = 300.0

NOT_RUN: Final = (
    "< ",
    "> ",
    " | ",
    "--model Qwen",
    "truncated.gguf",
    "questions.jsonl",
    "chairlift chat",
    "chairlift report",
)
"""Parts of commands that need files, a terminal or a download."""

VARIABLE: Final = {
    r"^\S+ (?=(?:INFO|WARNING|ERROR) )": "",
    r"(?:cmpl|chatcmpl|resp|msg)-\w+": "ID",
    r"native \([\w-]+\)": "native (SET)",
    r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?": "N",
    r"\b[KMGT]iB": "SIZE",
    r"[ ─━]+": " ",
}
"""What depends on the machine or the run, as patterns -> what replaces it."""


class ShownOutput(NamedTuple):
    """A command of a document with the lines that are shown as its output."""

    document: str
    command: str
    lines: list[str]


def shown_outputs(document: str, text: str) -> Iterator[ShownOutput]:
    """The commands of a document that have an output and can be run."""
    blocks = [dedent(body) for _indent, body in BLOCK.findall(text)]
    for block, following in zip(blocks, [*blocks[1:], ""], strict=False):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _newline, output = part.partition("\n")
            if command.startswith("chairlift ") and output.strip() and not any(each in command for each in NOT_RUN):
                yield ShownOutput(document, command, output.splitlines())
        if block.startswith(f"curl -s {SERVER}") and following.startswith("{"):
            yield ShownOutput(document, block.replace("\\\n", " ").strip(), following.splitlines())


def line_form(line: str) -> str:
    """A line without what depends on the machine or the run."""
    for pattern, replacement in VARIABLE.items():
        line = re.sub(pattern, replacement, line)
    return line.strip()


def missing_line(shown: Iterable[str], printed: Iterable[str]) -> str | None:
    """The first shown line that the printed lines do not have in this order; None if they have all."""
    left = iter([line_form(line) for line in printed])
    expected = [line for line in shown if line.strip() not in ("", "...")]
    return next((line for line in expected if line_form(line) not in left), None)


def run_command(command: str, folder: Path) -> list[str]:
    """The lines that a command prints. A server that does not end is stopped."""
    arguments = shlex.split(command, comments=True)
    if arguments[0] == "chairlift":
        arguments[:1] = [sys.executable, "-m", "chairlift"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
    try:
        output, _none = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _none = process.communicate()
    return output.splitlines()


@contextmanager
def running_server() -> Iterator[str]:
    """The URL of a server with the default model."""
    command = [sys.executable, "-m", "chairlift", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            ready = (re.search(r"ready in [\d.]+ s: (\S+)/v1", line) for line in process.stderr)
            yield next(found[1] for found in ready if found)
        finally:
            process.terminate()
            process.communicate()


def main() -> None:
    """Check all documents, or those that the arguments name; exits with 1 if a shown line is not printed."""
    files = [file for pattern in sys.argv[1:] or DOCUMENTS for file in sorted(ROOT.glob(pattern))]
    found = [each for file in files for each in shown_outputs(str(file.relative_to(ROOT)), file.read_text("utf-8"))]
    num_wrong = 0
    with running_server() as url, tempfile.TemporaryDirectory() as folder:
        for shown in found:
            printed = run_command(shown.command.replace(SERVER, url), Path(folder))
            missing = missing_line(shown.lines, printed)
            num_wrong += missing is not None
            print(f"{'ok   ' if missing is None else 'WRONG'} {shown.document}: {shown.command:.100}", flush=True)
            if missing is not None:
                print(f"      not printed: {missing}", *printed[-12:], sep="\n      ", flush=True)
    print(f"{len(found)} outputs, {num_wrong} wrong")
    raise SystemExit(1 if num_wrong or not found else 0)


if __name__ == "__main__":
    main()
