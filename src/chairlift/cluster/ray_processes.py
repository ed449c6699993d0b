"""RayProcesses: the processes of a Ray on this machine, in a process group of their own."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import ray
from ray._private import services

SHUTDOWN_SECONDS: Final = 0.4
"""Maximum seconds in which the processes of Ray can end by themselves. A second signal ends the server 1.2 s later."""
KILL_SECONDS: Final = 0.2
"""Maximum seconds that `ray.shutdown` may take to return after the processes of Ray were killed."""


class RayProcesses:
    """Starts a Ray on this machine with this process as its driver.

    Ray would start its processes in the process group of the server. A signal to this group, for example of Ctrl-C at a
    terminal or of `timeout`, would then end them while the server still answers requests, and `ray.shutdown` would wait
    for them without a limit.

    Args:
        options: arguments of `ray.init`.
    """

    def __init__(self, **options: Any) -> None:
        self._group: int | None = None
        with self._own_group():
            ray.init(logging_level=logging.WARNING, **options)

    @contextlib.contextmanager
    def _own_group(self) -> Iterator[None]:
        """Let Ray start its processes in one new group, whose id is that of the first process."""
        if os.name != "posix":
            yield
            return
        processes, popen = self, services.ConsolePopen

        class GroupedProcess(popen):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, process_group=processes._group or 0, **options)
                processes._group = processes._group or self.pid

        services.ConsolePopen = GroupedProcess  # type: ignore[misc]
        try:
            yield
        finally:
            services.ConsolePopen = popen  # type: ignore[misc]

    def stop(self) -> None:
        """End all processes of this Ray: with `ray.shutdown`, and with SIGKILL those that do not end in time."""
        shutdown = ShutdownThread(ray.shutdown)
        shutdown.join(SHUTDOWN_SECONDS)
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
        shutdown.wait(KILL_SECONDS)


class ShutdownThread(threading.Thread):
    """A thread that calls a function which calls `ray.shutdown`. It starts at once.

    Without the processes of Ray `ray.shutdown` does not return, which must not delay the end of the server.
    """

    def __init__(self, shut_down: Callable[[], None]) -> None:
        super().__init__(target=shut_down, name="ray-shutdown", daemon=True)
        self.start()

    def wait(self, seconds: float) -> None:
        """Wait until the function has returned. After `seconds` the process can end although it has not returned."""
        self.join(seconds)
        if self.is_alive():
            # The interpreter would call it at its exit too, and wait for the lock of the first call.
            atexit.unregister(ray.shutdown)
