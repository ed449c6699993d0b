"""Draining: a server that receives a signal answers the accepted calls before it stops.

SIGTERM, Ctrl-C --> /ready and new calls get a 503 --> all calls answered, or drain_timeout --> stop
                                  a second signal ends the remaining calls with an error -------^
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn

from chairlift.server.http.process_exit import (
    ENGINE_STOP_SECONDS,
    EXIT_SECONDS,
    FLUSH_SECONDS,
    FORCED_ENGINE_STOP_SECONDS,
    FORCED_EXIT_SECONDS,
    FORCED_FLUSH_SECONDS,
    ProcessExit,
)
from chairlift.server.http.server_limits import ServerLimits

logger = logging.getLogger("chairlift")


class CallCounter(Protocol):
    """Counts the calls in progress, and rejects new ones while the server drains."""

    is_draining: bool
    num_calls: int
    limits: ServerLimits
    clock: Callable[[], float]


class ServerEngine(Protocol):
    """The engine or the models of a server."""

    def stop(self, reason: str) -> None: ...

    async def aclose(self, seconds: float | None = None) -> None: ...


class DrainingServer(uvicorn.Server):
    """A uvicorn server that keeps listening until it has drained.

    Args:
        config: The configuration of uvicorn. Its `timeout_graceful_shutdown` is overwritten with FLUSH_SECONDS.
        engine: Is stopped when the server has drained.
        process_exit: Limits the time until the process ends. None if the process continues after the server.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: ServerEngine,
        admission: CallCounter,
        process_exit: ProcessExit | None = None,
    ) -> None:
        super().__init__(config)
        config.timeout_graceful_shutdown = FLUSH_SECONDS
        self._engine = engine
        self._admission = admission
        self._process_exit = process_exit
        self._deadline = 0.0
        self._is_forced = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal, and stop at the second one. Runs as a signal handler."""
        admission = self._admission
        if not admission.is_draining:
            self._deadline = admission.clock() + admission.limits.drain_timeout
            admission.is_draining = True
            logger.info(
                "shutting down after %d calls in progress are answered; send the signal again to stop immediately",
                admission.num_calls,
            )
        elif not self._is_forced:
            self._is_forced = True
            self.force_exit = self.should_exit
            self.config.timeout_graceful_shutdown = FORCED_FLUSH_SECONDS
            self._limit_exit(FORCED_EXIT_SECONDS)
        else:
            self.should_exit = self.force_exit = True

    def _limit_exit(self, seconds: float) -> None:
        if self._process_exit is not None:
            self._process_exit.limit(seconds)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve as uvicorn does, and wait for worker threads while signals are still handled."""
        with self.capture_signals():
            await self._serve(sockets)
            await asyncio.get_running_loop().shutdown_default_executor()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server, and report the signals of this event loop to the guard process too."""
        if self._process_exit is not None:
            self._process_exit.watch_signals()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Stop the server when it has drained or its time is over. uvicorn calls this every 0.1 s."""
        admission = self._admission
        if admission.is_draining and not self.should_exit:
            is_late = self._is_forced or admission.clock() >= self._deadline
            if is_late and admission.num_calls:
                logger.warning("%d calls end with an error because the server stops", admission.num_calls)
                limit = f"drain_timeout={admission.limits.drain_timeout:g} s"
                reason = "it received a second signal" if self._is_forced else limit
                self._engine.stop(f"the server stopped before it had answered this request ({reason}): send it again")
            self.should_exit = is_late or not admission.num_calls
            if self.should_exit:
                self._limit_exit(EXIT_SECONDS)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the engine while connections send the responses that were written to them."""
        seconds = FORCED_ENGINE_STOP_SECONDS if self._is_forced else ENGINE_STOP_SECONDS
        closing = asyncio.create_task(self._engine.aclose(seconds))
        await super().shutdown(sockets)
        await closing
