"""The files in deploy/ are well-formed and refer to existing metrics, options and commands."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.events import EngineStarted
from chairlift.observability.prometheus import COUNTERS, HISTOGRAMS, PrometheusMetrics
from chairlift.observability.tracker import RequestTracker
from chairlift.server.telemetry.engine_observer import ENGINE_GAUGES
from chairlift.server.telemetry.observability_options import ACCESS_LOG_FORMATS

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "chairlift.service"
DASHBOARD = json.loads((DEPLOY / "grafana" / "chairlift.json").read_text(encoding="utf-8"))


GAUGES = {name: (text, lambda: 0.0) for name, (text, _) in ENGINE_GAUGES.items()}


def exposed_names() -> set[str]:
    """Return the names of all samples that /metrics can contain."""
    tracker = RequestTracker()
    tracker.emit(EngineStarted(0.0, "m", 16, 8, 4, 64, 128, "fcfs", "paged", True))
    names = {family.name for family in PrometheusMetrics(tracker, GAUGES).collect()}
    names |= {f"{name}_total" for name in COUNTERS}
    return names | {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_dashboard_queries_existing_metrics() -> None:
    queried = {name for query in queries() for name in re.findall(r"(?:vllm|chairlift):\w+", query)}
    assert len(queried) > 20
    assert not queried - exposed_names()


def test_dashboard_shows_every_chairlift_counter() -> None:
    text = "\n".join(queries())
    ours = {name for name in COUNTERS if name.startswith("chairlift:")} - {"chairlift:wait_steps"}
    assert not {name for name in ours if name not in text}


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & own, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own


def test_queries_have_balanced_brackets() -> None:
    for query in queries():
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), query


def test_unit_starts_an_existing_command() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    command = service["ExecStart"].split()
    assert command[:2] == ["/opt/chairlift/bin/chairlift", "serve"]
    assert int(service["TimeoutStopSec"]) > 60, "longer than --drain-timeout"
    assert service["OOMPolicy"] == "continue", "the server starts a killed engine again itself"
    assert command[command.index("--access-log-format") + 1] in ACCESS_LOG_FORMATS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_unit_passes_systemd_analyze(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8").replace("/opt/chairlift/bin/chairlift", "/bin/true")
    path = tmp_path / "chairlift.service"
    path.write_text(text, encoding="utf-8")
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    about_it = [line for line in result.stderr.splitlines() if "chairlift.service" in line]
    assert not about_it, result.stderr
