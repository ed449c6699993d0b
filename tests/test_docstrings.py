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

PACKAGE = Path(__file__).parent.parent / "src" / "chairlift"
TREES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""The modules of the package, by the name of their file."""

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


def test_arguments_are_parameters() -> None:
    assert {
        f"{file}: {name}": extra
        for file, tree in TREES.items()
        for name, docstring, known in functions(tree)
        if (extra := described(docstring) - known)
    } == {}


def test_arguments_are_parsed_from_docstrings() -> None:
    counts = (len(described(docstring)) for tree in TREES.values() for _, docstring, _ in functions(tree))
    assert any(total > 300 for total in accumulate(counts))
    assert described("Do.\n\nArgs:\n    a, b: these.\n        more: of it\n    c: that.\n\nRaises:\n    Error: d") == {
        "a",
        "b",
        "c",
    }


NAMES = {"False", "Hugging", "Ray", "None", "OpenAI", "Poisson", "Python", "Triton", "True"}
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


def test_docstrings_follow_one_convention() -> None:
    texts = [(file, text) for file, tree in TREES.items() for text in docstrings(tree)]
    assert [(file, text) for file, text in texts if not re.search(r"[.:?]$", text.split("\n\n")[0].rstrip())] == []
    found = [(file, each) for file, text in texts for each in descriptions(text)]
    assert [
        (file, each) for file, each in found if (word := re.match(r"[A-Z][a-z]+\b", each)) and word[0] not in NAMES
    ] == []


def test_descriptions_are_parsed_from_docstrings() -> None:
    assert list(descriptions("Do.\n\nArgs:\n    a, b: These.\n        More: no.\n\nRaises:\n    E: if so.")) == [
        "These.",
        "if so.",
    ]


def test_names_of_classes_are_unique() -> None:
    """One name stands for one thing in the whole package. Private classes are local to their module."""
    modules: dict[str, list[str]] = {}
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(file)
    assert {name: files for name, files in modules.items() if len(files) > 1} == {}
