"""`chairlift serve` with a fake engine and an endpoint that makes a thread hang: GET /hang/PLACE.

The arguments are those of `chairlift serve`. Before it hangs, the process writes "hangs in PLACE" to standard error.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script has only its own folder there

from support.chairlift_with_fake_engine import main

# isort: split
# Other modules read the engine's command when they are imported.
from chairlift.server import application as server_app
from chairlift.server import draining_server

draining_server.STOP_SECONDS = draining_server.WATCHDOG_SECONDS = 1  # type: ignore[misc]

SECONDS = 600


def loop_in_python() -> None:
    while True:
        pass


HANGS: dict[str, Callable[[], object]] = {
    "c-without-lock": lambda: ctypes.CDLL(None).sleep(SECONDS),
    "python": loop_in_python,
    "executor": lambda: ctypes.CDLL(None).sleep(SECONDS),
}


def hang_in(place: str) -> None:
    os.write(2, f"hangs in {place}\n".encode())
    HANGS[place]()


def add_hanging_endpoint(app: FastAPI) -> FastAPI:
    async def hang(place: str) -> dict[str, str]:
        if place == "executor":
            await asyncio.to_thread(hang_in, place)
        else:
            threading.Thread(target=hang_in, args=(place,), name=f"hanging-{place}").start()
        return {}

    app.add_api_route("/hang/{place}", hang)
    return app


create_app: Any = server_app.create_models_app
server_app.create_models_app = lambda *args, **options: add_hanging_endpoint(create_app(*args, **options))
main()
