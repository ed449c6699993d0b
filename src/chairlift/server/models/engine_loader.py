"""EngineLoader: plans engines, and starts each one in a process."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from pathlib import Path

from chairlift.config import EngineConfig
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.memory_trimming import trim_memory
from chairlift.engine.process.process_client import ProcessClient
from chairlift.engine.startup.required_memory import RequiredMemory, plan_required_memory
from chairlift.errors import EngineDeadError
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.models.served_model import ModelService, ServedModel
from chairlift.worker.memory import available_memory


class EngineLoader:
    """Starts engines one after another, each in a process. One process computes a step at a time, because all use the
    same CPU cores."""

    def __init__(self, watchdog_timeout: float) -> None:
        self._watchdog_timeout = watchdog_timeout
        self._turns = Path(tempfile.mkdtemp(prefix="chairlift-turns-"))
        self._starting: ProcessClient | None = None
        self._is_aborted = False

    def plan(self, spec: ModelSpec, budget: int | None) -> tuple[EngineConfig, RequiredMemory]:
        """The configuration of an engine with the size of its KV pool, and the memory that it will need. Any thread may
        call it. Raises ModelLoadError or ConfigError.

        Args:
            budget: maximum memory of all engines together; None is the free memory.
        """
        memory_bytes = available_memory() if budget is None else budget
        return plan_required_memory(spec.config, memory_bytes, spec.common)

    async def load(self, model: ServedModel, config: EngineConfig) -> ModelService:
        """Start an engine as planned and wait until it is ready. Raises ModelLoadError, ConfigError or
        EngineDeadError."""
        return await asyncio.to_thread(self._load, model, config)

    def _load(self, model: ServedModel, config: EngineConfig) -> ModelService:
        client = self._starting = ProcessClient(
            config, watchdog_timeout=self._watchdog_timeout, events=model.events, turn_folder=self._turns
        )
        try:
            if self._is_aborted:
                client.close()
                raise EngineDeadError("the server stops")
            client.wait_until_ready()
        finally:
            self._starting = None
        service = ModelService(AsyncLLM(client=client), model.spec.api)
        trim_memory()
        return service

    def abort(self) -> None:
        """End the load in progress with an EngineDeadError; no other one begins."""
        self._is_aborted = True  # A load reads this after it has set `_starting`.
        if (client := self._starting) is not None:
            threading.Thread(target=client.close, args=(0.0,), daemon=True).start()

    def close(self) -> None:
        """Remove the files of the turns, after all engines have ended."""
        shutil.rmtree(self._turns, ignore_errors=True)
