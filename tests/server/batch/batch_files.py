"""Writes batch files and reads their results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def request_line(custom_id: object, *, url: str = "/v1/completions", method: str = "POST", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def completion_line(index: int, max_tokens: int = 4) -> str:
    """A greedy request for token ids whose answer is the same in every run."""
    prompt = [3 + (index * 7 + i) % 200 for i in range(2 + index % 5)]
    return request_line(f"r{index}", prompt=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def results(path: Path) -> list[dict[str, Any]]:
    """The lines of an output, all of which must be complete."""
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.split("\n")[:-1]]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    """The results by `custom_id`, each of which must occur once."""
    found = {answer["custom_id"]: answer for answer in results(path)}
    assert len(found) == len(results(path))
    return found
