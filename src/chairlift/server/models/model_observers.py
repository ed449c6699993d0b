"""ModelObservers: the observers of all models, as one."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from chairlift.observability.explain import Viewer
from chairlift.observability.tracked_request import TrackedRequest, WaitSpan
from chairlift.server.models.served_model import ServedModel
from chairlift.server.telemetry.engine_observer import EngineObserver


class ModelObservers:
    """Finds requests in the observers of all models, whose clocks are the same.

    Attributes:
        all: the observers, in the order of the models.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.all: list[EngineObserver] = [model.observer for model in models]

    def now(self) -> float:
        return self.all[0].now()

    def viewer(self, request: Request) -> Viewer:
        return self.all[0].viewer(request)

    def sequences(self, call_id: str) -> list[TrackedRequest]:
        """The known sequences of an API call."""
        return [sequence for observer in self.all for sequence in observer.sequences(call_id)]

    def spans(self, request: TrackedRequest, now: float) -> list[list[WaitSpan]]:
        """The waits of a request; see `RequestTracker.spans`."""
        owner = next(observer for observer in self.all if observer.tracker.get(request.request_id) is request)
        return owner.spans(request, now)
