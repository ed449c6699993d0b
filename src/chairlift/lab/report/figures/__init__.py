"""The figures of a report, one module each: `draw(runs)` gives a Drawing, or says why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chairlift.lab.report.figures.drawing import Drawing, LeftOut
from chairlift.lab.report.run_log import RecordedRun

Draw = Callable[[Sequence[RecordedRun]], Drawing | LeftOut]


def all_figures() -> list[Draw]:
    """In the order of the page."""
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
