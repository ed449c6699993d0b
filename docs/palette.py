"""The colours and words of docs/palette.json, from which the styles of the pages and the pictures take them, and the
texts of the pages in other languages.

    python -m docs.palette          # writes palette.css, words.js and texts.js of the pages

Data colours follow Okabe and Ito (2008), which differ for all kinds of colour vision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

PALETTE: Final[dict[str, dict[str, str]]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""The light and the dark colour and the word of each name; `colour` names the entry whose colour is used."""

STATIC: Final = Path(__file__).parents[1] / "src" / "chairlift" / "server" / "web" / "static"
TEXTS: Final[list[dict[str, str]]] = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))
"""The texts of the live page and of the lesson: each in English, as their sources have it, and in other languages."""

WORDS: Final = {name: entry["word"] for name, entry in PALETTE.items() if "word" in entry}


def colour(name: str) -> str:
    """The light colour of a name, for pictures."""
    entry = PALETTE[name]
    return PALETTE[entry.get("colour", name)]["light"]


def palette_css() -> str:
    """The style sheet with a variable for each colour."""
    light, dark = (
        [f"--{name}: {entry[scheme]};" for name, entry in PALETTE.items() if scheme in entry]
        for scheme in ("light", "dark")
    )
    return (
        "/* Written by `python -m docs.palette`. */\n:root {\n  color-scheme: light dark;\n"
        + "".join(f"  {line}\n" for line in light)
        + "}\n@media (prefers-color-scheme: dark) {\n  :root {\n"
        + "".join(f"    {line}\n" for line in dark)
        + "  }\n}\n"
    )


def words_js() -> str:
    """The module with the words of the legends."""
    return (
        "/** Written by `python -m docs.palette`. */\n\nexport const WORDS = "
        + json.dumps(WORDS, indent=2, ensure_ascii=False)
        + ";\n"
    )


def texts_js() -> str:
    """The module with the texts in each language by their English text."""
    languages = [name for name in TEXTS[0] if name != "en"]
    table = {name: {row["en"]: row[name] for row in TEXTS} for name in languages}
    return (
        "/** Written by `python -m docs.palette`. */\n\nexport const TEXTS = "
        + json.dumps(table, indent=2, ensure_ascii=False)
        + ";\n"
    )


GENERATED: Final = {"palette.css": palette_css, "words.js": words_js, "texts.js": texts_js}

if __name__ == "__main__":
    for name, text in GENERATED.items():
        (STATIC / name).write_text(text(), encoding="utf-8")
