"""SimulatedReplica: an engine in virtual time with its requests, and what it reports to routers."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.clock import VirtualClock
from chairlift.cluster.replica_state import ReplicaLoad, ReplicaState, RoutedPrompt
from chairlift.cluster.usage_aggregator import ServiceMeter
from chairlift.events import Event, PrefixCacheChanged, Step
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.simulator import SimConfig, make_engine_core
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.request import Request


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request on its way through the cluster.

    Attributes:
        router: the router that chooses its replicas.
        state: the state of its present replica in that router; None before the first choice.
        num_runs: number of replicas that it was sent to.
        num_uncached_tokens: prompt tokens that its present replica had not cached when it received the request.
    """

    item: WorkloadRequest
    prompt: RoutedPrompt
    router: int
    state: ReplicaState | None = None
    num_runs: int = 0
    num_uncached_tokens: int = 0
    has_output: bool = False


class SimulatedReplica:
    """One engine with its clock.

    Attributes:
        inbox: requests that the engine has not received yet.
        sent: unfinished requests by id, those of the inbox included. requests: those of the engine.
    """

    def __init__(self, name: int, config: SimConfig, cost_model: CostModel, now: float) -> None:
        self.name = name
        self.clock = VirtualClock(now)
        self.core, _ = make_engine_core(config, cost_model, self.clock, self, record_index_changes=True)
        self.inbox: list[RoutedRequest] = []
        self.sent: dict[str, RoutedRequest] = {}
        self.requests: dict[str, Request] = {}
        self.service = ServiceMeter()
        self.is_computing = False
        self.is_alive = True
        self._config = config
        self._free_blocks = config.pool.num_blocks
        self._changes: list[PrefixCacheChanged] = []
        self._cached: set[int] = set()

    def emit(self, event: Event) -> None:
        """Receive an event of the engine."""
        if isinstance(event, Step):
            self._free_blocks = event.free_blocks
        elif isinstance(event, PrefixCacheChanged):
            self._changes.append(event)
            self._cached.difference_update(event.removed)
            self._cached.update(event.stored)

    def receive(self, sent: RoutedRequest) -> None:
        """Queue a request until the next step."""
        prompt = sent.prompt
        sent.num_uncached_tokens = prompt.num_tokens - prompt.num_cached_tokens(
            self._config.pool.block_size, self._cached
        )
        self.inbox.append(sent)
        self.sent[sent.item.request_id] = sent

    def take_changes(self) -> list[PrefixCacheChanged]:
        """The changes of the prefix cache since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def load(self, without: int | None = None) -> ReplicaLoad:
        """The load that all routers cause, or all but one, as in `EngineReplica.load`."""
        others = [sent for sent in self.sent.values() if sent.router != without]
        queued = sum(sent.num_uncached_tokens for sent in others if not sent.has_output)
        return ReplicaLoad(queued, len(others), self.free_blocks)

    @property
    def free_blocks(self) -> int:
        """Free blocks after the schedule of the last step; all blocks if the engine has no unfinished request."""
        return self._free_blocks if self.requests else self._config.pool.num_blocks
