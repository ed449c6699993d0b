"""The lesson on a tiny random model, which takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

from chairlift.config import EngineConfig
from chairlift.lab.lesson.runs import Lesson, lesson_config, lesson_options, run_lesson
from support.tiny_engine import CONFIG


def tiny_config(folder: Path) -> EngineConfig:
    """The engine of the lesson with a tiny model, whose configuration is written into `folder`."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return lesson_config(model=str(folder), load_format="dummy", num_threads=1, skip_tokenizer_init=True)


def tiny_lesson(folder: Path, num_requests: int = 96) -> Lesson:
    """Run the lesson on the tiny model."""
    return run_lesson(tiny_config(folder), lesson_options(0, num_requests))
