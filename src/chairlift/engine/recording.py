"""Joins the trace recorder with the engine: prompts are known when a request is added, lengths when it ends."""

from __future__ import annotations

from chairlift.events import Event, RequestFinished
from chairlift.request import Request
from chairlift.workload.recorder import TraceRecorder


class EngineRecorder:
    """Feeds a TraceRecorder from an engine core: `on_add` is called with its requests, `emit` with its events."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def on_add(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        max_tokens = request.max_total_tokens - request.num_prompt_tokens
        self._recorder.arrived(request.request_id, prompt, max_tokens, request.arrival_time, request.priority)

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestFinished):
            self._recorder.finished(event.request_id, event.num_output_tokens, event.time)

    def close(self) -> None:
        self._recorder.close()
