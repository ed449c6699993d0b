"""What a server knows of its engine: requests, metrics and the state of both, all from the engine's events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

from starlette.requests import Request

from chairlift.clock import Clock, MonotonicClock
from chairlift.engine.async_llm import AsyncLLM
from chairlift.events import Event, RequestArrived, RequestRejected
from chairlift.observability.explain import Explainer, Viewer
from chairlift.observability.prometheus import PrometheusMetrics
from chairlift.observability.tracked_request import TrackedRequest
from chairlift.observability.tracker import RequestTracker
from chairlift.server.access.keys import KeyInfo

MAX_CALLS: Final = 4096


class EngineObserver:
    """Listens to an engine.

    Args:
        clock: the engine's, as far as this process can tell it: the machine's monotonic one.
        max_finished: requests that have ended and can still be asked for.
    """

    def __init__(self, llm: AsyncLLM, clock: Clock | None = None, max_finished: int = 1000) -> None:
        self.llm = llm
        self.tracker = RequestTracker(max_finished)
        self.explainer = Explainer(self.tracker)
        self.calls = CallSequences()
        self._clock = clock or MonotonicClock()
        self._secret = Viewer().secret
        self.metrics = PrometheusMetrics(
            self.tracker, {name: (text, partial(value, llm)) for name, (text, value) in ENGINE_GAUGES.items()}
        )
        for listener in (self.tracker, self.calls, self.metrics):
            llm.events.add(listener)

    def now(self) -> float:
        return self._clock.now()

    def viewer(self, request: Request) -> Viewer:
        key: KeyInfo = request.state.key
        return Viewer(key.tenant, key.is_admin, self._secret)

    def find(self, call_id: str, viewer: Viewer) -> list[TrackedRequest]:
        """The sequences of an API call, as far as they are known and may be seen."""
        return [request for request in self.sequences(call_id) if viewer.may_see(request.tenant)]

    def sequences(self, call_id: str) -> list[TrackedRequest]:
        """The sequences of an API call, as far as they are known."""
        found = (self.tracker.get(request_id) for request_id in self.calls.get(call_id))
        return [request for request in found if request is not None]


ENGINE_GAUGES: Final[dict[str, tuple[str, Callable[[AsyncLLM], float]]]] = {
    "chairlift:engine_up": ("1 if the engine runs.", lambda llm: float(llm.status().state == "running")),
    "chairlift:engine_cannot_restart": (
        "1 if the engine died and requests are refused because it cannot be started again.",
        lambda llm: float(llm.status().state == "cannot_restart"),
    ),
    "chairlift:engine_restarts": ("How often it was started again.", lambda llm: float(llm.status().restarts)),
    "chairlift:engine_seconds_since_step": (
        "Seconds since its last step ended.",
        lambda llm: llm.status().seconds_since_step,
    ),
    "chairlift:events_dropped": ("Events that a busy server has lost.", lambda llm: float(llm.events.num_dropped)),
}


class CallSequences:
    """Which sequences belong to which API call. A call `cmpl-1` has those of `cmpl-1~5`, its siblings `cmpl-1~5.1`, and
    with several prompts `cmpl-1.0~6`, `cmpl-1.1~7`."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, list[str]] = OrderedDict()

    def get(self, call_id: str) -> list[str]:
        return self._calls.get(call_id, [])

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestArrived | RequestRejected):
            for name in _names(event.request_id):
                ids = self._calls.setdefault(name, [])
                if event.request_id not in ids:
                    ids.append(event.request_id)
            while len(self._calls) > MAX_CALLS:
                self._calls.popitem(last=False)


def _names(core_id: str) -> list[str]:
    prompt_id = core_id.rpartition("~")[0] or core_id
    call_id, dot, index = prompt_id.rpartition(".")
    return [prompt_id, call_id] if dot and index.isdigit() else [prompt_id]
