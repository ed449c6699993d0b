"""ModelObservers: the observers of all models, as one."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from chairlift.observability.explain import Viewer
from chairlift.observability.tracked_request import TrackedRequest, WaitSpan
from chairlift.server.models.served_model import ServedModel
from chairlift.server.telemetry.engine_observer import EngineObserver


class ModelObservers:
    """Finds requests in the observers of all models, whose clocks are the same."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models

    @property
    def all(self) -> list[EngineObserver]:
        """The observers, in the order of the models and of their replicas."""
        return [observer for model in self._models for observer in model.observers]

    def now(self) -> float:
        return self._models[0].observer.now()

    def viewer(self, request: Request) -> Viewer:
        return self._models[0].observer.viewer(request)

    def sequences(self, call_id: str) -> list[TrackedRequest]:
        """The known sequences of an API call."""
        return [sequence for observer in self.all for sequence in observer.sequences(call_id)]

    def spans(self, request: TrackedRequest, now: float) -> list[list[WaitSpan]]:
        """The waits of a request; see `RequestTracker.spans`."""
        owner = next(observer for observer in self.all if observer.tracker.get(request.request_id) is request)
        return owner.spans(request, now)
