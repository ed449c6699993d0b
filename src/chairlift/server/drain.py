"""How a server stops: what was taken in is answered first.

SIGTERM, Ctrl-C --> /ready is red, new calls get a 503 --> all answered, or drain_timeout --> stop
                      a second signal ends those that are left with an error, at once ------->
"""

from __future__ import annotations

import logging
from types import FrameType

import uvicorn

from chairlift.engine.async_llm import AsyncLLM
from chairlift.server.admission import Admission

logger = logging.getLogger("chairlift")

FLUSH_SECONDS = 5
"""For connections to take what was written to them, once everything is answered."""


class DrainingServer(uvicorn.Server):
    """Stops listening only when it has drained.

    Args:
        config: of uvicorn; `timeout_graceful_shutdown` is FLUSH_SECONDS here.
    """

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, admission: Admission) -> None:
        super().__init__(config)
        config.timeout_graceful_shutdown = FLUSH_SECONDS
        self._llm = llm
        self._admission = admission
        self._deadline = 0.0
        self._gives_up = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; in the main thread, between two steps of whatever runs there."""
        admission = self._admission
        if not admission.is_draining:
            self._deadline = admission.clock() + admission.limits.drain_timeout
            admission.is_draining = True
            logger.info("shutting down when %d calls are answered; again to stop at once", admission.num_calls)
        elif not self._gives_up:
            self._gives_up = True
        else:
            self.should_exit = self.force_exit = True

    def _why_now(self) -> str:
        if self._gives_up:
            return "it was told to at once"
        return f"drain_timeout={self._admission.limits.drain_timeout:g} s"

    async def on_tick(self, counter: int) -> bool:
        admission = self._admission
        if admission.is_draining and not self.should_exit:
            is_late = self._gives_up or admission.clock() >= self._deadline
            if is_late and admission.num_calls:
                logger.warning("%d calls end with an error, because the server stops", admission.num_calls)
                self._llm.stop(f"the server stopped before this was answered ({self._why_now()}): send it once more")
            self.should_exit = is_late or not admission.num_calls
        return await super().on_tick(counter)
