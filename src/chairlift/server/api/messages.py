"""The endpoints /v1/messages and /v1/messages/count_tokens of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import JSONResponse

from chairlift.errors import ChairliftError
from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.request import FinishReason
from chairlift.server.api.call_usage import CallUsage
from chairlift.server.api.chat import ParsedAnswer, PartStreamWriter, parse_answer, plan_conversation
from chairlift.server.api.endpoint import Endpoint, ErrorForm, serve_planned
from chairlift.server.api.engine_call import GeneratingCall, StreamWriter
from chairlift.server.api.stream_chunks import encode, to_named_event
from chairlift.server.http.error_responses import error_body
from chairlift.server.preparation.conversation import ChatPlan
from chairlift.server.preparation.planners import PlanningModel
from chairlift.server.protocol.base import ErrorInfo
from chairlift.server.protocol.messages import (
    CountTokensRequest,
    MessagesError,
    MessagesErrorInfo,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TokenCount,
)
from chairlift.server.tools.answer_parser import DeltaToolCall

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status -> the error type of Anthropic; the type of other statuses is `api_error`."""


class MessagesCall(GeneratingCall[MessagesRequest, ChatPlan]):
    """One call of /v1/messages."""

    def response(self, outputs: list[RequestOutput]) -> MessagesResponse:
        (output,) = outputs[0].outputs
        answer = parse_answer(self.plan, output.text)
        reason, sequence = stop_reason(output, bool(answer.tool_calls))
        return MessagesResponse(
            id=self.id,
            model=self.model,
            content=_blocks(answer),
            stop_reason=reason,
            stop_sequence=sequence,
            usage=messages_usage(self.usage),
            timings=self.usage.timings() if self.body.timings else None,
        )

    def writer(self) -> StreamWriter:
        return _MessagesStream(self)


def stop_reason(output: CompletionOutput, has_calls: bool) -> tuple[str, str | None]:
    """The `stop_reason` of an answer, and the stop sequence that ended it, if any."""
    if output.finish_reason == FinishReason.LENGTH:
        return "max_tokens", None
    if has_calls:
        return "tool_use", None
    if isinstance(output.stop_reason, str):
        return "stop_sequence", output.stop_reason
    return "end_turn", None


def messages_usage(usage: CallUsage) -> MessagesUsage:
    """The token counts in the form of Anthropic."""
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _blocks(answer: ParsedAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content, "citations": None})
    for call in answer.tool_calls:
        arguments = _parse_arguments(call.function.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments})
    return blocks


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """The arguments as an object. Text that is not a JSON object is returned as `INVALID_JSON`, as at Anthropic."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


class _MessagesStream(PartStreamWriter):
    """Writes message_start, then blocks (start, deltas, stop), then message_delta and message_stop."""

    def __init__(self, call: MessagesCall) -> None:
        super().__init__(call)
        self._call = call
        self._open: str | None = None
        self._num_blocks = 0
        self._has_calls = False

    def opening(self) -> bytes:
        call, usage = self._call, messages_usage(self._call.usage)
        message = MessagesResponse(
            id=call.id, model=call.model, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        return _event("message_start", message=message)

    def closing(self) -> bytes:
        assert self.last is not None
        reason, sequence = stop_reason(self.last, self._has_calls)
        extra: dict[str, Any] = {}
        if self._call.body.timings and (timings := self._call.usage.timings()) is not None:
            extra["timings"] = timings
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = messages_usage(self._call.usage)
        return self._stop() + _event("message_delta", delta=delta, usage=usage, **extra) + _event("message_stop")

    def failure(self, error: ChairliftError) -> bytes:
        return _event("error", error=_error_info(error_body(error)[0], str(error)))

    def reasoning(self, text: str) -> bytes:
        return self._append_text("thinking", text, signature="")

    def content(self, text: str, positions: list[TokenLogprobs]) -> bytes:
        return self._append_text("text", text, citations=None) if text else b""

    def tool_call(self, call: DeltaToolCall) -> bytes:
        self._has_calls = True
        events = b""
        if call.id is not None:
            events = self._start("tool_use", id=call.id, name=call.name, input={})
        return events + self._delta("input_json", partial_json=call.arguments) if call.arguments else events

    def _append_text(self, kind: str, text: str, **fields: Any) -> bytes:
        start = b"" if self._open == kind else self._start(kind, **{kind: ""}, **fields)
        return start + self._delta(kind, **{kind: text})

    def _start(self, kind: str, **fields: Any) -> bytes:
        stopped = self._stop()
        self._open = kind
        block = {"type": kind, **fields}
        return stopped + _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        delta = {"type": f"{kind}_delta", **fields}
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return to_named_event(kind, encode({"type": kind, **fields}))


def _error_info(status: int, message: str) -> MessagesErrorInfo:
    return MessagesErrorInfo(type=ERROR_TYPES.get(status, "api_error"), message=message)


def _error_response(status: int, info: ErrorInfo, headers: Mapping[str, str] | None) -> JSONResponse:
    body = MessagesError(error=_error_info(status, info.message))
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


def _count_tokens(model: PlanningModel, body: CountTokensRequest) -> bytes:
    return encode(TokenCount(input_tokens=len(model.conversations.prompt_token_ids(body))))


ANTHROPIC_ERRORS: Final = ErrorForm(MessagesError, _error_response)

MESSAGES: Final = Endpoint(
    "/v1/messages",
    "create_message",
    "Generate the next message of a conversation (Anthropic).",
    MessagesRequest,
    MessagesResponse,
    plan_conversation,
    MessagesCall.serve,
    id_prefix="msg_",
    errors=ANTHROPIC_ERRORS,
)
COUNT_TOKENS: Final = Endpoint(
    "/v1/messages/count_tokens",
    "count_tokens",
    "Count the prompt tokens of a conversation (Anthropic).",
    CountTokensRequest,
    TokenCount,
    _count_tokens,
    serve_planned,
    errors=ANTHROPIC_ERRORS,
)
