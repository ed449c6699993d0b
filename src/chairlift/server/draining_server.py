"""DrainingServer: a uvicorn server that answers the accepted calls before it stops, and a watchdog of its process.

TERM, QUIT, INT --> /ready and new calls get a 503 --> all calls answered, or drain_timeout --> stop --> exit status 0
                                a second signal ends the remaining calls with an error -------^          |
                                      the watchdog ends a process that still runs (exit status 1) <------+

SIGHUP --> log files are opened again, and API keys are read again
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Final

import uvicorn

from chairlift.server.access.admission import AdmissionController
from chairlift.server.models.model_manager import ModelManager

logger = logging.getLogger("chairlift")

STOP_SECONDS: Final = 3
"""Seconds in which connections can send their responses, and the engine can finish its step, after the drain."""
FORCED_STOP_SECONDS: Final = 1
"""STOP_SECONDS after a second signal. In this time streams get an error event."""
WATCHDOG_SECONDS: Final = 2
"""Seconds after STOP_SECONDS or FORCED_STOP_SECONDS at which the watchdog ends the process."""
LONGEST_WATCHDOG_SECONDS: Final = 1e9  # faulthandler accepts little more
STANDARD_ERROR: Final = 2


def end_process_after(seconds: float) -> None:
    """End this process after some seconds, unless it ends before or this function is called again.

    The watchdog is a thread of faulthandler, which does not need the interpreter lock. It writes the stacks of all
    threads to standard error, and ends the process with exit status 1. Child processes end by themselves when their
    standard input is closed.
    """
    faulthandler.dump_traceback_later(min(seconds, LONGEST_WATCHDOG_SECONDS), exit=True, file=STANDARD_ERROR)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that keeps listening until it has drained.

    Args:
        config: the configuration of uvicorn. Its `timeout_graceful_shutdown` is overwritten with STOP_SECONDS.
        models: are stopped when the server has drained.
        start_watchdog: limits the seconds until the process ends, such as `end_process_after`. None if the process
            continues after the server.
        reload: is run on the event loop after SIGHUP. None if the server does not handle this signal.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        models: ModelManager,
        admission: AdmissionController,
        start_watchdog: Callable[[float], None] | None = None,
        reload: Callable[[], Coroutine[None, None, None]] | None = None,
    ) -> None:
        super().__init__(config)
        self._models = models
        self._admission = admission
        self._start_watchdog = start_watchdog or (lambda _seconds: None)
        self._reload = reload
        self._must_reload = False
        self._reloading: asyncio.Task[None] | None = None
        self._deadline = 0.0
        self._is_forced = False
        self._set_stop_seconds(STOP_SECONDS)

    def _set_stop_seconds(self, seconds: int) -> None:
        self.config.timeout_graceful_shutdown = self._stop_seconds = seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals of uvicorn, SIGQUIT and SIGHUP while the server runs on the main thread."""
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {}
        if threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGQUIT: self.handle_exit}
            if self._reload is not None:
                handlers[signal.SIGHUP] = self._request_reload
        with super().capture_signals():
            before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _request_reload(self, _sig: int, _frame: FrameType | None) -> None:
        self._must_reload = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal, and stop at the second one. Runs as a signal handler."""
        if not self._admission.is_draining:
            self.drain()
        elif not self._is_forced:
            self._is_forced = True
            self.force_exit = self.should_exit
            self._set_stop_seconds(FORCED_STOP_SECONDS)
            self._start_watchdog(FORCED_STOP_SECONDS + WATCHDOG_SECONDS)

    def drain(self) -> None:
        """Reject new calls, and stop when all calls are answered. Any thread may call it, and further calls have no
        effect."""
        admission = self._admission
        if admission.is_draining:
            return
        drain_timeout = admission.limits.drain_timeout
        self._deadline = admission.clock() + drain_timeout
        admission.is_draining = True
        self._start_watchdog(drain_timeout + STOP_SECONDS + WATCHDOG_SECONDS)
        logger.info(
            "shutting down after %d calls in progress are answered; send the signal again to stop immediately",
            admission.num_calls,
        )

    async def on_tick(self, counter: int) -> bool:
        """Stop the server when it has drained or its time is over, and run `reload` after SIGHUP. uvicorn calls this
        every 0.1 s."""
        if self._must_reload and self._reload is not None and (self._reloading is None or self._reloading.done()):
            self._must_reload = False
            self._reloading = asyncio.create_task(self._reload())
        admission = self._admission
        if admission.is_draining and not self.should_exit:
            is_late = self._is_forced or admission.clock() >= self._deadline
            if is_late and admission.num_calls:
                logger.warning("%d calls end with an error because the server stops", admission.num_calls)
                limit = f"drain_timeout={admission.limits.drain_timeout:g} s"
                reason = "it received a second signal" if self._is_forced else limit
                self._models.stop(f"the server stopped before it had answered this request ({reason}): send it again")
            self.should_exit = is_late or not admission.num_calls
            if self.should_exit:
                self._start_watchdog(self._stop_seconds + WATCHDOG_SECONDS)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the engine while connections send the responses that were written to them."""
        closing = asyncio.create_task(self._models.aclose(self._stop_seconds))
        await super().shutdown(sockets)
        await closing
