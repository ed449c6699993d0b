"""Every text of the pages is in docs/texts.json, in English and in the other languages, and every row of it is used."""

from __future__ import annotations

import ast
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest
from docs.palette import STATIC, TEXTS, WORDS

from chairlift.engine.explanation import explained_slo
from chairlift.engine.explanation.explained_span import OUTSIDE_QUEUE
from chairlift.lab.lesson import page_data, runs, summary
from chairlift.lab.lesson.page import IMPORT, read_static
from chairlift.lab.lesson.summary import ROWS
from chairlift.request import WaitReason
from chairlift.server.web.page_language import Language

PLACEHOLDERS = re.compile(r"\{\w+\}|</?\w+[^>]*>")
STRINGS = re.compile(r'//[^\n]*|/\*.*?\*/|"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`', re.DOTALL)
SENTENCE = re.compile(r"[A-Za-z]{2,}[,:]? [a-z]{2,}|(?<![a-z])[A-Z][a-z]+")
"""What is in a text for readers, and in few other strings."""

UNITS_AND_NAMES = {
    *("AbortError", "Authorization", "Content-Type", "Enter", "Escape", "English"),  # of programs
    *("(prefers-color-scheme: dark)", "(prefers-reduced-motion: reduce)", "11px system-ui, sans-serif"),
    *("input, select, textarea, button, canvas", "muted bar-title", "stay odd", "title, body *:not(script)"),
    *(" MiB", " GiB", "Bearer ", "Chairlift "),
}
UNTRANSLATED = {"Chairlift", "API", "繁體中文", "max_tokens"}
"""Texts of the HTML that are the same in all languages."""


class PageTexts(HTMLParser):
    """The texts of a page as `translatePage` reads them: its texts and labels, and whole paragraphs of the table."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: set[str] = set()
        self.stack: list[str] = []
        for paragraph in re.findall(r"<p\b[^>]*>(.*?)</p>", page, re.DOTALL):
            text = " ".join(paragraph.split())
            if text in table() or re.search(r"^[^<]*\w", text):
                self.texts.add(text)
                page = page.replace(paragraph, "")
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.stack.append(tag)
        self.texts |= {text for name, text in attrs if name in ("aria-label", "placeholder") and text}

    def handle_endtag(self, tag: str) -> None:
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if re.search(r"[A-Za-z]{2}", text) and self.stack and self.stack[-1] not in ("script", "style"):
            self.texts.add(text)


@cache
def table() -> dict[str, dict[str, str]]:
    return {row["en"]: row for row in TEXTS}


@cache
def modules() -> dict[str, str]:
    """The modules of the live page and of the lesson by name."""
    found: dict[str, str] = {}
    names = ["live.js", "lesson.js"]
    while names:
        name = names.pop()
        if name not in found and name not in ("texts.js", "words.js"):
            found[name] = read_static(name)
            names += [imported for _, imported in IMPORT.findall(found[name])]
    return found


def strings(source: str) -> set[str]:
    """The strings of a module, without comments; a value in a template is `{}`."""
    found = set()
    for quoted, template in STRINGS.findall(source):
        inner = [text for text, _ in STRINGS.findall(template)]
        found |= {quoted.replace('\\"', '"'), *inner, *re.split(r"\$\{(?:[^{}]|\{[^{}]*\})*\}", template)}
    return found - {""}


@cache
def page_texts() -> set[str]:
    return set().union(*(PageTexts(read_static(name)).texts for name in ("index.html", "lesson.html")))


@cache
def nouns() -> set[str]:
    """The nouns with which the modules call `plural`."""
    found = re.findall(r'plural\(.+?, "([\w ]+)"\)', "\n".join(modules().values()))
    assert len(found) > 20
    return set(found)


def counted_nouns() -> set[str]:
    return {f"{{count}} {noun}s" for noun in nouns()}


def python_strings() -> set[str]:
    """The strings of the modules whose data the lesson shows, and the labels of its table with their units."""
    sources = [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (page_data, runs, summary)]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    constants = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return constants | {metric.heading for metric, _ in ROWS}


def test_every_text_is_there_once_and_in_all_languages_with_the_same_placeholders() -> None:
    assert len(table()) == len(TEXTS) > 200
    for row in TEXTS:
        assert list(row) == list(get_args(Language))
        assert all(text.strip() or text == row["en"] for text in row.values()), row
        assert len(set(row.values())) == len(row), f"not translated: {row}"
        assert len({tuple(sorted(PLACEHOLDERS.findall(text))) for text in row.values()}) == 1, row


def test_every_text_of_the_html_is_in_the_table() -> None:
    assert page_texts() - UNTRANSLATED <= table().keys(), (
        "add rows to docs/texts.json, and run `python -m docs.palette`"
    )


@pytest.mark.parametrize("name", modules())
def test_every_sentence_of_a_module_is_in_the_table(name: str) -> None:
    sentences = {text for text in strings(modules()[name]) if SENTENCE.search(text)}
    assert sentences - UNITS_AND_NAMES - nouns() <= table().keys(), "translate(...) it, and add it to docs/texts.json"


def test_words_and_counted_nouns_are_in_the_table_and_every_row_is_used() -> None:
    assert {*WORDS.values(), *counted_nouns()} <= table().keys()
    used = page_texts() | python_strings() | counted_nouns() | set(WORDS.values())
    used |= set().union(*map(strings, modules().values()))
    assert table().keys() - used == set()


def test_the_page_has_a_text_for_every_reason_of_the_server() -> None:
    facts, explanation = modules()["request_facts.js"], modules()["explanation.js"]
    numbered = {"seats", "memory"}
    reasons = {*re.findall(r"^  (\w+): \"", facts, re.MULTILINE), *numbered}
    assert {*WaitReason, *OUTSIDE_QUEUE} <= reasons
    assert explained_slo.CAUSES.keys() <= {*reasons, *re.findall(r"^  (\w+): \"", explanation, re.MULTILINE)}


def test_the_languages_of_the_command_line_are_those_of_the_pages() -> None:
    found = re.search(r"LANGUAGES = \{(.*)\}", (STATIC / "language.js").read_text(encoding="utf-8"))
    assert found is not None
    assert tuple(re.findall(r'"?([\w-]+)"?: "', found[1])) == get_args(Language)
