"""Calls of functions on threads. Also a cancelled call ends only with the work of its thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


async def run_to_end(threads: ThreadPoolExecutor, function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function on a thread. If this call is cancelled, a function that waits is not run, and one that runs is
    waited for, so that the caller keeps its slot, its turn and its lease as long as the thread works."""
    work = threads.submit(function, *arguments)
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        if not work.cancel():
            await asyncio.gather(asyncio.wrap_future(work), return_exceptions=True)
        raise
