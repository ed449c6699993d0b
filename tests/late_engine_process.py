"""The fake engine's process, which is ready before it listens."""

from __future__ import annotations

import dataclasses
import runpy
import time
from pathlib import Path
from typing import Any

from chairlift.engine.process import engine_process
from chairlift.engine.process.engine_process import Outbox
from chairlift.engine.process.wire import Address, Link, open_engine_link

LATE_SECONDS = 0.3
listen: list[Any] = []


def deaf_link(address: Address) -> Link[Any]:
    link = open_engine_link(dataclasses.replace(address, to_engine=f"{address.to_engine}-not-yet"))
    listen.append(lambda: link._incoming.connect(address.to_engine))
    return link


class ReadyTooSoon(Outbox):
    def ready(self, facts: Any) -> None:
        super().ready(facts)
        time.sleep(LATE_SECONDS)
        listen[0]()


engine_process.open_engine_link = deaf_link
engine_process.Outbox = ReadyTooSoon
runpy.run_path(str(Path(__file__).parent / "fake_engine_process.py"), run_name="__main__")
