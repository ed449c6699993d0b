"""ModelObservers: the observers of all models, as one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from chairlift.observability.explain import Viewer
from chairlift.observability.tracked_request import TrackedRequest
from chairlift.server.access.keys import KeyInfo
from chairlift.server.models.served_model import ServedModel
from chairlift.server.telemetry.engine_observer import EngineObserver, ObservedRequest


class ModelObservers:
    """Finds requests in the observers of all models and of their replicas, which may run on other machines."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models

    @property
    def running(self) -> list[EngineObserver]:
        """The observers of engines that have not ended, in the order of the models and of their replicas."""
        return [observer for model in self._models for observer in model.observers]

    def now(self) -> float:
        return self._models[0].observer.now()

    def viewer(self, key: KeyInfo) -> Viewer:
        return self._models[0].observer.viewer(key)

    def find(self, call_id: str) -> list[ObservedRequest]:
        """The known sequences of an API call, also those of replicas that have ended. The sequences of a model are in
        the order of their creation, and one that was sent again in the order of its replicas."""
        return [sequence for model in self._models for sequence in self._find(model, call_id)]

    def _find(self, model: ServedModel, call_id: str) -> list[ObservedRequest]:
        observers = (*model.ended_observers, *model.observers)
        found = [sequence for observer in observers for sequence in observer.find(call_id)]
        found.sort(key=lambda sequence: _sending_order(sequence.request))
        for index, (one, following) in enumerate(pairwise(found)):
            if one.request.request_id == following.request.request_id:
                found[index] = replace(one, is_resent=True)
        return found


def _sending_order(request: TrackedRequest) -> tuple[list[str | int], bool, bool, int]:
    """A key that sorts sequences as they were created, and one that was sent again as it was sent. A sequence is sent
    again only if it had no output, perhaps before its engine has reported that it was lost."""
    is_finished = request.finished is not None
    return _creation_order(request.request_id), request.state != "lost", is_finished, request.num_output_tokens


def _creation_order(request_id: str) -> list[str | int]:
    """A key that sorts the sequences of a call as they were created: "x.9~9" before "x.10~10.1" before "x.10~10.2"."""
    parts = re.split(r"([0-9]+)", request_id.rpartition("~")[2])
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]
