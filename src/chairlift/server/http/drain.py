"""How a server stops: what was taken in is answered first.

SIGTERM, Ctrl-C --> /ready is red, new calls get a 503 --> all answered, or drain_timeout --> stop
                      a second signal ends those that are left with an error, at once ------->
"""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn

from chairlift.engine.async_llm import AsyncLLM
from chairlift.server.access.admission import AdmissionController
from chairlift.server.http.process_exit import (
    ENGINE_STOP_SECONDS,
    EXIT_SECONDS,
    FLUSH_SECONDS,
    FORCED_ENGINE_STOP_SECONDS,
    FORCED_EXIT_SECONDS,
    FORCED_FLUSH_SECONDS,
    ProcessExit,
)

logger = logging.getLogger("chairlift")


class DrainingServer(uvicorn.Server):
    """Stops listening only when it has drained.

    Args:
        config: of uvicorn; `timeout_graceful_shutdown` is FLUSH_SECONDS here.
        process_exit: bounds the end of the process; None if the process goes on after the server.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        llm: AsyncLLM,
        admission: AdmissionController,
        process_exit: ProcessExit | None = None,
    ) -> None:
        super().__init__(config)
        config.timeout_graceful_shutdown = FLUSH_SECONDS
        self._llm = llm
        self._admission = admission
        self._process_exit = process_exit
        self._deadline = 0.0
        self._is_forced = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; in the main thread, between two steps of whatever runs there."""
        admission = self._admission
        if not admission.is_draining:
            self._deadline = admission.clock() + admission.limits.drain_timeout
            admission.is_draining = True
            logger.info("shutting down when %d calls are answered; again to stop at once", admission.num_calls)
        elif not self._is_forced:
            self._is_forced = True
            self.force_exit = self.should_exit
            self.config.timeout_graceful_shutdown = FORCED_FLUSH_SECONDS
            self._limit_end(FORCED_EXIT_SECONDS)
        else:
            self.should_exit = self.force_exit = True

    def _limit_end(self, seconds: float) -> None:
        """End the process within `seconds`, whatever its threads do."""
        if self._process_exit is not None:
            self._process_exit.limit(seconds)

    def _stop_reason(self) -> str:
        if self._is_forced:
            return "it was told to at once"
        return f"drain_timeout={self._admission.limits.drain_timeout:g} s"

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and waits for worker threads while signals are still handled here."""
        with self.capture_signals():
            await self._serve(sockets)
            await asyncio.get_running_loop().shutdown_default_executor()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._process_exit is not None:
            self._process_exit.watch_signals()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        admission = self._admission
        if admission.is_draining and not self.should_exit:
            is_late = self._is_forced or admission.clock() >= self._deadline
            if is_late and admission.num_calls:
                logger.warning("%d calls end with an error, because the server stops", admission.num_calls)
                self._admission.stop_preparation(f"the server stopped before this was read ({self._stop_reason()})")
                self._llm.stop(
                    f"the server stopped before this was answered ({self._stop_reason()}): send it once more"
                )
            self.should_exit = is_late or not admission.num_calls
            if self.should_exit:
                self._limit_end(EXIT_SECONDS)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the engine while connections take what was written to them."""
        seconds = FORCED_ENGINE_STOP_SECONDS if self._is_forced else ENGINE_STOP_SECONDS
        closing = asyncio.create_task(self._llm.aclose(seconds))
        await super().shutdown(sockets)
        await closing
