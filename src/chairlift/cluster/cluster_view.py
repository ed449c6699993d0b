"""ClusterView: the replicas of one model as one ingress knows them, for the router and for the client."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from chairlift.cluster.replica_choice import choose_replica
from chairlift.cluster.replica_messages import ReplicaHello, ReplicaMessage
from chairlift.cluster.replica_state import ReplicaState, RoutedPrompt

OnReplicas = Callable[[set[str]], None]


@dataclass(frozen=True, slots=True)
class CallRoute:
    """The first argument of every call to a replica, which only the router reads.

    Attributes:
        request_id, prompt: the request that a replica is chosen for.
        replica_id: the replica that the call is for, instead of a choice.
    """

    request_id: str = ""
    prompt: RoutedPrompt | None = None
    replica_id: str | None = None


class ClusterView:
    """The states of the replicas. Any thread may call it: Ray Serve may route requests in a separate thread.

    A replica can be chosen if Ray Serve routes requests to it ("running") and this ingress receives its messages
    ("subscribed"). A replica that drains is subscribed and not running. A replica that does not answer, or whose engine
    is being restarted, is chosen only if there is no other one.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._lock = threading.RLock()
        self._random = random.Random(seed)
        self._running: set[str] = set()
        self._subscribed: dict[str, ReplicaState] = {}
        self._unfinished: set[str] = set()
        self._replica_of: dict[str, str] = {}
        self._listeners: list[OnReplicas] = []

    def on_replicas(self, listener: OnReplicas) -> None:
        """Call `listener` with the ids of the running replicas now and after each change, on any thread."""
        with self._lock:
            self._listeners.append(listener)
            running = set(self._running)
        listener(running)

    def set_running(self, replica_ids: Iterable[str]) -> None:
        """Replace the set of the replicas that Ray Serve routes requests to."""
        with self._lock:
            self._running = set(replica_ids)
            listeners, running = list(self._listeners), set(self._running)
        for listener in listeners:
            listener(running)

    def running(self) -> set[str]:
        """The replicas that Ray Serve routes requests to."""
        return set(self._running)

    def is_running(self, replica_id: str) -> bool:
        return replica_id in self._running

    def has_choice(self) -> bool:
        """Whether a replica can be chosen now."""
        return not self._running.isdisjoint(self._subscribed)

    def subscribe(self, replica_id: str, hello: ReplicaHello) -> None:
        """Add a replica whose messages this ingress receives from now on."""
        state = ReplicaState(hello.block_size, hello.num_blocks)
        state.change_cache(hello.block_keys, ())
        state.others = hello.others
        state.is_engine_running = hello.engine.state == "running"
        with self._lock:
            self._subscribed[replica_id] = state

    def unsubscribe(self, replica_id: str) -> None:
        """Remove a replica whose messages have ended."""
        with self._lock:
            self._subscribed.pop(replica_id, None)

    def update(self, replica_id: str, message: ReplicaMessage) -> None:
        """Apply the published changes of a replica."""
        with self._lock:
            if (state := self._subscribed.get(replica_id)) is not None:
                state.change_cache(message.stored, message.removed)
                state.others = message.others
                state.is_engine_running = message.engine.state == "running"

    def set_answering(self, replica_id: str, is_answering: bool) -> bool:
        """Record whether a replica answers calls; returns whether this has changed."""
        with self._lock:
            state = self._subscribed.get(replica_id)
            if state is None or state.is_answering == is_answering:
                return False
            state.is_answering = is_answering
            return True

    def route(self, request_id: str, prompt: RoutedPrompt) -> str | None:
        """Choose the replica of a request, and count the request as sent to it; None if there is none now. Another
        call for the same request replaces the choice. A request that is not added is not counted: it was aborted while
        it waited for its route."""
        with self._lock:
            self._remove(request_id)
            candidates = {name: state for name, state in self._subscribed.items() if name in self._running}
            candidates = {name: state for name, state in candidates.items() if state.is_answering} or candidates
            candidates = {name: state for name, state in candidates.items() if state.is_engine_running} or candidates
            if not candidates:
                return None
            chosen = choose_replica(candidates, prompt, self._random)
            self.assign(request_id, prompt, chosen)
            return chosen

    def assign(self, request_id: str, prompt: RoutedPrompt, replica_id: str) -> None:
        """Count a request as sent to a replica, and no longer to another one."""
        with self._lock:
            self._remove(request_id)
            if request_id in self._unfinished and (state := self._subscribed.get(replica_id)) is not None:
                state.add(request_id, prompt)
                self._replica_of[request_id] = replica_id

    def add(self, request_id: str) -> None:
        """Record an unfinished request that a replica will be chosen for."""
        with self._lock:
            self._unfinished.add(request_id)

    def replica_of(self, request_id: str) -> str | None:
        """The replica that was chosen for a request."""
        return self._replica_of.get(request_id)

    def record_output(self, request_id: str) -> None:
        """Record that the prompt of a request has been computed."""
        with self._lock:
            state = self._subscribed.get(self._replica_of.get(request_id, ""))
            if state is not None:
                state.record_output(request_id)

    def remove(self, request_id: str) -> None:
        """Record the end of a request, or that its replica is lost."""
        with self._lock:
            self._unfinished.discard(request_id)
            self._remove(request_id)

    def _remove(self, request_id: str) -> None:
        state = self._subscribed.get(self._replica_of.pop(request_id, ""))
        if state is not None:
            state.remove(request_id)


_VIEWS: Final[dict[tuple[str, str], ClusterView]] = {}
_VIEWS_LOCK: Final = threading.Lock()


def cluster_view(app_name: str, deployment: str) -> ClusterView:
    """The view of this process on a deployment. The router, which Ray Serve creates, and the client share it."""
    with _VIEWS_LOCK:
        return _VIEWS.setdefault((app_name, deployment), ClusterView())
