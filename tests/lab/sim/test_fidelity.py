"""Engine and simulator schedule identically: for every batching and KV policy and every order of the queue, both
executors receive the same sequence of `SchedulerOutput`s.

Arrivals are indexed by step, so time has no influence. Lengths are forced, and the simulator replays the tokens of the
engine, because they enter the block hashes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sim_workloads import ReplayingExecutor

from chairlift.clock import VirtualClock
from chairlift.config import BATCHINGS, KV_POLICIES, SCHEDULING_POLICIES, EngineConfig
from chairlift.core.engine_core import EngineCore, Executor
from chairlift.core.factory import make_kv_cache_manager, make_scheduler
from chairlift.core.scheduler import Scheduler
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.startup import decoder_engine
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.pool_plan import plan_pool, planned_pool
from chairlift.events import EventList, RequestWaiting, Step
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from chairlift.slo import SLO

COMBINATIONS = [*product(BATCHINGS, KV_POLICIES), ("static-global", "oracle")]
NUM_REQUESTS = 60
BLOCK_SIZE = 4
NUM_BLOCKS = {"paged": 48, "exact": 128, "max": 128, "pow2": 128, "oracle": 128}
MAX_MODEL_LEN = 120

EXPECTED_COUNTS = {
    # Combinations with preemptions or prefix hits. A reservation has all slots that it can need and shares none, and a
    # static batch has only members whose maximum lengths fit. So only continuous batching over paging preempts.
    ("continuous", "paged"): {"preemptions", "prefix hits"},
    ("static", "paged"): {"prefix hits"},
}


@dataclass(frozen=True)
class Arrival:
    """A request that arrives when `step` steps have been scheduled."""

    step: int
    request_id: str
    prompt: list[int]
    output_len: int
    max_tokens: int
    tenant: str

    def request(self) -> Request:
        slo = SLO(ttft_ms=1 + len(self.prompt) * 37 % 100) if self.step % 3 else None
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=self.max_tokens, slo=slo)
        return Request(
            self.request_id,
            self.prompt,
            params,
            self.max_tokens,
            output_len=self.output_len,
            tenant=self.tenant,
            priority=len(self.prompt) % 3,
        )


def workload() -> list[Arrival]:
    """Returns bursts of short and long prompts, a third of them with a common prefix."""
    rng = random.Random(11)
    common = [rng.randrange(3, 256) for _ in range(24)]
    arrivals, step = [], 0
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(3, 256) for _ in range(rng.choice([1, 3, 9, 20, 60]))]
        output_len = rng.randint(1, 30)
        prompt = [*common, *own][:80] if index % 3 == 0 else own
        max_tokens = output_len + rng.choice([0, 0, 8])
        arrivals.append(Arrival(step, f"r{index}", prompt, output_len, max_tokens, f"tenant-{index % 4}"))
        step += rng.choice([0, 0, 0, 1, 9])
    return arrivals


class Recorder:
    """Records the scheduler outputs that an executor receives and the tokens that it returns."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.outputs: list[SchedulerOutput] = []
        self.tokens: dict[str, list[int]] = {}

    def submit(self, output: SchedulerOutput) -> Any:
        self.outputs.append(output)
        return self._executor.submit(output)

    def result(self, handle: Any) -> ModelRunnerOutput:
        result = self._executor.result(handle)
        for request_id, tokens in result.token_ids.items():
            self.tokens.setdefault(request_id, []).extend(tokens)
        return result


def run(scheduler: Scheduler, executor: Executor) -> Recorder:
    recorder = Recorder(executor)
    core = EngineCore(scheduler, recorder, VirtualClock())
    arrivals = workload()
    while arrivals or core.has_work:
        if not core.has_work:
            core.add(arrivals.pop(0).request())
        while arrivals and arrivals[0].step <= len(recorder.outputs):
            core.add(arrivals.pop(0).request())
        core.step()
    return recorder


@dataclass
class EventCounts:
    """Counts waits, preemptions, prefix hits and chunked prefills of a run."""

    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_events(cls, events: EventList) -> EventCounts:
        counted = cls()
        for event in events.events:
            if isinstance(event, RequestWaiting):
                counted.counts["waits"] += 1
            elif isinstance(event, Step):
                counted._add_step(event)
        return counted

    def _add_step(self, step: Step) -> None:
        self.counts["preemptions"] += len(step.preempted)
        for request_id, count, computed in zip(step.request_ids, step.num_scheduled, step.num_computed, strict=True):
            is_admitted = request_id in step.admitted
            self.counts["prefix hits"] += is_admitted and computed > 0
            self.counts["chunked prefills"] += not is_admitted and count > 1 and computed > 0


RUNS = [
    *((*names, "llama", False) for names in COMBINATIONS),
    *((batching, "paged", "gemma3", False) for batching in BATCHINGS),
    *((batching, "paged", "nemotron_h", False) for batching in BATCHINGS),
    ("continuous", "exact", "nemotron_h", False),
    ("continuous", "paged", "llama", True),
    ("continuous", "paged", "gemma3", True),
    ("static", "exact", "llama", True),
]
RUNS_IN_ORDER = [
    *((*run, "fcfs") for run in RUNS),
    *(("continuous", "paged", "llama", False, policy) for policy in SCHEDULING_POLICIES[1:]),
    *(("continuous", "paged", "llama", False, f"paced-{policy}") for policy in ("fcfs", "edf")),
    ("static", "paged", "llama", False, "srpt"),
]
IDS = [
    "-".join([*names, *(["speculative"] if speculates else []), *([] if policy == "fcfs" else [policy])])
    for *names, speculates, policy in RUNS_IN_ORDER
]


def plan_with_many_checkpoints(*args: Any) -> KVCachePlan:
    """A plan in which a tiny model, whose states are large beside K and V, has enough checkpoints for hits."""
    plan = plan_pool(*args)
    return replace(plan, num_checkpoints=30, checkpoint_interval=2 * BLOCK_SIZE) if plan.state_bytes else plan


@pytest.mark.parametrize(("batching", "kv", "arch", "speculates", "policy"), RUNS_IN_ORDER, ids=IDS)
def test_simulator_schedules_like_the_engine(
    batching: str,
    kv: str,
    arch: str,
    speculates: bool,
    policy: str,
    tiny_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder_engine, "measured_row_time", lambda *_: None)
    monkeypatch.setattr(decoder_engine, "plan_pool", plan_with_many_checkpoints)
    batching, _, run_to = batching.partition("-")
    options = {"static_batch_size": 8, "static_run_to": run_to or None} if batching == "static" else {}
    num_blocks = NUM_BLOCKS[kv] * (2 if arch == "gemma3" else 1)
    config = EngineConfig(
        model=str(tiny_model_dir(arch)),
        skip_tokenizer_init=True,
        num_threads=1,
        batching=batching,
        kv=kv,
        scheduling_policy=policy.removeprefix("paced-"),
        pacing_tokens_per_second=2.0 if policy.startswith("paced-") else None,
        num_kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=12,
        max_num_batched_tokens=40,
        speculative_config={"prompt_lookup_min": 1} if speculates else None,
        **options,
    )
    events = EventList()
    engine = build_engine(config, events=events)
    windows = engine.facts.kv_cache_plan.windows
    assert len(windows) == (4 if arch == "gemma3" else 1)
    real = run(engine.core.scheduler, engine.core._executor)

    pool = planned_pool(config, MAX_MODEL_LEN, engine.facts.kv_cache_plan)
    assert (pool.checkpoints is not None) is (arch == "nemotron_h")
    manager = make_kv_cache_manager(pool, enable_prefix_caching=True)
    scheduler = make_scheduler(config.scheduler_config(MAX_MODEL_LEN), manager)
    simulated = run(scheduler, ReplayingExecutor(real.tokens))

    assert len(real.outputs) > NUM_REQUESTS
    for ours, theirs in zip(simulated.outputs, real.outputs, strict=True):
        assert ours == theirs
    assert simulated.tokens == real.tokens
    assert {name: len(tokens) for name, tokens in real.tokens.items()} == {
        arrival.request_id: arrival.output_len for arrival in workload()
    }
    accepted = sum(step.num_accepted for step in events.events if isinstance(step, Step))
    assert accepted > 5 if speculates else not accepted
    counts = EventCounts.from_events(events).counts
    for what in ("waits", "chunked prefills", *EXPECTED_COUNTS.get((batching, kv), ())):
        assert counts[what] > 5, (what, counts)
    for what in {"preemptions", "prefix hits"} - EXPECTED_COUNTS.get((batching, kv), set()):
        assert counts[what] == 0, (what, counts)
