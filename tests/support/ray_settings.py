"""The settings and processes of a Ray of this machine."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path
from typing import Final

import psutil

SETTINGS_FILE: Final = Path(__file__).parents[2] / "deploy" / "ray" / "cluster.env"


def read_settings() -> dict[str, str]:
    """The variables of deploy/ray/cluster.env for a Ray of one process, which needs no token, with ports of its own."""
    text = os.path.expandvars(SETTINGS_FILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    settings = dict(line.split("=", 1) for line in lines)
    settings["RAY_AUTH_MODE"] = "disabled"  # A process keeps the first token that it finds.
    ports = {name: str(free_port()) for name in ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")}
    return settings | ports


def replica_processes(deployment: str) -> list[psutil.Process]:
    """The processes on this machine of the replicas of a deployment of the application "chairlift"."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if title.startswith("ray::ServeReplica:chairlift:") and deployment in title:
                found.append(process)
    return sorted(found, key=lambda each: each.pid)


def free_port() -> int:
    """A port of the loopback that is free now. It is below those that the system gives to connections and to listeners
    on port 0, so that no other program gets it before it is used, and above those of Ray's workers."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
