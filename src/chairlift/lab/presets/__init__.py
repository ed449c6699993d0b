"""Published results as simulations: each preset is a file in `data/` with its source, settings and published numbers.

A file has these fields:

    title, source   what was published, and where
    extends         another preset, whose engine has the settings that are missing here, and whose systems are compared
    trace           the trace that the user has to give, in words; missing if the preset needs none
    options         which of workload_seed and num_prompts apply; both if it is missing
    engine          settings of the engine (see `StudySystem.config`) and workload (see `StudySystem.requests`), which
    workload        a study, a case or a system may replace
    parts           settings by a part of the labels of cases, which are divided at ", "
    systems         the compared systems: their settings by name, or a name of `study.SYSTEMS`
    studies         the tables: a runner, cases, systems, measures, and published values by row and measure, where
                    a value of "ratio" is compared with the ratio of each measure
    notes           how ours differs from the published numbers, and why
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from rich.console import RenderableType
from rich.text import Text

from chairlift.engine.progress import progress_bar
from chairlift.errors import ConfigError
from chairlift.lab.presets import measures, rate_sweep
from chairlift.lab.presets.study import Study, StudyResult, measure_systems
from chairlift.lab.tables import constants_table, make_table, print_parts, print_report

RUNNERS: Final[dict[str, Callable[[Study, Callable[[], object]], StudyResult]]] = {
    "rate sweep": rate_sweep.run,
    "fixed batch": rate_sweep.run,
    "memory use": partial(measure_systems, measures.measure_memory_use),
    "service gap": partial(measure_systems, measures.measure_service_gap),
    "cache hits": partial(measure_systems, measures.measure_cache_hits),
    "preemption cost": partial(measure_systems, measures.measure_preemption_cost),
}
"""The function that runs a study of each kind. It calls its second argument after each system."""


@dataclass(frozen=True)
class Preset:
    """A published table or figure and the simulation of it, which a file describes."""

    name: str

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The fields of the file, and of the preset that it extends."""
        text = files(__name__).joinpath("data", f"{self.name}.json").read_text(encoding="utf-8")
        loaded: dict[str, Any] = json.loads(text)
        if "extends" not in loaded:
            return loaded
        base = Preset(loaded["extends"]).data
        return {"systems": base["systems"], **loaded, "engine": {**base["engine"], **loaded.get("engine", {})}}

    def studies(
        self, *, workload_seed: int | None = None, num_prompts: int | None = None, trace: Path | None = None
    ) -> list[Study]:
        """The studies with these options of `WorkloadOptions`; None selects the preset's value.

        Raises:
            ConfigError: an option does not apply to the preset, or it needs a trace.
        """
        supported = [*self.data.get("options", ("workload_seed", "num_prompts"))]
        if "trace" in self.data:
            supported.append("trace")
            if trace is None:
                raise ConfigError(f"preset {self.name} needs a trace: give --trace FILE, {self.data['trace']}")
        for name, value in (("workload_seed", workload_seed), ("num_prompts", num_prompts), ("trace", trace)):
            if value is not None and name not in supported:
                raise ConfigError(
                    f"preset {self.name}: {name}={value} does not apply; its options are: "
                    f"{', '.join(supported) or 'none'}"
                )
        return [Study(self.data, study, workload_seed or 0, num_prompts, trace) for study in self.data["studies"]]

    def run(self, **options: Any) -> list[StudyResult]:
        """Simulate all studies of the preset, with a progress bar.

        Args:
            options: as for `studies`.

        Raises:
            ConfigError: an option does not apply, the trace is missing or cannot be read, or there are too few
                requests.
        """
        studies = self.studies(**options)
        with progress_bar("simulated systems", sum(len(list(study.systems())) for study in studies)) as advance:
            return [RUNNERS[study.settings["runner"]](study, advance) for study in studies]


def _natural_order(name: str) -> list[int | str]:
    """The text and the numbers of a name, so that fig2 precedes fig12."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


FILES: Final = [path.name for path in files(__name__).joinpath("data").iterdir()]
NAMES: Final = [name.removesuffix(".json") for name in FILES if name.endswith(".json")]
PRESETS: Final = {name: Preset(name) for name in sorted(NAMES, key=_natural_order)}


def find_preset(name: str) -> Preset:
    """Return a preset by name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; use one of {', '.join(PRESETS)}")
    return PRESETS[name]


def print_presets(presets: Iterable[Preset]) -> None:
    """Print the name, title and source of each preset."""
    rows = [[preset.name, preset.data["title"], preset.data["source"]] for preset in presets]
    print_parts([make_table("Presets", ["name", "title", "source"], rows=rows, justify="left")])


def print_title(preset: Preset) -> None:
    """Print what was published, and where."""
    print_parts([Text(f"{preset.data['title']} ({preset.data['source']})", style="bold")])


def print_preset(preset: Preset, results: list[StudyResult], as_json: bool = False) -> None:
    """Print the constants, the tables and the notes, or one line of JSON."""
    values: dict[str, dict[str, None]] = {}
    for name, value in (pair for result in results for pair in result.study.constants()):
        values.setdefault(name, {})[value] = None
    constants = {name: "; ".join(found) for name, found in values.items()}
    parts: list[RenderableType] = [
        constants_table(constants.items()),
        *(result.table() for result in results),
        *(f"- {note}" for note in preset.data["notes"]),
    ]
    record = {"preset": preset.name, "constants": constants, "studies": [result.to_dict() for result in results]}
    print_report(parts, record, as_json)
