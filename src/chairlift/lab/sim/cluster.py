"""A cluster in virtual time: replicas with the engine's own scheduler, and the router's own choice of replicas.

Each replica has a clock that is ahead of the cluster's while it computes a step; what a step changes takes effect at
its end. The events of the cluster (arrivals, ends of steps, updates of the router, failures) are in one heap.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from chairlift.clock import VirtualClock
from chairlift.cluster.autoscaling import QueueScaling
from chairlift.cluster.replica_choice import choose_replica
from chairlift.cluster.replica_state import ReplicaLoad, ReplicaState, RoutedPrompt
from chairlift.cluster.shared_service import PERIOD_SECONDS, ServiceMeter
from chairlift.cluster.usage_aggregator import SharedUsage, UsageAggregator
from chairlift.core.engine_core import EngineCore
from chairlift.errors import ConfigError, RequestError
from chairlift.events import EventList, PrefixCacheChanged, Step
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.simulator import SimConfig, forced_request, make_engine_core
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.outputs import EngineCoreOutput
from chairlift.request import Request

Router = Literal["prefix", "pow2", "random"]
ROUTERS: Final = ("prefix", "pow2", "random")
MAX_RUNS: Final = 3
SAMPLE_SECONDS: Final = 1.0
SCALING_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica that dies `at` seconds after the start, and is replaced by an empty one after `restart_seconds`."""

    at: float
    replica: int
    restart_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Autoscaling between two numbers of replicas.

    Attributes:
        target_queued_tokens: see `QueueScaling`.
        start_seconds: the time in which a replica starts.
        idle_seconds: time without the need for a replica before it is removed.
    """

    min_replicas: int
    max_replicas: int
    target_queued_tokens: float = 4096.0
    start_seconds: float = 20.0
    idle_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A simulated cluster.

    Attributes:
        engine: the configuration of each replica.
        router: "prefix" is the router of `chairlift.cluster`, "pow2" takes the one with fewer requests of two random
            replicas (Ray Serve's default), "random" any.
        update_delay: seconds until an update of a replica reaches the router.
        update_loss: share of the updates that are lost.
        service_period: seconds between two exchanges of the service of tenants, under fair sharing; None: each replica
            shares only its own service.

    Raises:
        ConfigError: a value is outside its bounds.
    """

    engine: SimConfig
    replicas: int
    router: Router = "prefix"
    update_delay: float = 0.0
    update_loss: float = 0.0
    service_period: float | None = PERIOD_SECONDS
    failures: Sequence[Failure] = ()
    scaling: Scaling | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, got {self.replicas}")
        if self.router not in ROUTERS:
            raise ConfigError(f"router must be one of {', '.join(ROUTERS)}, got {self.router!r}")
        if self.update_delay < 0 or not 0 <= self.update_loss <= 1:
            raise ConfigError("update_delay must be at least 0, and update_loss from 0 to 1")


@dataclass(slots=True)
class ClusterResult:
    """The outcome of a simulated run; times in virtual seconds.

    Attributes:
        ttfts: the time to the first token of each finished request.
        num_prompt_tokens, num_cached_tokens: of finished requests.
        num_rejected: requests that exceed a limit of the engine.
        num_resent: requests that were sent again after a failure. num_lost: requests that ended with an error.
        service: the service of each tenant so far, in the unit of `FairPolicy`, after each second; only under fair
            sharing.
        replica_seconds: the sum of the times that replicas ran or started. most_replicas: the largest number.
    """

    num_requests: int = 0
    num_finished: int = 0
    num_lost: int = 0
    num_rejected: int = 0
    num_resent: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    service: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    wall_seconds: float = 0.0
    replica_seconds: float = 0.0
    most_replicas: int = 0
    last_replicas: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were cached."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)


@dataclass(slots=True, eq=False)
class _Sent:
    """A request on its way through the cluster."""

    item: WorkloadRequest
    prompt: RoutedPrompt
    num_runs: int = 0
    has_output: bool = False


class _Replica:
    """One engine with its clock and what it has not published yet."""

    def __init__(self, name: int, config: SimConfig, cost_model: CostModel, now: float) -> None:
        self.name = name
        self.clock = VirtualClock(now)
        self.events = EventList()
        self.core: EngineCore
        self.core, _ = make_engine_core(config, cost_model, self.clock, self.events, record_index_changes=True)
        self.inbox: list[_Sent] = []
        self.sent: dict[str, _Sent] = {}
        self.service = ServiceMeter()
        self.num_reports = 0
        self.requests: dict[str, Request] = {}
        self.is_computing = False
        self.is_alive = True
        self.is_draining = False
        self.began = now


class ClusterSimulation:
    """Runs a workload on a simulated cluster."""

    def __init__(
        self, workload: RequestFeed | Sequence[WorkloadRequest], config: ClusterConfig, cost_model: CostModel
    ) -> None:
        self._config = config
        self._cost_model = cost_model
        self._feed = workload if isinstance(workload, RequestFeed) else RequestFeed(workload)
        self._random = random.Random(config.seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._now = 0.0
        self._replicas: dict[int, _Replica] = {}
        self._states: dict[int, ReplicaState] = {}
        self._waiting: list[_Sent] = []
        self._num_started = self._num_starting = 0
        self._needed_at: dict[int, float] = {}
        self._is_fair = config.engine.scheduler.scheduling_policy == "fair"
        self._aggregator: UsageAggregator[str] = UsageAggregator()
        self._service = ServiceMeter()
        self.result = ClusterResult()

    def run(self) -> ClusterResult:
        """Simulate the workload to its end."""
        started = time.perf_counter()
        for _ in range(self._config.replicas):
            self._start_replica()
        for failure in self._config.failures:
            self._at(failure.at, self._fail, failure)
        if self._config.scaling is not None:
            self._at(SCALING_SECONDS, self._scale, self._config.scaling)
        if self._is_fair:
            self._at(SAMPLE_SECONDS, self._sample_service)
        self._schedule_arrivals()
        while self._heap:
            self._now, _, function, arguments = heapq.heappop(self._heap)
            function(*arguments)
        for replica in self._replicas.values():
            self.result.replica_seconds += self._now - replica.began
        self.result.last_replicas = len(self._replicas)
        self.result.seconds = self._now
        self.result.wall_seconds = time.perf_counter() - started
        return self.result

    @property
    def _is_over(self) -> bool:
        counts = self.result
        return self._feed.is_exhausted and counts.num_requests == (
            counts.num_finished + counts.num_lost + counts.num_rejected
        )

    def _at(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._heap, (seconds, self._num_events, function, arguments))

    # -- requests ------------------------------------------------------------------------------------------------

    def _schedule_arrivals(self) -> None:
        if (seconds := self._feed.next_time()) is not None:
            self._at(max(self._now, seconds), self._arrive)

    def _arrive(self) -> None:
        for item in self._feed.pop_due(self._now):
            self.result.num_requests += 1
            keys = RoutedPrompt.from_tokens(item.prompt_token_ids, self._config.engine.block_size)
            self._send(_Sent(item, keys))
        self._schedule_arrivals()

    def _send(self, sent: _Sent) -> None:
        candidates = [name for name, replica in self._replicas.items() if not replica.is_draining]
        if not candidates:
            self._waiting.append(sent)
            return
        sent.num_runs += 1
        name = self._choose(sent.prompt, candidates)
        self._states[name].add(sent.item.request_id, sent.prompt)
        replica = self._replicas[name]
        replica.inbox.append(sent)
        replica.sent[sent.item.request_id] = sent
        self._compute(replica)

    def _choose(self, prompt: RoutedPrompt, candidates: Sequence[int]) -> int:
        if self._config.router == "prefix":
            states: Mapping[int, ReplicaState] = {name: self._states[name] for name in candidates}
            return choose_replica(states, prompt, self._random)
        count = min(2, len(candidates)) if self._config.router == "pow2" else 1
        drawn = self._random.sample(candidates, count)
        return min(drawn, key=lambda name: self._states[name].num_unfinished)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _compute(self, replica: _Replica) -> None:
        """Compute the next step of a replica, unless it is computing or has no work."""
        if replica.is_computing or not replica.is_alive:
            return
        replica.clock.advance(max(0.0, self._now - replica.clock.now()))
        for sent in replica.inbox:
            self._add(replica, sent)
        replica.inbox.clear()
        if not replica.core.has_work:
            return
        outputs = replica.core.step()
        replica.is_computing = True
        self._at(replica.clock.now(), self._end_step, replica, outputs)

    def _add(self, replica: _Replica, sent: _Sent) -> None:
        # A request that is sent again has waited since its arrival, but arrives at this engine now.
        request = forced_request(replace(sent.item, arrival=self._now))
        try:
            replica.core.add(request)
        except RequestError:
            self.result.num_rejected += 1
            del replica.sent[request.request_id]
            self._states[replica.name].remove(request.request_id)
            self._end_request(sent, ())
        else:
            replica.requests[request.request_id] = request

    def _end_step(self, replica: _Replica, outputs: list[EngineCoreOutput]) -> None:
        replica.is_computing = False
        if not replica.is_alive:
            return
        for output in outputs:
            self._take_output(replica, output)
        self._publish(replica)
        self._compute(replica)
        if replica.is_draining and not replica.sent:
            self._remove(replica)

    def _take_output(self, replica: _Replica, output: EngineCoreOutput) -> None:
        sent = replica.sent[output.request_id]
        state = self._states[replica.name]
        self._measure(replica, sent, output)
        if not sent.has_output:
            sent.has_output = True
            state.record_output(output.request_id)
            self.result.ttfts.append(self._now - sent.item.arrival)
        if output.finish_reason is None:
            return
        request = replica.requests.pop(output.request_id)
        del replica.sent[output.request_id]
        state.remove(output.request_id)
        tokens = request.token_ids[request.num_prompt_tokens :]
        self.result.num_finished += 1
        self.result.num_output_tokens += len(tokens)
        self.result.num_prompt_tokens += request.num_prompt_tokens
        self.result.num_cached_tokens += request.num_cached_tokens
        self._end_request(sent, tokens)

    def _measure(self, replica: _Replica, sent: _Sent, output: EngineCoreOutput) -> None:
        request = replica.requests[output.request_id]
        num_new = 0 if sent.has_output else request.num_prompt_tokens - request.num_cached_tokens
        for meter in (replica.service, self._service):
            meter.add(sent.item.tenant, num_new, len(output.new_token_ids))

    def _end_request(self, sent: _Sent, tokens: Sequence[int]) -> None:
        self._feed.finish(sent.item.request_id, tokens, self._now)
        self._schedule_arrivals()

    def _publish(self, replica: _Replica) -> None:
        """Send the changes of a step to the router."""
        events, replica.events.events = replica.events.events, []
        is_lost = self._random.random() < self._config.update_loss
        free = next((event.free_blocks for event in reversed(events) if isinstance(event, Step)), None)
        if is_lost or free is None:
            return
        changes = [event for event in events if isinstance(event, PrefixCacheChanged)]
        self._at(self._now + self._config.update_delay, self._update, self._states[replica.name], changes, free)

    @staticmethod
    def _update(state: ReplicaState, changes: list[PrefixCacheChanged], free_blocks: int) -> None:
        for change in changes:
            state.change_cache(change.stored, change.removed)
        state.others = ReplicaLoad(free_blocks=free_blocks)

    # -- fair sharing ----------------------------------------------------------------------------------------------

    def _exchange_service(self, replica: _Replica, period: float) -> None:
        """Exchange the service of tenants as `share_service` does."""
        if not replica.is_alive or self._is_over:
            return
        self._at(self._now + period, self._exchange_service, replica, period)
        replica.num_reports += 1
        report = SharedUsage(replica.service.take())
        remote = self._aggregator.exchange(str(replica.name), replica.num_reports, report, self._now)
        replica.core.scheduler.charge_remote_service(remote.amounts)

    def _sample_service(self) -> None:
        if not self._is_over:
            self._at(self._now + SAMPLE_SECONDS, self._sample_service)
            self.result.service.append(self._service.total())

    # -- replicas --------------------------------------------------------------------------------------------------

    def _start_replica(self) -> None:
        engine = self._config.engine
        name = self._num_started
        self._num_started += 1
        replica = self._replicas[name] = _Replica(name, engine, self._cost_model, self._now)
        self._states[name] = ReplicaState(engine.block_size, engine.num_blocks)
        self.result.most_replicas = max(self.result.most_replicas, len(self._replicas))
        if self._is_fair and self._config.service_period is not None:
            self._exchange_service(replica, self._config.service_period)
        waiting, self._waiting = self._waiting, []
        for sent in waiting:
            self._send(sent)

    def _remove(self, replica: _Replica) -> None:
        replica.is_alive = False
        self.result.replica_seconds += self._now - replica.began
        del self._replicas[replica.name], self._states[replica.name]

    def _fail(self, failure: Failure) -> None:
        replica = self._replicas.get(failure.replica)
        if replica is None:
            return
        self._remove(replica)
        self._at(self._now + failure.restart_seconds, self._start_replica)
        for sent in replica.sent.values():
            if sent.has_output or sent.num_runs >= MAX_RUNS:
                self.result.num_lost += 1
                self._end_request(sent, ())
            else:
                self.result.num_resent += 1
                self._send(sent)

    def _scale(self, scaling: Scaling) -> None:
        """Start replicas, or let one drain."""
        if self._is_over:
            return
        self._at(self._now + SCALING_SECONDS, self._scale, scaling)
        running = {name: replica for name, replica in self._replicas.items() if not replica.is_draining}
        queued = {name: float(self._states[name].queued_tokens) for name in running}
        context = _ScalingContext(len(running) + self._num_starting, scaling, {"queued_tokens": queued})
        count, _ = QueueScaling(scaling.target_queued_tokens, float("inf"))(context)
        for _ in range(count - context.current_num_replicas):
            self._num_starting += 1
            self._at(self._now + scaling.start_seconds, self._finish_start)
        self._drain_idle(running, count, scaling)

    def _finish_start(self) -> None:
        self._num_starting -= 1
        self._start_replica()

    def _drain_idle(self, running: dict[int, _Replica], count: int, scaling: Scaling) -> None:
        """Drain the youngest replica that has not been needed for a while."""
        for rank, name in enumerate(sorted(running)):
            if rank < count:
                self._needed_at[name] = self._now
        youngest = max(running, default=None)
        if youngest is None or len(running) <= scaling.min_replicas:
            return
        if self._now - self._needed_at.setdefault(youngest, self._now) >= scaling.idle_seconds:
            replica = running[youngest]
            replica.is_draining = True
            if not replica.sent:
                self._remove(replica)


@dataclass(slots=True)
class _ScalingContext:
    current_num_replicas: int
    scaling: Scaling
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None

    @property
    def capacity_adjusted_min_replicas(self) -> int:
        return self.scaling.min_replicas

    @property
    def capacity_adjusted_max_replicas(self) -> int:
        return self.scaling.max_replicas
