"""Events as a page with the key of one tenant sees them: requests of other tenants have opaque ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from chairlift.engine.explanation.explain import Viewer
from chairlift.events import (
    EngineEvent,
    Event,
    PrefixCacheChanged,
    PrefixMatched,
    RequestArrived,
    RequestRejected,
    Step,
)
from chairlift.observability.tracker import RequestTracker

MAX_KNOWN_IDS: Final = 8192
"""The ids whose opaque form is remembered. Beyond that all are forgotten and computed again, with the same result."""

STEP_LISTS: Final = ("request_ids", "admitted", "preempted", "swapped", "finished")
STEP_MAPS: Final = ("new_blocks", "released_blocks", "num_matched")
"""The fields of a step with the ids of requests: lists, and keys of dictionaries."""


class Redactor:
    """Replaces the ids and tenants of requests that a viewer may not see. An admin sees all events unchanged.

    The numbers of tokens and blocks of these requests remain, because they explain the waits of the viewer's own ones.
    """

    def __init__(self, viewer: Viewer, tracker: RequestTracker) -> None:
        self.viewer = viewer
        self._tracker = tracker
        self._shown_ids: dict[str, str] = {}

    def redact(self, event: Event) -> Event | None:
        """The event for the viewer; None if the viewer may not see it at all."""
        if self.viewer.is_admin or isinstance(event, EngineEvent):
            return event
        if isinstance(event, Step):
            return self._step(event)
        if isinstance(event, RequestRejected):
            # The tenant of a rejected request is not known from events.
            return event if self.viewer.can_see("") else None
        if isinstance(event, RequestArrived):
            return self._arrived(event)
        if isinstance(event, PrefixCacheChanged):
            return None
        if isinstance(event, PrefixMatched):
            request = self._tracker.get(event.request_id)
            return event.for_caller() if request is not None and self.viewer.can_see(request.tenant) else None
        return replace(event, request_id=self._shown_id(event.request_id))

    def _arrived(self, event: RequestArrived) -> RequestArrived:
        tenant = event.tenant if self.viewer.can_see(event.tenant) else ""
        leader_id = None if event.leader_id is None else self._shown_id(event.leader_id)
        shown_id = self._show(event.request_id, event.tenant)
        return replace(event, request_id=shown_id, tenant=tenant, leader_id=leader_id)

    def _step(self, step: Step) -> Step:
        fields: dict[str, Any] = {name: list(map(self._shown_id, getattr(step, name))) for name in STEP_LISTS}
        for name in STEP_MAPS:
            fields[name] = {self._shown_id(request_id): value for request_id, value in getattr(step, name).items()}
        displaced = {self._shown_id(request_id): self._shown_id(by) for request_id, by in step.displaced.items()}
        head_id = None if step.head_id is None else self._shown_id(step.head_id)
        return replace(step, **fields, displaced=displaced, head_id=head_id)

    def _shown_id(self, request_id: str) -> str:
        if (shown := self._shown_ids.get(request_id)) is not None:
            return shown
        request = self._tracker.get(request_id)
        if request is None:
            return self.viewer.hidden_id(request_id)
        return self._show(request_id, request.tenant)

    def _show(self, request_id: str, tenant: str) -> str:
        if len(self._shown_ids) >= MAX_KNOWN_IDS:
            self._shown_ids.clear()
        shown = self._shown_ids[request_id] = self.viewer.display_id(request_id, tenant)
        return shown
