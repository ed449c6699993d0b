"""An engine process over CheckingExecutor, which starts at once and checks every step. A step takes 2 ms."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chairlift.clock import MonotonicClock
from chairlift.config import EngineConfig
from chairlift.core.engine_core import EngineCore, Executor
from chairlift.core.factory import KVPool, make_kv_cache_manager, make_scheduler
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.process import engine_process
from chairlift.engine.process.engine_process import AnnouncingExecutor, FrontEndLink
from chairlift.engine.request_limits import RequestLimits
from chairlift.engine.served_engine import EngineFacts
from chairlift.events import EngineStarted
from chairlift.loading.resolve import resolve_model
from chairlift.outputs import SchedulerOutput
from chairlift.sampling_params import SamplingDefaults

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script has only its own folder there

from support.fakes import CheckingExecutor

NUM_BLOCKS, MAX_MODEL_LEN, STEP_SECONDS = 128, 128, 0.002


class SlowExecutor(AnnouncingExecutor):
    def submit(self, output: SchedulerOutput) -> Any:
        time.sleep(STEP_SECONDS)
        return super().submit(output)


def build(
    config: EngineConfig, front_end: FrontEndLink, _turn: object, make_executor: Callable[..., Executor] = SlowExecutor
) -> Any:
    block_size, limits = config.block_size, config.scheduler_config(MAX_MODEL_LEN, 32)
    manager = make_kv_cache_manager(KVPool(NUM_BLOCKS, block_size, MAX_MODEL_LEN), enable_prefix_caching=True)
    executor = CheckingExecutor(block_size, NUM_BLOCKS, limits.max_num_batched_tokens, limits.max_num_seqs)
    clock = MonotonicClock()
    started = EngineStarted(clock.now(), "fake", block_size, NUM_BLOCKS, 8, 32, MAX_MODEL_LEN, "fcfs", "paged", True)
    front_end.emit(started)
    core = EngineCore(
        make_scheduler(limits, manager, front_end), make_executor(executor, front_end.send_started), clock
    )
    plan = KVCachePlan(NUM_BLOCKS, block_size, 1024, "memory")
    model_config = resolve_model(config.model).config()
    request_limits = RequestLimits(MAX_MODEL_LEN, NUM_BLOCKS * block_size)
    front_end.send_ready(
        EngineFacts("fake", model_config, limits, plan, request_limits, started, "fake", SamplingDefaults())
    )
    loaded = SimpleNamespace(grammars=None)
    return SimpleNamespace(core=core, close=lambda: None, reopen_files=lambda: None, loaded=loaded, adapter_loader=None)


if __name__ == "__main__":
    engine_process._build = build
    engine_process.main()
