"""The figures of a report, one module each. `draw(runs)` returns a Drawing, or an OmittedFigure with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chairlift.lab.report.figures.drawing import Drawing, OmittedFigure
from chairlift.lab.report.run_log import RecordedRun

Draw = Callable[[Sequence[RecordedRun]], Drawing | OmittedFigure]


def all_figures() -> list[Draw]:
    """The draw functions of all figures, in the order of the page."""
    from chairlift.lab.report.figures import batch, batch_size, device, kinds, latency, memory_map, variance, waste

    return [
        batch.draw,
        device.draw,
        memory_map.draw,
        kinds.draw,
        waste.draw,
        variance.draw,
        latency.draw,
        batch_size.draw,
    ]
