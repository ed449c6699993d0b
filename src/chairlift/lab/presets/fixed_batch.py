"""The runner of studies in which all requests arrive at once."""

from __future__ import annotations

import math

from chairlift.lab.presets.rate_sweep import measure_run
from chairlift.lab.presets.study import MeasuredValue, Row, Study, StudyResult


def run(study: Study) -> StudyResult:
    """Simulate each system with all requests at the start."""
    rows: dict[str, Row] = {}
    keys = {}
    for system in study.systems():
        found = measure_run(system, system.requests(study.seed), math.inf)
        rows[system.label] = {name: MeasuredValue(found[name]) for name in study.measures}
        keys[system.label] = (system.case, system.name)
    return StudyResult(study, rows, keys)
