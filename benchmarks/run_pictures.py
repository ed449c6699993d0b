"""Draws recorded runs over one time axis: their seats and requests, and their KV memory by kind.

    python -m benchmarks.run_pictures static=logs/static.jsonl paged=logs/paged.jsonl [--output docs/images]

Each argument is the label of a run and its event log (--event-log, or --save-events of `chairlift bench compare`). The
script writes compare-batch.png and compare-memory-kinds.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from benchmarks.drawing import STYLE, save_picture
from matplotlib.figure import Figure

from benchmarks import batch_picture, memory_picture
from chairlift.events import read_events
from chairlift.lab.report.recorded_run import RecordedRun, recorded_run

PICTURES: Final[dict[str, Callable[[Sequence[RecordedRun]], Figure]]] = {
    "compare-batch": batch_picture.draw,
    "compare-memory-kinds": memory_picture.draw,
}


def draw_pictures(runs: Sequence[RecordedRun]) -> dict[str, Figure]:
    """Draw every picture, by its name."""
    with mpl.rc_context(STYLE):
        return {name: draw(runs) for name, draw in PICTURES.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=PATH")
    default = Path(__file__).parents[1] / "docs" / "images"
    parser.add_argument("--output", type=Path, default=default, help="folder of the pictures")
    args = parser.parse_args(arguments)
    labels = [each.partition("=") for each in args.runs]
    runs = [recorded_run(read_events(Path(path)), label) for label, _, path in labels]
    args.output.mkdir(parents=True, exist_ok=True)
    for name, picture in draw_pictures(runs).items():
        path = args.output / f"{name}.png"
        save_picture(picture, path)
        print(path)


if __name__ == "__main__":
    main()
