"""Helpers for tests of engine processes over a tiny model, with and without faults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from chairlift import AsyncLLM, EngineConfig, SamplingParams
from chairlift.engine.process.engine_child import ENGINE_COMMAND
from chairlift.engine.process.process_client import ProcessClient
from chairlift.outputs import RequestOutput

FAULTY_ENGINE = Path(__file__).parent / "faulty_engine.py"
FAKE_ENGINE = (sys.executable, str(Path(__file__).parent / "fake_engine_process.py"))


def tiny_config(folder: Path, **options: Any) -> EngineConfig:
    defaults = {"num_kv_blocks": 60, "block_size": 4, "skip_tokenizer_init": True, "num_threads": 1}
    return EngineConfig(model=str(folder), **{**defaults, **options})


def faulty(fault: str, step: int, folder: Path, *, is_fake: bool = False) -> tuple[str, ...]:
    """The command of an engine process with a fault, see `faulty_engine.py`."""
    command = (sys.executable, str(FAULTY_ENGINE), fault, str(step), str(folder / "broken-once"))
    return (*command, "fake") if is_fake else command


def started(config: EngineConfig, command: tuple[str, ...] = ENGINE_COMMAND, **options: Any) -> ProcessClient:
    client = ProcessClient(config, command=command, **options)
    client.wait_until_ready()
    return client


def forced(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **fields)


async def outcome(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> RequestOutput | Exception:
    try:
        return await llm.start(None, prompt, params).collect()
    except Exception as error:
        return error
