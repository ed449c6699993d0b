"""Runs the engine's loop, scheduler and KV cache manager in virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from chairlift.clock import VirtualClock
from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core.engine_core import EngineCore
from chairlift.core.factory import KVPool, make_kv_cache_manager, make_scheduler
from chairlift.errors import ConfigError, RequestError
from chairlift.events import EngineStarted, EventSink
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.executor import TOP_TOKEN, SimExecutor
from chairlift.lab.sim.model_shape import ModelShape
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.policy_class import is_paged, reserves
from chairlift.request import Request


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The configuration of a simulated engine.

    Attributes:
        pool: the KV pool, with the max_model_len of `scheduler`; the token budget replaces its `max_chunk`.
        enable_prefix_caching: None: on for "paged", off for reservations, which have no prefix cache.
        model: the model that the events name; None: no model.
        block_copy_seconds: additional seconds of a step for each block that it copies from or to the swap space.
        top_token: the distribution of the next tokens of beams (see `SimExecutor`).

    Raises:
        ConfigError: max_model_len differs between scheduler and pool, or as EngineConfig for the fields of the pool.
    """

    scheduler: SchedulerConfig
    pool: KVPool
    enable_prefix_caching: bool | None = None
    model: ModelShape | None = None
    block_copy_seconds: float = 0.0
    top_token: tuple[float, float] = TOP_TOKEN

    def __post_init__(self) -> None:
        pool, limit = self.pool, self.scheduler.max_model_len
        EngineConfig(
            block_size=pool.block_size,
            num_kv_blocks=pool.num_blocks,
            kv=pool.kv,
            kv_arena=pool.kv_arena,
            enable_prefix_caching=self.enable_prefix_caching,
        )
        if pool.max_model_len != limit:
            raise ConfigError(f"pool.max_model_len={pool.max_model_len} must equal scheduler.max_model_len={limit}")

    @property
    def has_prefix_cache(self) -> bool:
        return is_paged(self.pool.kv) and self.enable_prefix_caching is not False

    def engine_started(self) -> EngineStarted:
        """Returns the first event of a run, at time 0."""
        model, pool = self.model, self.pool
        return EngineStarted(
            time=0.0,
            model="none" if model is None else model.name,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            kv=pool.kv,
            enable_prefix_caching=self.has_prefix_cache,
            kv_arena=pool.kv_arena if reserves(pool.kv) else None,
            weight_bytes=0 if model is None else model.weight_bytes,
            kv_bytes_per_slot=0 if model is None else model.kv_bytes_per_slot,
            kv_windows=list(pool.windows),
            state_bytes=0 if model is None else model.state_bytes,
            num_checkpoints=0 if pool.checkpoints is None else pool.checkpoints.num_slots,
            checkpoint_interval=0 if pool.checkpoints is None else pool.checkpoints.interval,
            num_swap_blocks=pool.num_swap_blocks,
            **self.scheduler.event_fields(),
        )


@dataclass(slots=True)
class SimResult:
    """The totals of a simulated run; the events have the details.

    Attributes:
        num_requests: requests that arrived, rejected ones included.
        num_steps: computed steps.
        seconds: virtual time from 0 to the end of the last step.
        wall_seconds: real time of the simulation.
        rejected: (request id, error message) of the requests that can never fit.
    """

    num_requests: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    wall_seconds: float = 0.0
    rejected: list[tuple[str, str]] = field(default_factory=list)

    @property
    def steps_per_wall_second(self) -> float:
        return self.num_steps / self.wall_seconds if self.wall_seconds > 0 else 0.0


def forced_request(item: WorkloadRequest) -> Request:
    """Returns the engine's request for a workload request, with its output length forced and its declared limit."""
    return Request(
        item.request_id,
        list(item.prompt_token_ids),
        item.sampling_params,
        item.max_output_len,
        arrival_time=item.arrival,
        priority=item.priority,
        tenant=item.tenant,
        output_len=item.output_len,
    )


def simulate(
    workload: RequestFeed | Sequence[WorkloadRequest],
    config: SimConfig,
    cost_model: CostModel,
    events: EventSink | None = None,
    *,
    requests_for: Callable[[WorkloadRequest], Sequence[Request]] | None = None,
) -> SimResult:
    """Simulates a workload to its end; every output has exactly its forced length.

    The simulation runs the engine's `EngineCore`, `Scheduler` and KV cache manager. While the engine is idle, the clock
    jumps to the next arrival.

    Args:
        workload: a feed, for example with a concurrency limit, or requests with their arrival times.
        events: receives the events of the run, with times in virtual seconds. A long run has many large events, which
            `metrics.run.RunTally` aggregates as they come.
        requests_for: returns the requests of the engine for one of the workload, such as several outputs of a prompt;
            None: one request (see `forced_request`).

    Raises:
        ConfigError: the pool is too small for the policy (see `make_kv_cache_manager`).
    """
    started, clock, result = time.perf_counter(), VirtualClock(), SimResult()
    if events is not None:
        events.emit(config.engine_started())
    feed = workload if isinstance(workload, RequestFeed) else RequestFeed(workload)
    core, executor = make_engine_core(config, cost_model, clock, events)
    unfinished: dict[str, Request] = {}
    while True:
        while due := feed.pop_due(clock.now()):
            for item in due:
                try:
                    for request in [forced_request(item)] if requests_for is None else requests_for(item):
                        core.add(request)
                        unfinished[request.request_id] = request
                except RequestError as error:
                    result.rejected.append((item.request_id, str(error)))
                    feed.finish(item.request_id, clock.now())
            result.num_requests += len(due)
        if core.has_work:
            for output in core.step():
                if output.finish_reason is not None:
                    feed.finish(output.request_id, clock.now(), unfinished.pop(output.request_id).token_ids)
        elif (next_time := feed.next_time()) is not None:
            clock.advance(max(0.0, next_time - clock.now()))
        else:
            break
    assert feed.is_exhausted, "every request is due once no other is unfinished"
    result.num_steps, result.seconds = executor.num_steps, clock.now()
    result.wall_seconds = time.perf_counter() - started
    return result


def make_engine_core(
    config: SimConfig,
    cost_model: CostModel,
    clock: VirtualClock,
    events: EventSink | None = None,
    *,
    record_index_changes: bool = False,
) -> tuple[EngineCore, SimExecutor]:
    """Returns the engine and the executor of a simulation; arguments and errors as for `simulate`.

    Args:
        record_index_changes: emit the changes of the prefix cache as events.
    """
    pool = replace(config.pool, max_chunk=config.scheduler.max_num_batched_tokens)
    manager = make_kv_cache_manager(pool, config.has_prefix_cache, record_index_changes=record_index_changes)
    executor = SimExecutor(cost_model, clock, config.block_copy_seconds, config.top_token)
    return EngineCore(make_scheduler(config.scheduler, manager, events), executor, clock), executor
