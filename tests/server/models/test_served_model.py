"""The threads of a model when it is stopped."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import AsyncLLM
from chairlift.errors import EngineDeadError
from chairlift.server.models.served_model import NUM_THREADS, TENANT_THREADS, ModelService
from chairlift.server.preparation.api_options import ApiOptions
from support.waiting import AMPLE_SECONDS, until


def test_calls_in_preparation_end_with_the_reason_of_the_stop(tiny_model_dir: Callable[..., Path]) -> None:
    llm = AsyncLLM(model=str(tiny_model_dir("llama")), num_kv_blocks=20, skip_tokenizer_init=True, num_threads=1)
    release = threading.Event()
    started: Counter[str] = Counter()

    def hold(tenant: str) -> None:
        started[tenant] += 1
        release.wait(AMPLE_SECONDS)

    async def run() -> None:
        service = ModelService(llm, ApiOptions())
        service.start()
        tenants = ["busy"] * (TENANT_THREADS + 1) + [str(index) for index in range(NUM_THREADS - TENANT_THREADS)]
        calls = [asyncio.create_task(service.run(tenant, hold, tenant)) for tenant in tenants]
        await until(lambda: started.total() == NUM_THREADS)
        assert started["busy"] == TENANT_THREADS, "the other threads are free for other tenants"
        llm.stop("the server stopped: send it again")
        await service.aclose()
        with pytest.raises(EngineDeadError, match="send it again"):
            await calls.pop(TENANT_THREADS)
        with pytest.raises(EngineDeadError, match="send it again"):
            await service.run("", hold, "")
        release.set()
        await asyncio.gather(*calls)

    try:
        asyncio.run(run())
    finally:
        release.set()
