"""A cluster on Ray Serve on this machine, for benchmarks.

    python -m benchmarks.ray_cluster [--python-proxy] [--OPTION=VALUE ...]

serves one replica with these options of `chairlift serve`, prints the address, and stops when its standard input is
closed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

SETTINGS_FILE: Final = Path(__file__).parent.parent / "deploy" / "ray" / "cluster.env"
BASE_SETTINGS: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}


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


class Cluster:
    """The application on a Ray of this machine, which `start` starts with the settings of deploy/ray/cluster.env.

    Args:
        has_haproxy: False uses Ray Serve's own proxy, and its defaults.
    """

    def __init__(self, *, has_haproxy: bool = True) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._has_haproxy = has_haproxy

    def start(self) -> None:
        """Start a Ray without an application."""
        os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)  # Ray's processes import this package, too
        os.environ |= read_settings() if self._has_haproxy else BASE_SETTINGS
        import ray
        from ray import serve

        ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})

    def deploy(self, options: Mapping[str, Any], **arguments: Any) -> None:
        """Deploy the application with these options of `chairlift serve`, or update it, and wait until it runs."""
        from ray import serve

        import chairlift.cluster

        access = {} if "api-key-file" in options else {"allow-unauthenticated": True}
        serve.run(chairlift.cluster.app({"config": {**options, **access}, **arguments}), name="chairlift")

    def stop(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-proxy", action="store_true", help="use Ray Serve's own proxy instead of HAProxy")
    arguments, rest = parser.parse_known_args()
    options = {name: json.loads(value) for name, _, value in (each.removeprefix("--").partition("=") for each in rest)}
    cluster = Cluster(has_haproxy=not arguments.python_proxy)
    cluster.start()
    try:
        cluster.deploy(options, replicas=1)
        print(cluster.url, flush=True)
        sys.stdin.read()
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
