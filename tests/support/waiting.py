"""Waiting for the conditions that another thread, task or process makes true, with one limit for all tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

AMPLE_SECONDS: Final = 120.0
"""The time limit of what must happen, also on a slow and busy machine. Only a test that fails reaches it."""


def wait_for(condition: Callable[[], bool], seconds: float = AMPLE_SECONDS) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true, while the event loop runs."""
    deadline = time.monotonic() + AMPLE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
