"""Checks that docstrings describe existing parameters, and follow one convention.

The first paragraph is a sentence with a full stop. A description of a parameter, attribute or error is a phrase that
begins with a small letter, unless its first word is a name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parent.parent / "src" / "chairlift").rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[tuple[str, str, set[str]]]:
    """(name, docstring, parameters) of every function, and of every class with an `__init__` of its own."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node.name, ast.get_docstring(node) or "", parameters(node)
        elif isinstance(node, ast.ClassDef):
            for made in node.body:
                if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                    yield node.name, ast.get_docstring(node) or "", parameters(made)


def parameters(function: Function) -> set[str]:
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def described(docstring: str) -> set[str]:
    """The names under `Args:`."""
    section = re.search(r"^Args:\n((?:[ \t]*\n| +.*\n?)+)", docstring, re.MULTILINE)
    lines = section[1].splitlines() if section else []
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    heads = [re.match(rf" {{{indent}}}(\w+(?:, \w+)*):", line) for line in lines]
    return {name for head in heads if head is not None for name in head[1].split(", ")}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_arguments_are_parameters(source: Path) -> None:
    found = functions(ast.parse(source.read_text(encoding="utf-8")))
    wrong = {name: extra for name, docstring, known in found if (extra := described(docstring) - known)}
    assert wrong == {}


def test_arguments_are_parsed_from_docstrings() -> None:
    trees = (ast.parse(source.read_text(encoding="utf-8")) for source in SOURCES)
    counts = (len(described(docstring)) for tree in trees for _, docstring, _ in functions(tree))
    assert any(total > 300 for total in accumulate(counts))
    assert described("Do.\n\nArgs:\n    a, b: these.\n        more: of it\n    c: that.\n\nRaises:\n    Error: d") == {
        "a",
        "b",
        "c",
    }


NAMES = {"False", "Hugging", "Ray", "None", "OpenAI", "Poisson", "Python", "True"}
"""First words of descriptions that are names."""


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            yield text


def descriptions(docstring: str) -> Iterator[str]:
    """The descriptions under `Args:`, `Attributes:` and `Raises:`, one for each name."""
    for section in re.finditer(r"^(?:Args|Attributes|Raises):\n((?:[ \t]*\n| +.*\n?)+)", docstring, re.MULTILINE):
        for line in section[1].splitlines():
            if head := re.match(r" {4}\w+(?:, \w+)*: (.+)", line):
                yield head[1]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_docstrings_follow_one_convention(source: Path) -> None:
    texts = list(docstrings(ast.parse(source.read_text(encoding="utf-8"))))
    assert [text for text in texts if not re.search(r"[.:?]$", text.split("\n\n")[0].rstrip())] == []
    found = [each for text in texts for each in descriptions(text)]
    titles = [each for each in found if (word := re.match(r"[A-Z][a-z]+\b", each)) and word[0] not in NAMES]
    assert titles == []


def test_descriptions_are_parsed_from_docstrings() -> None:
    assert list(descriptions("Do.\n\nArgs:\n    a, b: These.\n        More: no.\n\nRaises:\n    E: if so.")) == [
        "These.",
        "if so.",
    ]
