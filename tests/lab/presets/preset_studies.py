"""Studies of presets with few requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift.lab.presets import RUNNERS, find_preset
from chairlift.lab.presets.study import Study, StudyResult, StudySystem


def study(preset: str, index: int, num_prompts: int | None, **settings: Any) -> Study:
    """A study of a preset with other settings."""
    found = find_preset(preset).studies(num_prompts=num_prompts)[index]
    return Study(found.preset, {**found.settings, **settings}, found.seed, num_prompts)


def run(preset: str, index: int, num_prompts: int | None, **settings: Any) -> StudyResult:
    chosen = study(preset, index, num_prompts, **settings)
    return RUNNERS[chosen.settings["runner"]](chosen, lambda: None)


def systems(preset: str, index: int, num_prompts: int | None, names: Sequence[str] = ()) -> dict[str, StudySystem]:
    """The systems of a study by label."""
    settings = {"systems": list(names)} if names else {}
    return {system.label: system for system in study(preset, index, num_prompts, **settings).systems()}


def mean(result: StudyResult, label: str, measure: str) -> float:
    value = result.rows[label][measure]
    assert value is not None, (label, measure)
    return value.mean
