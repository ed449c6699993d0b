"""Recorded event logs in the live page, as one HTML file that needs neither a server nor a network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError
from chairlift.lab.lesson.page import inline_modules, read_static
from chairlift.server.web.page_language import Language, with_language
from chairlift.server.web.recorded_log import check_log, recorded_view

POLICY: Final = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:\">\n"
)
LINKS: Final = re.compile(r"<link [^>]*>\n|<script [^>]*></script>\n|<nav .*</nav>")

ANSWERS: Final = """
globalThis.fetch = async (path) => {
  const found = document.getElementById(String(path).split("?")[0]);
  return new Response(found?.textContent, { status: found ? 200 : 404 });
};
history.replaceState = () => {};
"""
"""The page reads its data from elements of the file instead of a server, and keeps the address of the file."""

SIDE_BY_SIDE: Final = """body { margin: 0; display: flex; flex-wrap: wrap; }
iframe { flex: 1 1 40rem; height: 100vh; border: 0; }"""


def recorded_page(logs: Sequence[Path], lang: Language | None = None) -> str:
    """The page of one event log, or of several side by side. Raises ConfigError if one is not an event log."""
    pages = [with_language(_page_of(log), lang) for log in logs]
    if len(pages) == 1:
        return pages[0]
    frames = "".join(
        f'<iframe title="{html.escape(log.name)}" srcdoc="{html.escape(page)}"></iframe>\n'
        for log, page in zip(logs, pages, strict=True)
    )
    title = ", ".join(log.name for log in logs)
    head = f'<meta charset="utf-8">\n{POLICY}<title>{html.escape(title)}</title>\n<style>{SIDE_BY_SIDE}</style>\n'
    return f'<!doctype html>\n<html lang="{lang or "en"}">\n<head>\n{head}</head>\n<body>\n{frames}</body>\n</html>\n'


def _text_of(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"not an event log: {log}, line {line}: not UTF-8; give a file of --event-log") from None


def _page_of(log: Path) -> str:
    check_log(log)
    texts = {"v1/page": json.dumps(recorded_view(log)), "v1/page/log": _text_of(log)}
    page, data = LINKS.sub("", read_static("index.html")), ""
    for name, text in texts.items():
        escaped = text.replace("<", "\\u003c")  # so that no element begins or ends in it
        data += f'<script type="application/json" id="{name}">{escaped}</script>\n'
    styles = "".join(map(read_static, ("palette.css", "style.css")))
    code = f"<script>{ANSWERS}</script>\n<script>\n{inline_modules('live.js')}</script>\n"
    page = page.replace("<title>", f"{POLICY}<title>", 1).replace("</head>", f"<style>\n{styles}</style>\n</head>", 1)
    return page.replace("</body>", f"{data}{code}</body>", 1)
