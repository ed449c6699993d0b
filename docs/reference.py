"""Writes the reference of the Python API: `python -m docs.reference > docs/reference.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import chairlift

INTRODUCTION: Final = """# Reference

The names of the packages `chairlift` and `chairlift.lab`, written from their docstrings by `python -m docs.reference`.
[Getting started](guide/getting-started.md) and [a policy of your own](guide/own-policies.md) show how to use them.
"""


def reference_page() -> str:
    """The page of the documentation."""
    lab = import_module("chairlift.lab.public")
    lines = [*_module_lines("chairlift", chairlift), *_module_lines("chairlift.lab", lab)]
    return INTRODUCTION + "\n".join(lines) + "\n"


def _module_lines(title: str, module: ModuleType) -> Iterator[str]:
    yield from ("", f"## {title}")
    for name in sorted(module.__all__, key=str.lower):
        found = getattr(module, name)
        yield from ("", f"### {name}", "", f"`{title}.{name}`{_parameters(found)}", "")
        yield from _code(inspect.getdoc(found) if inspect.isclass(found) or inspect.isfunction(found) else None)
        if inspect.isclass(found):
            yield from _methods(found, module)


def _parameters(found: Any) -> str:
    if not inspect.isfunction(found) and not (inspect.isclass(found) and "__init__" in vars(found)):
        return ""
    names = [name for name in inspect.signature(found).parameters if name != "self"]
    return f" `({', '.join(names)})`"


def _code(text: str | None) -> list[str]:
    return [] if text is None else ["```text", text, "```"]


def _methods(found: type[Any], module: ModuleType) -> Iterator[str]:
    """A row for each public method that has a docstring, with its first sentence.

    Methods that a class on the page already has are rows of that class alone.
    """
    listed = [getattr(module, name) for name in module.__all__]
    bases = [each for each in found.__mro__[1:] if each in listed]
    inherited = {name for base in bases for name, each in inspect.getmembers(base) if callable(each)}
    methods = [
        (name, text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|"))
        for name, each in inspect.getmembers(found)
        if not name.startswith("_")
        and name not in inherited
        and callable(each)
        and (text := inspect.getdoc(each))
        and _is_own(each)
    ]
    if bases:
        yield from ("", f"It has the methods of {' and '.join(f'`{base.__name__}`' for base in bases)}.")
    if methods:
        yield from ("", "| method | |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in methods))


def _is_own(each: Any) -> bool:
    return str(getattr(each, "__module__", "")).startswith("chairlift")


if __name__ == "__main__":
    print(reference_page(), end="")
