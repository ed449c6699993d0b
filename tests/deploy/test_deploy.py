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
import yaml

from chairlift.engine.event_hub import EventHub
from chairlift.engine.process.client import EngineStatus
from chairlift.events import EngineStarted
from chairlift.observability.prometheus import COUNTERS, HISTOGRAMS
from chairlift.observability.tracker import RequestTracker
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.access.call import PUBLIC_PATHS
from chairlift.server.serve_options import ACCESS_LOG_FORMATS
from chairlift.server.telemetry.engine_observer import engine_metrics
from support.command_runner import arguments_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "chairlift.service"
DASHBOARD = json.loads((DEPLOY / "grafana" / "chairlift.json").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
STATUS = EngineStatus("running", restarts=0, seconds_since_step=0.0, num_unfinished=0)


def exposed_names() -> set[str]:
    """Return the names of all samples that /metrics can contain."""
    tracker = RequestTracker()
    tracker.emit(EngineStarted(0.0, "m", 16, 8, 4, 64, 128, "fcfs", "paged", True))
    families = list(engine_metrics(EventHub(), lambda: STATUS, tracker, "m").collect())
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    return names | {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_the_dashboard_queries_existing_metrics_and_every_counter() -> None:
    queried = {name for query in queries() for name in re.findall(r"(?:vllm|chairlift):\w+", query)}
    assert len(queried) > 20
    assert not queried - exposed_names()
    text = "\n".join(queries())
    ours = {name for name in COUNTERS if name.startswith("chairlift:")} - {"chairlift:wait_steps"}
    assert not {name for name in ours if name not in text}
    for query in queries():
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), query


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


def serve_parameters() -> dict[str, Any]:
    """Return the options of `chairlift serve` by their names on the command line."""
    return {name: argument for argument in arguments_of("serve") for name in argument.names}


def dockerfile_list(instruction: str) -> list[str]:
    """Return the JSON list of an instruction of the Dockerfile."""
    found = re.search(rf"^{instruction} .*?(\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found, instruction
    words: list[str] = json.loads(found[1])
    return words


def test_image_starts_the_server_and_checks_its_health() -> None:
    command, *arguments = dockerfile_list("CMD")
    assert command == "serve"
    assert {word for word in arguments if word.startswith("--")} <= set(serve_parameters())
    checked = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", dockerfile_list("HEALTHCHECK")[-1])
    assert checked
    assert int(checked[1]) == serve_parameters()["--port"].field_info.default
    assert checked[2] in PUBLIC_PATHS
    assert f"EXPOSE {checked[1]}\n" in DOCKERFILE


def test_image_copies_files_that_the_context_has() -> None:
    sources = [name for line in re.findall(r"^COPY ([^-].*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
    assert "src" in sources
    permitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert permitted == set(sources)
    assert all((ROOT / source).exists() for source in sources)


def test_compose_refers_to_files_and_variables_that_exist() -> None:
    server = SERVICES["chairlift"]
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    names = {argument.field_info.name for argument in serve_parameters().values()}
    assert set(server["environment"]) <= {f"CHAIRLIFT_{name.upper()}" for name in names}
    mounted = [volume for service in SERVICES.values() for volume in service["volumes"] if volume.startswith("./")]
    assert len(mounted) == 3
    assert all((DEPLOY / volume.partition(":")[0]).exists() for volume in mounted)
    (volume,) = server["volumes"]
    assert f"VOLUME {volume.partition(':')[2]}\n" in DOCKERFILE


def test_compose_gives_the_server_time_to_drain() -> None:
    assert int(SERVICES["chairlift"]["stop_grace_period"].removesuffix("s")) >= ServerLimits().drain_timeout + 5


def test_prometheus_and_grafana_find_their_sources() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = [target for job in scraped for group in job["static_configs"] for target in group["targets"]]
    assert targets == [f"chairlift:{serve_parameters()['--port'].field_info.default}"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["type"] == DASHBOARD["templating"]["list"][0]["query"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "chairlift.yml").read_text())["providers"]
    assert any(f":{provider['options']['path']}/" in volume for volume in SERVICES["grafana"]["volumes"])
    assert {"chairlift", "prometheus"} <= set(SERVICES)


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
    assert "--access-log-format" in serve_parameters()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_unit_passes_systemd_analyze(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8").replace("/opt/chairlift/bin/chairlift", "/bin/true")
    path = tmp_path / "chairlift.service"
    path.write_text(text, encoding="utf-8")
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False, timeout=120
    )
    about_it = [line for line in result.stderr.splitlines() if "chairlift.service" in line]
    assert not about_it, result.stderr
