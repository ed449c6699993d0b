"""Events as a page with the key of one tenant sees them: requests of other tenants have opaque ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeVar

from chairlift.events import EngineStarted, Event, PrefixCacheChanged, RequestArrived, RequestRejected, Step
from chairlift.observability.explain import Viewer
from chairlift.observability.tracker import RequestTracker

MAX_KNOWN_IDS: Final = 8192

Value = TypeVar("Value")


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
        if self.viewer.is_admin or isinstance(event, EngineStarted):
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
        return replace(event, request_id=self._shown_id(event.request_id))

    def _arrived(self, event: RequestArrived) -> RequestArrived:
        tenant = event.tenant if self.viewer.can_see(event.tenant) else ""
        leader_id = None if event.leader_id is None else self._shown_id(event.leader_id)
        shown_id = self._show(event.request_id, event.tenant)
        return replace(event, request_id=shown_id, tenant=tenant, leader_id=leader_id)

    def _step(self, step: Step) -> Step:
        return replace(
            step,
            request_ids=self._shown(step.request_ids),
            admitted=self._shown(step.admitted),
            preempted=self._shown(step.preempted),
            displaced={self._shown_id(name): self._shown_id(by) for name, by in step.displaced.items()},
            swapped=self._shown(step.swapped),
            finished=self._shown(step.finished),
            new_blocks=self._with_shown_keys(step.new_blocks),
            released_blocks=self._with_shown_keys(step.released_blocks),
            num_matched=self._with_shown_keys(step.num_matched),
            head_id=None if step.head_id is None else self._shown_id(step.head_id),
        )

    def _with_shown_keys(self, values: dict[str, Value]) -> dict[str, Value]:
        return {self._shown_id(request_id): value for request_id, value in values.items()}

    def _shown(self, request_ids: list[str]) -> list[str]:
        return [self._shown_id(request_id) for request_id in request_ids]

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
