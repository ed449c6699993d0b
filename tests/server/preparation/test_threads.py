"""The cancellation of calls on threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from chairlift.server.preparation.threads import run_to_end
from waiting import AMPLE_SECONDS, until


def test_a_cancelled_call_ends_with_the_work_of_its_thread() -> None:
    started, release = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(AMPLE_SECONDS)

    async def run() -> None:
        threads = ThreadPoolExecutor(1)
        running = asyncio.create_task(run_to_end(threads, work))
        await until(started.is_set)
        waiting = asyncio.create_task(run_to_end(threads, started.clear))
        await asyncio.sleep(0)
        for task in (running, waiting):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not running.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        threads.shutdown()

    asyncio.run(run())
    assert started.is_set()  # The call that waited was not run.
