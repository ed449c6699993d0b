"""The scripts in findings/ state what is expected and seen, and the table of the folder lists them."""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "findings"
HEAD = re.compile(
    r"""\#!/bin/bash\n
    \#\ (?P<title>[^\n]+)\.\n\#\n
    \#\ Expected:\ [^\n]+\n(\#\ [^\n]+\n)*
    \#\ Seen\ \((?P<versions>[^)]*\d[^)]*),\ (?P<date>\d{4}-\d\d-\d\d)\):\ [^\n]+\n(\#\ [^\n]+\n)*
    \#\n\#\ Ends\ with\ 1\ if\ this\ changes\.\n
    set\ -eu\nfolder=\$\(mktemp\ -d\)\ntrap\ 'rm\ -rf\ "\$folder"'\ EXIT\n""",
    re.VERBOSE,
)


def test_each_finding_has_its_head_and_its_row() -> None:
    scripts = sorted(FOLDER.glob("*.sh"))
    rows = []
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        head = HEAD.match(text)
        assert head, f"{script.name}: the head differs from the form that findings/README.md describes"
        assert os.access(script, os.X_OK), f"{script.name} is not executable"
        (packages,) = re.findall(r"pip\" install --quiet (?:--no-compile )?(.+)", text)
        assert all("==" in package for package in packages.split()), f"{script.name} does not pin its packages"
        assert "this has changed" in text, f"{script.name} asserts nothing that was seen"
        assert "chairlift" not in text.lower(), f"{script.name} does not do without Chairlift"
        rows.append(f"| [{script.stem}]({script.name}) | {head['title']} | {head['versions']} | {head['date']} |")
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [line for line in readme.splitlines() if line.startswith("| [")] == rows
