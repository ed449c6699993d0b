"""ModelObservers: the observers of all models, as one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.requests import Request

from chairlift.observability.explain import Viewer
from chairlift.server.models.served_model import ServedModel
from chairlift.server.telemetry.engine_observer import EngineObserver, ObservedRequest


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

    def viewer(self, request: Request) -> Viewer:
        return self._models[0].observer.viewer(request)

    def find(self, call_id: str) -> list[ObservedRequest]:
        """The known sequences of an API call. Those of one model, which several replicas may have computed, are in the
        order of their creation."""
        return [sequence for model in self._models for sequence in self._find(model, call_id)]

    def _find(self, model: ServedModel, call_id: str) -> list[ObservedRequest]:
        found = [sequence for observer in model.observers for sequence in observer.find(call_id)]
        return sorted(found, key=lambda sequence: _creation_order(sequence.request.request_id))


def _creation_order(request_id: str) -> list[str | int]:
    """A key that sorts the sequences of a call as they were created: "x.9~9" before "x.10~10.1" before "x.10~10.2"."""
    parts = re.split(r"([0-9]+)", request_id.rpartition("~")[2])
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]
