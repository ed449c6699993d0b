"""The explanation of a request of a tracked engine."""

from __future__ import annotations

from chairlift.engine.explanation.explain import Explainer, Explanation, Viewer
from chairlift.engine.explanation.what_if import what_ifs
from support.tracked_engine import TrackedEngine


def explain(engine: TrackedEngine, request_id: str, viewer: Viewer | None = None) -> Explanation:
    request = engine.tracker.get(request_id)
    assert request is not None
    explainer = Explainer(engine.tracker)
    blocked = explainer.blocked_request(request)
    changes = [] if blocked is None else what_ifs(blocked)
    return explainer.explain(request, viewer or Viewer(), engine.clock.now(), changes)
