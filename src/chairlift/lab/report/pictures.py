"""Draws runs as PNG files: the batch over time, the use of KV memory over time, and the distributions of latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure

from chairlift.errors import ConfigError
from chairlift.lab.report import batch_picture, latency_picture, memory_picture
from chairlift.lab.report.drawing import STYLE, NothingToDraw
from chairlift.lab.report.run_log import RecordedRun

DOTS_PER_INCH: Final = 160
MAX_RUNS: Final = 6

PICTURES: Final[dict[str, Callable[[Sequence[RecordedRun]], Figure | NothingToDraw]]] = {
    "batch": batch_picture.draw,
    "memory": memory_picture.draw,
    "latency": latency_picture.draw,
}
"""The picture of each file, by its name without the suffix."""


def draw_pictures(runs: Sequence[RecordedRun]) -> dict[str, Figure | NothingToDraw]:
    """Draw every picture, by its name."""
    with mpl.rc_context(STYLE):
        return {name: draw(runs) for name, draw in PICTURES.items()}


def save_picture(picture: Figure, path: Path) -> None:
    """Write a picture to a PNG file."""
    with mpl.rc_context(STYLE):
        picture.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})


def write_pictures(runs: Sequence[RecordedRun], folder: Path) -> dict[Path, str | None]:
    """Draw the runs and write the pictures to a folder, which is created.

    Returns:
        path -> None if the picture was written, otherwise the reason why it was not.

    Raises:
        ConfigError: there are too many runs, or a file cannot be written.
    """
    if len(runs) > MAX_RUNS:
        raise ConfigError(f"a picture shows at most {MAX_RUNS} runs, got {len(runs)}: leave out some event logs")
    results: dict[Path, str | None] = {}
    for name, picture in draw_pictures(runs).items():
        path = folder / f"{name}.png"
        if isinstance(picture, NothingToDraw):
            results[path] = picture.reason
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_picture(picture, path)
        except OSError as error:
            raise ConfigError(f"output {path} cannot be written: {error.strerror or error}") from None
        results[path] = None
    return results
