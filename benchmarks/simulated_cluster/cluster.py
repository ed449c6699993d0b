"""A cluster in virtual time: replicas with the engine's own scheduler, and the router's own choice of replicas.

Each replica has a clock that is ahead of the cluster's while it computes a step; what a step changes takes effect at
its end. The events of the cluster (arrivals, ends of steps, updates of the routers, failures) are in one heap.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from benchmarks.simulated_cluster.cluster_config import ClusterConfig, Failure
from benchmarks.simulated_cluster.simulated_replica import RoutedRequest, SimulatedReplica

from chairlift.cluster.replica_choice import choose_replica
from chairlift.cluster.replica_state import ReplicaLoad, ReplicaState, RoutedPrompt
from chairlift.cluster.usage_aggregator import ServiceMeter, SharedUsage, UsageAggregator
from chairlift.config import FAIR_POLICIES
from chairlift.engine.process.in_flight import MAX_RUNS
from chairlift.errors import RequestError
from chairlift.events import PrefixCacheChanged
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.simulator import forced_request
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.outputs import EngineCoreOutput

SAMPLE_SECONDS: Final = 1.0


@dataclass(slots=True)
class ClusterResult:
    """The outcome of a simulated run; times in virtual seconds.

    Attributes:
        ttfts: the time to the first token of each finished request.
        num_prompt_tokens, num_cached_tokens: of finished requests.
        num_rejected: requests that exceed a limit of the engine.
        num_resent: requests that were sent again after a failure. num_lost: requests that ended with an error.
        service: the service of each tenant so far, in the unit of `FairQueue`, after each second; only under fair
            sharing.
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

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were cached."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)


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
        self._replicas: dict[int, SimulatedReplica] = {}
        self._candidates: list[dict[int, ReplicaState]] = [{} for _ in range(config.num_routers)]
        self._next_arrival = math.inf
        self._waiting: list[RoutedRequest] = []
        self._num_started = 0
        self._is_fair = config.engine.scheduler.scheduling_policy in FAIR_POLICIES
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
        if self._is_fair:
            self._at(SAMPLE_SECONDS, self._sample_service)
        self._schedule_arrivals()
        while self._heap:
            self._now, _, function, arguments = heapq.heappop(self._heap)
            function(*arguments)
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
        seconds = self._feed.next_time()
        if seconds is not None and (seconds := max(self._now, seconds)) < self._next_arrival:
            self._next_arrival = seconds
            self._at(seconds, self._arrive)

    def _arrive(self) -> None:
        if self._now != self._next_arrival:
            return  # An earlier arrival has replaced this one.
        self._next_arrival = math.inf
        for item in self._feed.pop_due(self._now):
            prompt = RoutedPrompt.from_tokens(item.prompt_token_ids, self._config.engine.pool.block_size)
            self._send(RoutedRequest(item, prompt, self.result.num_requests % self._config.num_routers))
            self.result.num_requests += 1
        self._schedule_arrivals()

    def _send(self, sent: RoutedRequest) -> None:
        candidates = self._candidates[sent.router]
        if not candidates:
            self._waiting.append(sent)
            return
        sent.num_runs += 1
        name = self._choose(sent.prompt, candidates)
        sent.state = candidates[name]
        sent.state.add(sent.item.request_id, sent.prompt)
        replica = self._replicas[name]
        replica.receive(sent)
        self._compute(replica)

    def _choose(self, prompt: RoutedPrompt, candidates: Mapping[int, ReplicaState]) -> int:
        if self._config.router == "prefix":
            return choose_replica(candidates, prompt, self._random)
        if self._config.router == "pow2":
            drawn = self._random.sample(list(candidates), min(2, len(candidates)))
            return min(drawn, key=lambda name: candidates[name].num_unfinished)
        return self._random.choice(list(candidates))

    # -- steps -----------------------------------------------------------------------------------------------------

    def _compute(self, replica: SimulatedReplica) -> None:
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

    def _add(self, replica: SimulatedReplica, sent: RoutedRequest) -> None:
        # A request that is sent again has waited since its arrival, but arrives at this engine now.
        request = forced_request(replace(sent.item, arrival=self._now))
        try:
            replica.core.add(request)
        except RequestError:
            self.result.num_rejected += 1
            self._forget(replica, sent)
            self._end_request(sent)
        else:
            replica.requests[request.request_id] = request

    @staticmethod
    def _forget(replica: SimulatedReplica, sent: RoutedRequest) -> None:
        """Remove a request that has ended."""
        assert sent.state is not None
        del replica.sent[sent.item.request_id]
        sent.state.remove(sent.item.request_id)

    def _end_step(self, replica: SimulatedReplica, outputs: list[EngineCoreOutput]) -> None:
        replica.is_computing = False
        if not replica.is_alive:
            return
        for output in outputs:
            self._take_output(replica, output)
        self._publish(replica)
        self._compute(replica)

    def _take_output(self, replica: SimulatedReplica, output: EngineCoreOutput) -> None:
        sent = replica.sent[output.request_id]
        if self._is_fair:
            self._measure(replica, sent, output)
        if not sent.has_output:
            assert sent.state is not None
            sent.has_output = True
            sent.state.record_output(output.request_id)
            self.result.ttfts.append(self._now - sent.item.arrival)
        if output.finish_reason is None:
            return
        request = replica.requests.pop(output.request_id)
        self._forget(replica, sent)
        self.result.num_finished += 1
        self.result.num_output_tokens += request.num_output_tokens
        self.result.num_prompt_tokens += request.num_prompt_tokens
        self.result.num_cached_tokens += request.meter.num_cached_tokens
        self._end_request(sent)

    def _measure(self, replica: SimulatedReplica, sent: RoutedRequest, output: EngineCoreOutput) -> None:
        request = replica.requests[output.request_id]
        num_new = 0 if sent.has_output else request.num_prompt_tokens - request.meter.num_cached_tokens
        for meter in (replica.service, self._service):
            meter.add(sent.item.tenant, num_new, len(output.new_token_ids))

    def _end_request(self, sent: RoutedRequest) -> None:
        self._feed.finish(sent.item.request_id, self._now)
        self._schedule_arrivals()

    def _publish(self, replica: SimulatedReplica) -> None:
        """Send the changes of a step to the routers."""
        changes = replica.take_changes()
        has_others = len(self._candidates) > 1
        for router, candidates in enumerate(self._candidates):
            is_lost = self._random.random() < self._config.update_loss
            state = candidates.get(replica.name)
            if is_lost or state is None:
                continue
            load = replica.load(without=router) if has_others else ReplicaLoad(free_blocks=replica.free_blocks)
            if self._config.update_delay:
                self._at(self._now + self._config.update_delay, self._update, state, changes, load)
            else:
                self._update(state, changes, load)

    @staticmethod
    def _update(state: ReplicaState, changes: list[PrefixCacheChanged], load: ReplicaLoad) -> None:
        for change in changes:
            state.change_cache(change.stored, change.removed)
        state.others = load

    # -- fair sharing ----------------------------------------------------------------------------------------------

    def _exchange_service(self, replica: SimulatedReplica, period: float) -> None:
        """Exchange the service of tenants as `exchange_periodically` does."""
        if not replica.is_alive or self._is_over:
            return
        self._at(self._now + period, self._exchange_service, replica, period)
        report = SharedUsage(replica.service.take())
        remote = self._aggregator.exchange(str(replica.name), report, self._now)
        replica.core.scheduler.queue.record_remote_service(remote.amounts)

    def _sample_service(self) -> None:
        if not self._is_over:
            self._at(self._now + SAMPLE_SECONDS, self._sample_service)
            self.result.service.append(self._service.total())

    # -- replicas --------------------------------------------------------------------------------------------------

    def _start_replica(self) -> None:
        engine = self._config.engine
        name = self._num_started
        self._num_started += 1
        replica = SimulatedReplica(name, engine, self._cost_model, self._now)
        self._replicas[name] = replica
        for candidates in self._candidates:
            candidates[name] = ReplicaState(engine.pool.block_size, engine.pool.num_blocks)
        if self._is_fair and self._config.service_period is not None:
            self._exchange_service(replica, self._config.service_period)
        waiting, self._waiting = self._waiting, []
        for sent in waiting:
            self._send(sent)

    def _fail(self, failure: Failure) -> None:
        replica = self._replicas.pop(failure.replica, None)
        if replica is None:
            return
        replica.is_alive = False
        for candidates in self._candidates:
            candidates.pop(replica.name, None)
        self._at(self._now + failure.restart_seconds, self._start_replica)
        for sent in replica.sent.values():
            if sent.has_output or sent.num_runs >= MAX_RUNS:
                self.result.num_lost += 1
                self._end_request(sent)
            else:
                self.result.num_resent += 1
                self._send(sent)
