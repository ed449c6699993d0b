"""A cluster in virtual time: replicas with the engine's own scheduler, and the router's own choice of replicas.

Each replica has a clock that is ahead of the cluster's while it computes a step; what a step changes takes effect at
its end. The events of the cluster (arrivals, ends of steps, updates of the router) are in one heap.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from chairlift.clock import VirtualClock
from chairlift.cluster.replica_choice import choose_replica
from chairlift.cluster.replica_state import ReplicaLoad, ReplicaState, RoutedPrompt
from chairlift.core.kv.block_hashes import block_hash, root_hash
from chairlift.core.kv.index_changes import block_key
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.simulator import SimConfig, forced_request, make_engine_core
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.outputs import EngineCoreOutput
from chairlift.request import Request

ROUTERS: Final = ("prefix", "fewest", "random")
"""The router of `chairlift.cluster`; the replica with the fewest unfinished requests of two random ones; any."""


class SimulatedReplica:
    """One engine with its clock, and the state of it that the router knows."""

    def __init__(self, config: SimConfig, cost_model: CostModel) -> None:
        self.clock = VirtualClock()
        self.core, _ = make_engine_core(config, cost_model, self.clock, record_index_changes=True)
        self.state = ReplicaState(config.pool.block_size, config.pool.num_blocks)
        self.requests: dict[str, Request] = {}
        self.inbox: list[Request] = []
        self.is_computing = False
        self._kv: Any = self.core.scheduler._kv

    def receive(self, request: Request, prompt: RoutedPrompt, chain: list[bytes]) -> None:
        """Send a request to the engine, which receives it before the next step, with the hashes of its blocks."""
        self.state.add(request.request_id, prompt)
        self.requests[request.request_id] = request
        self.inbox.append(request)
        self._kv.prefixes._chains[request.request_id] = list(chain)

    def step(self, now: float) -> list[EngineCoreOutput] | None:
        """Compute a step to its end, unless one is computed or there is no work."""
        if self.is_computing:
            return None
        self.clock.advance(max(0.0, now - self.clock.now()))
        for request in self.inbox:
            self.core.add(request)
        self.inbox.clear()
        if not self.core.has_work:
            return None
        self.is_computing = True
        return self.core.step()

    def publish(self) -> tuple[tuple[list[int], list[int]], ReplicaLoad]:
        """The changes of the prefix cache and the load, as `EngineReplica` publishes them after a step."""
        return self._kv.index_changes.take() or ([], []), ReplicaLoad(free_blocks=self._kv.num_free_blocks)


class ClusterSimulation:
    """Runs a workload on a simulated cluster.

    Args:
        on_finish: receives each request at its end.
        router: one of ROUTERS.
        update_delay: seconds until an update of a replica reaches the router.
    """

    def __init__(
        self,
        workload: Sequence[WorkloadRequest],
        config: SimConfig,
        cost_model: CostModel,
        num_replicas: int,
        on_finish: Callable[[Request, float], None],
        router: str = "prefix",
        seed: int = 0,
        update_delay: float = 0.0,
    ) -> None:
        self._feed = RequestFeed(workload)
        self._block_size = config.pool.block_size
        self.replicas = [SimulatedReplica(config, cost_model) for _ in range(num_replicas)]
        self._states = {number: replica.state for number, replica in enumerate(self.replicas)}
        self._router, self._random, self._update_delay = router, random.Random(seed), update_delay
        self._on_finish = on_finish
        self._hashes: dict[str, tuple[list[bytes], list[int]]] = {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = self.num_steps = 0
        self.now, self._next_arrival = 0.0, math.inf

    def run(self) -> None:
        """Simulate the workload to its end."""
        self._schedule_arrival()
        while self._events:
            self.now, _, function, arguments = heapq.heappop(self._events)
            function(*arguments)
        assert self._feed.is_exhausted, "no request vanishes"

    def _at(self, time: float, function: Callable[..., None], *arguments: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, function, arguments))

    def _schedule_arrival(self) -> None:
        time = self._feed.next_time()
        if time is not None and (time := max(self.now, time)) < self._next_arrival:
            self._next_arrival = time
            self._at(time, self._arrive)

    def _arrive(self) -> None:
        if self.now != self._next_arrival:
            return  # An earlier arrival has replaced this one.
        self._next_arrival = math.inf
        for item in self._feed.pop_due(self.now):
            prompt = RoutedPrompt(len(item.prompt_token_ids), tuple(self._hash(item)[1]))
            replica = self.replicas[self._choose(prompt)]
            replica.receive(forced_request(item), prompt, self._hashes[item.request_id][0])
            self._compute(replica)
        self._schedule_arrival()

    def _hash(self, item: WorkloadRequest) -> tuple[list[bytes], list[int]]:
        """The hashes of the full blocks of a prompt and their keys, for which only what is behind the prompt of the
        turn before it is hashed."""
        chain, keys = self._hashes.pop(item.continues or "", ([], []))
        for start in range(len(chain) * self._block_size, len(item.prompt_token_ids), self._block_size):
            tokens = list(item.prompt_token_ids[start : start + self._block_size])
            if len(tokens) == self._block_size:
                chain.append(block_hash(chain[-1] if chain else root_hash(None), tokens))
                keys.append(block_key(chain[-1]))
        self._hashes[item.request_id] = chain, keys
        return chain, keys

    def _choose(self, prompt: RoutedPrompt) -> int:
        if self._router == "prefix":
            return choose_replica(self._states, prompt, self._random)
        drawn = self._random.sample(list(self._states), min(2 if self._router == "fewest" else 1, len(self._states)))
        return min(drawn, key=lambda number: self._states[number].num_unfinished)

    def _compute(self, replica: SimulatedReplica) -> None:
        if (outputs := replica.step(self.now)) is not None:
            self.num_steps += 1
            self._at(replica.clock.now(), self._end_step, replica, outputs)

    def _end_step(self, replica: SimulatedReplica, outputs: list[EngineCoreOutput]) -> None:
        replica.is_computing = False
        for output in outputs:
            if output.times is not None:
                replica.state.record_output(output.request_id)
            if output.finish_reason is not None:
                replica.state.remove(output.request_id)
                request = replica.requests.pop(output.request_id)
                self._feed.finish(output.request_id, self.now, request.token_ids)
                self._on_finish(request, self.now)
        self._at(self.now + self._update_delay, self._update, replica.state, *replica.publish())
        self._schedule_arrival()
        self._compute(replica)

    @staticmethod
    def _update(state: ReplicaState, changes: tuple[list[int], list[int]], load: ReplicaLoad) -> None:
        state.change_cache(*changes)
        state.others = load
