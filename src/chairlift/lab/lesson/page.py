"""Writes the page of the lesson: one HTML file with its styles, its modules and its data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from chairlift.server.web.page_language import Language, with_language
from chairlift.system.output_files import write_output

FOLDERS: Final[tuple[Traversable, ...]] = (
    files("chairlift.lab.lesson") / "static",
    files("chairlift.server.web") / "static",
)
"""The lesson uses the styles and modules of the live page."""

STYLES: Final = ("palette.css", "style.css", "lesson.css")
IMPORT: Final = re.compile(r'^import (\{[^}]*\}) from "\./(\w+\.js)";\n', re.MULTILINE)
EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def write_page(data: Mapping[str, Any], path: Path, lang: Language | None = None) -> None:
    """Write the page for the data of `page_data`. Raises ConfigError if the file cannot be written."""
    write_output("output", path, with_language(render_page(data), lang))


def render_page(data: Mapping[str, Any]) -> str:
    """The page for the data of `page_data`."""
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "styles": "".join(map(read_static, STYLES)),
        "data": encoded,
        "modules": inline_modules("lesson.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], read_static("lesson.html"))


def inline_modules(entry: str) -> str:
    """A script of a module and of the modules that it imports. Each is a function that returns its exports, so that
    equal names in two modules do not collide."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        source = read_static(name)
        for _, imported in IMPORT.findall(source):
            add(imported)
        exports = ", ".join(EXPORT.findall(source))
        body = EXPORT.sub("", IMPORT.sub(r'const \1 = modules["\2"];' + "\n", source))
        done[name] = f'modules["{name}"] = (() => {{\n{body}return {{ {exports} }};\n}})();\n'

    add(entry)
    return '"use strict";\nconst modules = {};\n' + "".join(done.values())


def read_static(name: str) -> str:
    """The text of a static file of the lesson or the live page."""
    path = next(folder / name for folder in FOLDERS if (folder / name).is_file())
    return path.read_text(encoding="utf-8")
