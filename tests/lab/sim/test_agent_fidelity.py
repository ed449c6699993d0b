"""An engine and its simulation find the same prefixes in the same sessions of agents, with every eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim_workloads import ConstantCost

from chairlift.clock import VirtualClock
from chairlift.config import EVICTION_POLICIES, EngineConfig, SchedulerConfig
from chairlift.core.engine_core import EngineCore, Executor
from chairlift.core.factory import KVPool
from chairlift.engine.startup.factory import build_engine
from chairlift.events import EventList, RequestFinished
from chairlift.lab.sim.simulator import SimConfig, forced_request, simulate
from chairlift.lab.workload.agent_sessions import AgentSessions
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.lab.workload.traces import TraceOptions, read_trace
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from chairlift.request import Request
from support.recorded_trace import record_trace

SECONDS = 0.05
LIMITS = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64}
NUM_BLOCKS, BLOCK_SIZE = 70, 4


class TimedExecutor:
    """Computes steps with another executor, and lets each take the same time on a virtual clock."""

    def __init__(self, executor: Executor, clock: VirtualClock) -> None:
        self._executor, self._clock = executor, clock

    def submit(self, output: SchedulerOutput) -> Any:
        return self._executor.submit(output)

    def result(self, handle: Any) -> ModelRunnerOutput:
        self._clock.advance(SECONDS)
        return self._executor.result(handle)


def run_engine(workload: list[WorkloadRequest], model: Path, policy: str) -> EventList:
    config = EngineConfig(
        model=str(model),
        skip_tokenizer_init=True,
        num_threads=1,
        num_kv_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        prefix_cache_eviction_policy=policy,
        **LIMITS,
    )
    log, clock, feed = EventList(), VirtualClock(), RequestFeed(workload)
    engine = build_engine(config, events=log)
    core = EngineCore(engine.core.scheduler, TimedExecutor(engine.core._executor, clock), clock)
    unfinished: dict[str, Request] = {}
    while not feed.is_exhausted or core.has_work:
        for item in feed.pop_due(clock.now()):
            core.add(request := forced_request(item))
            unfinished[item.request_id] = request
        for output in core.step() if core.has_work else ():
            if output.finish_reason is not None:
                feed.finish(output.request_id, clock.now(), unfinished.pop(output.request_id).token_ids)
        if not core.has_work and (time := feed.next_time()) is not None:
            clock.advance(max(0.0, time - clock.now()))
    return log


def hits(log: EventList) -> dict[str, int]:
    return {each.request_id: each.num_cached_tokens for each in log.events if isinstance(each, RequestFinished)}


def sim_config(policy: str) -> SimConfig:
    pool = KVPool(NUM_BLOCKS, BLOCK_SIZE, 256, prefix_cache_eviction_policy=policy)
    return SimConfig(SchedulerConfig(**LIMITS), pool)  # type: ignore[arg-type]


def test_hits_are_the_same(tiny_model_dir: Callable[..., Path]) -> None:
    workload = AgentSessions(8, 8, scale=1 / 400, turns=4, max_model_len=255).requests(seed=5, vocab_size=200)
    found: dict[str, dict[str, int]] = {}
    for policy in EVICTION_POLICIES:
        log = EventList()
        simulate(workload, sim_config(policy), ConstantCost(SECONDS), log)
        found[policy] = hits(run_engine(workload, tiny_model_dir("llama"), policy))
        assert found[policy] == hits(log)
        assert found[policy].keys() == {item.request_id for item in workload}
    assert found["lru"] != found["expected-use"], "the pool is small enough for a difference"


def test_hits_of_recorded_sessions_in_a_closed_loop_are_the_same(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """The outputs of the engine differ from those of the simulation, and expected use would learn from their ends."""
    workload = AgentSessions(8, 8, scale=1 / 400, turns=4, max_model_len=255).requests(seed=5, vocab_size=200)
    record_trace(tmp_path / "trace.jsonl", workload, sim_config("lru"), ConstantCost(SECONDS))
    replayed = read_trace(tmp_path / "trace.jsonl", TraceOptions(vocab_size=200, closed_loop=True))
    assert sum(item.follows is not None for item in replayed) > len(replayed) / 2
    log = EventList()
    simulate(replayed, sim_config("lru"), ConstantCost(SECONDS), log)
    found = hits(run_engine(replayed, tiny_model_dir("llama"), "lru"))
    assert found == hits(log)
    assert len(found) == len(workload)
    assert any(found.values())
