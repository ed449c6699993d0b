"""Checks that files, classes, headings, commands and options that documents name exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from chairlift.cli.main import app

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "src", "tests")
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
OF_MODELS = {
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
"""Files that a model's folder has."""

BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`((?:[\w-]+/)*[\w.-]+\.(?:py|md|toml|sh|h|cpp|json))`|`((?:[\w-]+/)+)`")
CLASS = re.compile(r"`([A-Z][a-z]+[A-Z]\w*)[`.(]")

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def prose(document: Path) -> str:
    """The text without its code blocks."""
    return BLOCK.sub("", document.read_text(encoding="utf-8"))


@cache
def paths() -> list[str]:
    """Files and folders of the repository, each as /a/b/c with a slash at a folder's end."""
    found = [path for folder in FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    return [f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in [*found, *ROOT.iterdir()]]


@cache
def python_names() -> set[str]:
    """The names that sources and tests define or import."""
    return {name for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") for name in names_of(file)}


def names_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def anchors(document: Path) -> set[str]:
    """The anchors of the headings."""
    headings = re.findall(r"^#+ +(.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = document.parent / name if name else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@documents
def test_files_are_there(document: Path) -> None:
    named = {file or folder for file, folder in FILE.findall(prose(document))} - OF_MODELS
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in paths())] == []


@documents
def test_classes_are_there(document: Path) -> None:
    assert sorted(set(CLASS.findall(prose(document))) - python_names()) == []


def commands(document: Path) -> Iterator[list[str]]:
    """The calls of `chairlift` in code blocks, without pipes, redirections and comments."""
    for block in BLOCK.findall(document.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            call = re.match(r"(?:\$ )?(?:\w+=\S+ )*chairlift ([^|&>#]*)", line)
            if call is not None:
                yield shlex.split(call[1])


@documents
def test_commands_take_their_options(document: Path) -> None:
    for call in commands(document):
        command, words = typer.main.get_command(app), iter(call)
        while hasattr(command, "commands"):
            command = command.commands[next(words)]
        given = {word.strip("[]").partition("=")[0] for word in words if word.lstrip("[").startswith("--")}
        assert given <= set(options_of(command)) | {"--help"}, shlex.join(call)


def options_of(command: Any) -> Iterator[str]:
    """The options of a command, or of all commands in a group."""
    for inner in getattr(command, "commands", {}).values():
        yield from options_of(inner)
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)


@cache
def options() -> set[str]:
    """The options of all commands and of the scripts in benchmarks/ and tests/."""
    scripts = [file for folder in ("benchmarks", "tests") for file in (ROOT / folder).rglob("*.py")]
    quoted = {name for file in scripts for name in re.findall(r'"(--[a-z][a-z-]+)"', file.read_text(encoding="utf-8"))}
    return quoted | set(options_of(typer.main.get_command(app))) | {"--help"}


@documents
def test_options_are_there(document: Path) -> None:
    assert sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose(document))) - options()) == []


def test_the_architecture_names_every_package() -> None:
    rows = re.findall(r"^\| (`.*?) \|", prose(ROOT / "docs" / "architecture.md"), re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    packages = {path.parent.name for path in (ROOT / "src" / "chairlift").glob("*/__init__.py")}
    assert packages - named == set()


@pytest.mark.parametrize(("pattern", "limit"), [("README.md", 150), ("docs/guide/*.md", 250)])
def test_pages_are_short(pattern: str, limit: int) -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob(pattern)}
    assert lengths
    assert {name: length for name, length in lengths.items() if length > limit} == {}


def test_there_is_something_to_check() -> None:
    guide, architecture = (ROOT / "docs" / "guide").glob("*.md"), ROOT / "docs" / "architecture.md"
    assert sum(len(list(commands(page))) for page in guide) > 15
    assert len(FILE.findall(prose(architecture))) > 20
    assert len(CLASS.findall(prose(architecture))) > 20
