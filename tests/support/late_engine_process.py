"""The fake engine process, which reports that it is ready before it receives messages."""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from typing import Any

from chairlift.engine.process import engine_process
from chairlift.engine.process.engine_process import FrontEndLink
from chairlift.engine.process.wire import TO_ENGINE, Link, open_engine_link

LATE_SECONDS = 0.3
connect: list[Any] = []


def unconnected_link(folder: Path) -> Link[Any]:
    link = open_engine_link(folder, "not-yet")
    connect.append(lambda: link._incoming.connect(f"ipc://{folder / TO_ENGINE}"))
    return link


class EarlyFrontEndLink(FrontEndLink):
    def send_ready(self, facts: Any) -> None:
        super().send_ready(facts)
        time.sleep(LATE_SECONDS)
        connect[0]()


engine_process.open_engine_link = unconnected_link
engine_process.FrontEndLink = EarlyFrontEndLink
runpy.run_path(str(Path(__file__).parent / "fake_engine_process.py"), run_name="__main__")
