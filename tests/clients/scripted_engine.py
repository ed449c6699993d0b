"""`chairlift serve` whose engine computes no model: it answers each prompt by the rules in SCRIPTED_ANSWERS.

The variable has a list of [text, answer] as JSON. The first rule whose text the prompt contains has the answer.
SCRIPTED_MAX_MODEL_LEN is the context, by default 65536. The server is the real one, with the tokenizer of its model, so
the answers are streamed, parsed and limited as always. Streams have frequent pings.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

from chairlift.clock import MonotonicClock
from chairlift.config import EngineConfig
from chairlift.core.engine_core import EngineCore
from chairlift.core.factory import KVPool, make_kv_cache_manager, make_scheduler
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.process import engine_process
from chairlift.engine.process.engine_process import AnnouncingExecutor, FrontEndLink
from chairlift.engine.process.process_client import ProcessClient
from chairlift.engine.request_limits import RequestLimits
from chairlift.engine.served_engine import EngineFacts
from chairlift.events import EngineStarted
from chairlift.loading.resolve import resolve_model
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.outputs import ModelRunnerOutput, NewRequest, SchedulerOutput
from chairlift.sampling_params import SamplingDefaults
from chairlift.server import serve

MAX_MODEL_LEN, NUM_BATCHED_TOKENS = int(os.environ.get("SCRIPTED_MAX_MODEL_LEN", 65_536)), 8192
STEP_SECONDS, PING_SECONDS = 0.005, 0.002


class ScriptedExecutor:
    """Generates the answers of the rules."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: list[tuple[str, str]] = json.loads(os.environ["SCRIPTED_ANSWERS"])
        self._answers: dict[str, Iterator[int]] = {}
        self._uncomputed: dict[str, int] = {}

    def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(STEP_SECONDS)
        for request in output.new_requests:
            self._answers[request.request_id] = self._answer(request)
            self._uncomputed[request.request_id] = len(request.token_ids) - request.num_computed_tokens
        result = ModelRunnerOutput(output.step, {})
        for request_id, count in output.num_scheduled_tokens.items():
            self._uncomputed[request_id] -= count
            if not self._uncomputed[request_id]:
                result.token_ids[request_id] = [next(self._answers[request_id])]
                self._uncomputed[request_id] = 1
        return result

    def result(self, handle: ModelRunnerOutput) -> ModelRunnerOutput:
        return handle

    def _answer(self, request: NewRequest) -> Iterator[int]:
        """The rest of the answer, and then end tokens."""
        prompt = self._tokenizer.decode(request.token_ids[: request.num_prompt_tokens], skip_special_tokens=False)
        answer = next((answer for text, answer in self._rules if text in prompt), "Nothing to do.")
        tokens = self._tokenizer.encode(answer, add_special_tokens=False)
        num_known = len(request.token_ids) - request.num_prompt_tokens
        return chain(tokens[num_known:], repeat(self._tokenizer.eos_token_id or 0))


def build(config: EngineConfig, front_end: FrontEndLink, _turn: object) -> Any:
    """Build the engine, in place of `engine_process._build`."""
    block_size, clock = config.block_size, MonotonicClock()
    num_blocks = 2 * MAX_MODEL_LEN // block_size
    files = resolve_model(config.model)
    limits = config.scheduler_config(MAX_MODEL_LEN, NUM_BATCHED_TOKENS)
    manager = make_kv_cache_manager(KVPool(num_blocks, block_size, MAX_MODEL_LEN), enable_prefix_caching=True)
    sizes = (block_size, num_blocks, limits.max_num_seqs, NUM_BATCHED_TOKENS, MAX_MODEL_LEN)
    started = EngineStarted(clock.now(), "scripted", *sizes, "fcfs", "paged", True)
    front_end.emit(started)
    executor = AnnouncingExecutor(ScriptedExecutor(files.tokenizer()), front_end.send_started)
    core = EngineCore(make_scheduler(limits, manager, front_end), executor, clock)
    plan = KVCachePlan(num_blocks, block_size, 1024, "memory")
    request_limits = RequestLimits(MAX_MODEL_LEN, num_blocks * block_size)
    front_end.send_ready(
        EngineFacts("scripted", files.config(), limits, plan, request_limits, started, "none", SamplingDefaults())
    )
    loaded = SimpleNamespace(grammars=None)
    return SimpleNamespace(core=core, close=lambda: None, reopen_files=lambda: None, loaded=loaded, adapter_loader=None)


if __name__ == "__main__":
    if sys.argv[1:] == ["--engine"]:
        engine_process._build = build
        engine_process.main()
    else:
        from chairlift.cli.main import main

        sys.argv += ["--sse-ping-interval", str(PING_SECONDS)]
        serve.ProcessClient = partial(ProcessClient, command=(sys.executable, __file__, "--engine"))
        main()
