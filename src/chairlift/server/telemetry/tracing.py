"""OpenTelemetry spans of calls, with the extra `otel`. Names and attributes are those of the GenAI conventions.

chat smollm2-135m-instruct            the call; continues the trace of the client (W3C traceparent)
  sequence                            one of its answers, with the replica; another one for each replica that was lost
    wait: memory                      a span of its waits, by reason
    prefill
    decode
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from chairlift.server.access.call import Call
from chairlift.server.telemetry.engine_observer import ObservedRequest

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""`gen_ai.operation.name` by path. Calls of other paths are named by method and path."""

LOST_STATUS: Final = "the engine ended before the request"
RESENT_STATUS: Final = "the engine ended before the request, which was sent to another replica"


class CallTracer:
    """Creates the spans of each call that has ended and reached the engine. Their resource names this process. The
    exporter receives them in batches, on a separate thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._propagator = TraceContextTextMapPropagator()
        process: dict[str, str | int] = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
        self._provider = TracerProvider(resource=Resource.create({"service.name": "chairlift", **process}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("chairlift")

    def __call__(self, call: Call, sequences: list[ObservedRequest]) -> None:
        """Create and export the spans of a call."""
        if call.id is None:
            return
        parent = self._propagator.extract(call.headers)
        start = int(call.time * 1e9)
        attributes: dict[str, Any] = {
            "http.request.method": call.method,
            "http.response.status_code": call.status,
            "url.path": call.path,
            "gen_ai.request.id": call.id,
        }
        name = f"{call.method} {call.path}"
        if (operation := OPERATIONS.get(call.path)) is not None:
            name = f"{operation} {call.model}"
            attributes |= {"gen_ai.operation.name": operation} | _call_attributes(call, sequences)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=start)
        if call.status >= 500:
            span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span, parent)
        for sequence in sequences:
            self._trace_sequence(sequence, call.finish_reason, inside)
        span.end(start + int(call.seconds * 1e9))

    def _trace_sequence(self, sequence: ObservedRequest, finish_reason: str | None, parent: Context) -> None:
        request, observer = sequence.request, sequence.observer
        now = observer.now()
        shift = time.time() - now
        ended = request.last_token if request.end_time is None else request.end_time
        end = now if ended is None else ended

        def nanoseconds(engine_time: float) -> int:
            return int((engine_time + shift) * 1e9)

        def trace_part(name: str, start: float, end: float, attributes: dict[str, Any] | None = None) -> None:
            part = self._tracer.start_span(name, inside, attributes=attributes, start_time=nanoseconds(start))
            part.end(nanoseconds(end))

        attributes = _attributes(sequence, finish_reason, end)
        start = nanoseconds(request.arrived.time)
        span = self._tracer.start_span("sequence", parent, attributes=attributes, start_time=start)
        if sequence.is_lost:
            span.set_status(StatusCode.ERROR, RESENT_STATUS if sequence.is_resent else LOST_STATUS)
        inside = set_span_in_context(span, parent)
        for spans in observer.tracker.spans(request, end):
            for wait in spans:
                trace_part(f"wait: {wait.reason}", wait.start, wait.end, {"steps": wait.num_steps})
        if request.first_scheduled is not None and request.first_token is not None:
            trace_part("prefill", request.first_scheduled, request.first_token)
            trace_part("decode", request.first_token, end)
        span.end(nanoseconds(end))

    def close(self) -> None:
        """Export the remaining spans and stop the exporter."""
        self._provider.shutdown()


def _call_attributes(call: Call, sequences: list[ObservedRequest]) -> dict[str, Any]:
    requests = [sequence.request for sequence in sequences if not sequence.is_lost]
    prompts = [request for request in requests if request.arrived.leader_id is None]
    return {
        "gen_ai.provider.name": "chairlift",
        "gen_ai.request.model": call.model,
        "gen_ai.usage.input_tokens": sum(request.arrived.num_prompt_tokens for request in prompts),
        "gen_ai.usage.output_tokens": sum(request.num_output_tokens for request in requests),
        "gen_ai.usage.cache_read.input_tokens": sum(request.num_cached_tokens for request in prompts),
    }


def _attributes(sequence: ObservedRequest, finish_reason: str | None, end: float) -> dict[str, Any]:
    request, arrived = sequence.request, sequence.request.arrived
    if sequence.is_lost:
        finish_reason = None
    elif request.finished is not None:
        finish_reason = request.finished.finish_reason
    attributes: dict[str, Any] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": arrived.max_tokens,
        "gen_ai.usage.input_tokens": arrived.num_prompt_tokens,
        "gen_ai.usage.output_tokens": request.num_output_tokens,
        "gen_ai.latency.e2e": end - arrived.time,
        "chairlift.cached_tokens": request.num_cached_tokens,
        "chairlift.preemptions": request.num_preemptions,
        "chairlift.replica": sequence.observer.replica_id,
        "error.type": "engine_lost" if sequence.is_lost else None,
        "gen_ai.response.finish_reasons": None if finish_reason is None else [finish_reason],
        "gen_ai.latency.time_in_queue": request.queue_time,
        "gen_ai.latency.time_to_first_token": request.time_to_first_token,
    }
    return {name: value for name, value in attributes.items() if value is not None}
