"""The languages of the pages, whose texts are in static/texts.js."""

from __future__ import annotations

from typing import Literal

Language = Literal["en", "zh-TW"]


def with_language(page: str, lang: Language | None) -> str:
    """The HTML of a page with its language; without one, the page has that of the browser."""
    return page if lang is None else page.replace("<html", f'<html data-lang="{lang}"', 1)
