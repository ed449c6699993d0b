"""ModelObservers: the observers of all models, as one."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from chairlift.observability.explain import Viewer
from chairlift.observability.tracked_request import TrackedRequest, WaitSpan
from chairlift.server.models.served_model import ServedModel
from chairlift.server.telemetry.engine_observer import EngineObserver


class ModelObservers:
    """Finds requests in the observers of all models and of their replicas, which may run on other machines."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models

    @property
    def all(self) -> list[EngineObserver]:
        """The observers, in the order of the models and of their replicas."""
        return [observer for model in self._models for observer in model.observers]

    def now(self) -> float:
        return self._models[0].observer.now()

    def clock_shift(self, request: TrackedRequest) -> float:
        """See `CallObserver.clock_shift`."""
        owner = self._owner(request)
        return 0.0 if owner is None else self.now() - owner.now()

    def _owner(self, request: TrackedRequest) -> EngineObserver | None:
        """The observer of a request; None if its replica has been removed."""
        owners = (observer for observer in self.all if observer.tracker.get(request.request_id) is request)
        return next(owners, None)

    def viewer(self, request: Request) -> Viewer:
        return self._models[0].observer.viewer(request)

    def sequences(self, call_id: str) -> list[TrackedRequest]:
        """The known sequences of an API call."""
        return [sequence for observer in self.all for sequence in observer.sequences(call_id)]

    def spans(self, request: TrackedRequest, now: float) -> list[list[WaitSpan]]:
        """The waits of a request; see `RequestTracker.spans`."""
        owner = self._owner(request)
        return [] if owner is None else owner.spans(request, now)
