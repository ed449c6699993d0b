"""The pages, the pictures and the legends have the colours and words of docs/palette.json."""

from __future__ import annotations

import re
from pathlib import Path

from docs.palette import GENERATED, PALETTE, STATIC, WORDS

from benchmarks import drawing, memory_map, seats_picture

ROOT = Path(__file__).parents[1]
STYLES = (
    STATIC / "style.css",
    STATIC / "chat.css",
    ROOT / "src" / "chairlift" / "lab" / "lesson" / "static" / "lesson.css",
)


def page_colours() -> dict[str, str]:
    """The light colours of the pages by the name of their variable."""
    light, _, _ = (STATIC / "palette.css").read_text(encoding="utf-8").partition("@media")
    return dict(re.findall(r"--([\w-]+): (#\w+);", light))


def test_the_generated_files_are_those_of_the_palette() -> None:
    for name, text in GENERATED.items():
        assert (STATIC / name).read_text(encoding="utf-8") == text(), "run `python -m docs.palette`"


def test_the_pictures_have_the_colours_and_words_of_the_pages() -> None:
    colours = page_colours()
    fills = {"token_states": "decode", "free": "cell-empty"}
    for kind, fill in drawing.KIND_FILLS.items():
        assert (fill.colour, fill.label) == (colours[fills.get(kind, kind)], WORDS[kind])
    for row, fill in drawing.ROW_FILLS.items():
        assert (fill.colour, fill.label) == (colours[row.name.lower()], WORDS[row.name.lower()])
    assert tuple(colours[f"owner-{index}"] for index in range(8)) == memory_map.OWNERS
    picture = (ROOT / "docs" / "images" / "seats.svg").read_text(encoding="utf-8")
    for kind, name in seats_picture.KINDS.items():
        assert f".{kind}{{fill:{colours[name]}}}" in picture
        assert f">{WORDS[name]}<" in picture


def test_the_legends_of_the_live_page_have_the_words() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    entries = re.findall(r'<i class="([\w-]+)"></i>([^<]+)<', page)
    words = {name: {WORDS[name]} for name in WORDS if name in page_colours()}
    words["decode"] |= {WORDS["token_states"], WORDS["decode"]}
    words["cell-empty"] |= {WORDS["free"]}
    named = [(name, text) for name, text in entries if name in words and "checkpoint" not in text]
    assert len(named) >= 12
    for name, text in named:
        assert any(text.startswith(word) for word in words[name]), f"{name}: {text}"


def test_only_the_palette_has_colours() -> None:
    for style in STYLES:
        rules = re.findall(r"(?:color|background|border)[^;{}]*#[0-9a-fA-F]{3,8}\b", style.read_text(encoding="utf-8"))
        assert rules == [], style.name
    assert all("light" in entry or entry["colour"] in PALETTE for entry in PALETTE.values())
