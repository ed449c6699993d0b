"""The threads of a model when it is stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import AsyncLLM
from chairlift.errors import EngineDeadError
from chairlift.server.models.served_model import NUM_THREADS, ModelService
from chairlift.server.preparation.api_options import ApiOptions
from waiting import AMPLE_SECONDS, until


def test_calls_in_preparation_end_with_the_reason_of_the_stop(tiny_model_dir: Callable[..., Path]) -> None:
    llm = AsyncLLM(model=str(tiny_model_dir("llama")), num_kv_blocks=20, skip_tokenizer_init=True, num_threads=1)
    release = threading.Event()
    num_started = 0

    def hold() -> None:
        nonlocal num_started
        num_started += 1
        release.wait(AMPLE_SECONDS)

    async def run() -> None:
        service = ModelService(llm, ApiOptions())
        service.start()
        calls = [asyncio.create_task(service.run(hold)) for _ in range(NUM_THREADS + 1)]
        await until(lambda: num_started == NUM_THREADS)
        llm.stop("the server stopped: send it again")
        await service.aclose()
        with pytest.raises(EngineDeadError, match="send it again"):
            await calls[-1]
        with pytest.raises(EngineDeadError, match="send it again"):
            await service.run(hold)
        release.set()
        await asyncio.gather(*calls[:-1])

    try:
        asyncio.run(run())
    finally:
        release.set()
