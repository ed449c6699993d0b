"""Chat prompts whose answers repeat parts of the prompt, and passages of a story (benchmarks/data)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

DATA: Final = Path(__file__).parent / "data"
NUM_QUOTATIONS: Final = 10
PASSAGE_CHARACTERS: Final = 900


@dataclass(frozen=True, slots=True)
class CopyingPrompt:
    """A message of a user, and the text that an answer repeats."""

    message: str
    text: str


def copying_prompts() -> list[CopyingPrompt]:
    """30 prompts: quotations from a story, edits of a program, and repairs of JSON."""
    work = json.loads((DATA / "copying_work.json").read_text())
    return [
        *(
            CopyingPrompt(f"Here is a passage:\n\n{text}\n\nRepeat the passage, and correct the spacing.", text)
            for text in islice(passages(), NUM_QUOTATIONS)
        ),
        *(
            CopyingPrompt(
                f"{edit['instruction']} Write the whole program again.\n\n```\n{edit['text']}```\n", edit["text"]
            )
            for edit in work["code"]
        ),
        *(CopyingPrompt(f"Repair this JSON, and write it again.\n\n{text}", text) for text in work["json"]),
    ]


def passages() -> Iterator[str]:
    """Consecutive passages of the story, each of whole paragraphs."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", (DATA / "alice.txt").read_text()):
        passage += paragraph + "\n\n"
        if len(passage) > PASSAGE_CHARACTERS:
            yield passage
            passage = ""
