"""The state of an engine as the server sees it, derived from events: requests and their explanations, and metrics."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from chairlift.clock import Clock, MonotonicClock
from chairlift.engine.event_hub import EventHub
from chairlift.engine.explanation.explain import Explainer, Viewer
from chairlift.engine.process.client import EngineStatus
from chairlift.events import Event, RequestArrived, RequestRejected
from chairlift.observability.prometheus import PrometheusMetrics
from chairlift.observability.tracked_request import TrackedRequest
from chairlift.observability.tracker import RequestTracker
from chairlift.server.access.keys import Key

MAX_SEQUENCES: Final = 1 << 16  # that are found by the ids of their call and prompt; the oldest calls are forgotten


@dataclass(frozen=True, slots=True)
class ObservedRequest:
    """A sequence of an API call and the observer of its engine, whose clock its times are of.

    Attributes:
        is_resent: the engine was lost, and the sequence was sent to another replica.
    """

    request: TrackedRequest
    observer: EngineObserver
    is_resent: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether the engine ended before it. An engine that restarts reports this late."""
        return self.is_resent or self.request.state == "lost"


class EngineObserver:
    """An event sink that receives the events of an engine and answers queries about it.

    Args:
        clock: the clock of the engine; None is the monotonic clock, which all processes of a machine share.
        replica_id: the id of the engine, if it is one of several of a model.
    """

    def __init__(self, events: EventHub, clock: Clock | None = None, replica_id: str | None = None) -> None:
        self.replica_id = replica_id
        self.tracker = RequestTracker()
        self.explainer = Explainer(self.tracker)
        self._calls: OrderedDict[str, dict[str, None]] = OrderedDict()
        self._num_found = 0
        self._clock = clock or MonotonicClock()
        self._secret = Viewer().secret
        for listener in (self.tracker, self):
            events.add(listener)

    def emit(self, event: Event) -> None:
        """Remember the sequences of each API call."""
        if isinstance(event, RequestArrived | RequestRejected):
            for name in _call_ids(event.request_id):
                ids = self._calls.setdefault(name, {})
                self._num_found += event.request_id not in ids
                ids[event.request_id] = None
            while self._num_found > MAX_SEQUENCES and len(self._calls) > 1:
                self._num_found -= len(self._calls.popitem(last=False)[1])

    def now(self) -> float:
        return self._clock.now()

    def viewer(self, key: Key) -> Viewer:
        return Viewer(key.tenant, key.is_admin, self._secret)

    def find(self, call_id: str) -> list[ObservedRequest]:
        """The known sequences of an API call."""
        found = (self.tracker.get(request_id) for request_id in self._calls.get(call_id, ()))
        return [ObservedRequest(request, self) for request in found if request is not None]


def engine_metrics(
    events: EventHub, status: Callable[[], EngineStatus], tracker: RequestTracker, model_name: str
) -> PrometheusMetrics:
    """Create the metrics of an engine, which read the state of its tracker."""
    cannot_restart = "1 if the engine died and cannot be restarted, so that requests are rejected."
    stalled = "Seconds without a step while requests are unfinished."
    dropped = "Number of events dropped because the server was busy; always 0 for an engine process."
    since_step = "Seconds since the end of the last step."
    gauges: dict[str, tuple[str, Callable[[], float]]] = {
        "chairlift:engine_up": ("1 if the engine is running.", lambda: status().state == "running"),
        "chairlift:engine_cannot_restart": (cannot_restart, lambda: status().state == "cannot_restart"),
        "chairlift:engine_seconds_since_step": (since_step, lambda: status().seconds_since_step),
        "chairlift:engine_seconds_stalled": (stalled, lambda: status().seconds_stalled),
    }
    counters: dict[str, tuple[str, Callable[[], float]]] = {
        "chairlift:engine_restarts": ("Number of restarts of the engine.", lambda: status().restarts),
        "chairlift:events_dropped": (dropped, lambda: events.num_dropped),
    }
    return PrometheusMetrics(tracker, gauges, model_name, counters)


def _call_ids(request_id: str) -> list[str]:
    """The ids of the prompt and of the call that a sequence belongs to.

    The call `cmpl-1` has the sequence `cmpl-1~5` and the siblings `cmpl-1~5.1`, ...; with several prompts it has
    `cmpl-1.0~6`, `cmpl-1.1~7`, ...
    """
    prompt_id = request_id.rpartition("~")[0] or request_id
    call_id, dot, index = prompt_id.rpartition(".")
    return [prompt_id, call_id] if dot and index.isdigit() else [prompt_id]
