"""The endpoints /v1/messages and /v1/messages/count_tokens of Anthropic's API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from starlette.responses import JSONResponse

from chairlift.errors import ContextLengthError, RequestError
from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.request import FinishReason
from chairlift.server.api.answers import AnswerItem, ItemStreamWriter, parse_answer
from chairlift.server.api.endpoint import Endpoint, ErrorForm, serve_planned
from chairlift.server.api.engine_call import CallUsage, GeneratingCall, StreamWriter
from chairlift.server.preparation.conversation import ChatPlan, ModelPlanner
from chairlift.server.protocol.base import ErrorInfo
from chairlift.server.protocol.chunks import encode, to_event
from chairlift.server.protocol.messages import (
    CountTokensRequest,
    MessagesError,
    MessagesErrorInfo,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TokenCount,
)
from chairlift.server.protocol.tools import parse_arguments

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

    ping = to_event("ping")

    def response(self, outputs: list[RequestOutput]) -> MessagesResponse:
        (output,) = outputs[0].outputs
        answer = parse_answer(self.plan, output)
        reason, sequence = stop_reason(output, bool(answer.tool_calls))
        return MessagesResponse(
            id=self.id,
            model=self.model,
            content=[_block(item) for item in answer.items()],
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


def _block(item: AnswerItem) -> dict[str, Any]:
    """The content block of an item."""
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    if item.kind == "message":
        return {"type": "text", "text": item.text}
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": parse_arguments(item.text)}


DELTAS: Final = {
    "reasoning": ("thinking_delta", "thinking"),
    "message": ("text_delta", "text"),
    "function_call": ("input_json_delta", "partial_json"),
}
"""Kind of item -> the type of its deltas, and their field with text."""


class _MessagesStream(ItemStreamWriter):
    """Writes message_start, then blocks (start, deltas, stop), then message_delta and message_stop."""

    def opening(self) -> bytes:
        call, usage = self.call, messages_usage(self.call.usage)
        message = MessagesResponse(
            id=call.id, model=call.model, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        return to_event("message_start", message=message)

    def closing(self) -> bytes:
        assert self.last is not None
        events = self.end("completed")
        reason, sequence = stop_reason(self.last, any(item.kind == "function_call" for item in self.ended_items))
        ending = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": messages_usage(self.call.usage)}
        if self.call.body.timings and (timings := self.call.usage.timings()) is not None:
            ending["timings"] = timings
        return events + to_event("message_delta", **ending) + to_event("message_stop")

    def failure(self, status: int, info: ErrorInfo) -> bytes:
        return to_event("error", error=_error_info(status, info.message))

    def item_start(self, item: AnswerItem) -> bytes:
        return to_event("content_block_start", index=len(self.ended_items), content_block=_block(item))

    def item_delta(self, item: AnswerItem, text: str, positions: list[TokenLogprobs]) -> bytes:
        kind, name = DELTAS[item.kind]
        delta = {"type": kind, name: text}
        return to_event("content_block_delta", index=len(self.ended_items), delta=delta)

    def item_end(self, item: AnswerItem, status: str) -> bytes:
        return to_event("content_block_stop", index=len(self.ended_items))


def _error_info(status: int, message: str) -> MessagesErrorInfo:
    return MessagesErrorInfo(type=ERROR_TYPES.get(status, "api_error"), message=message)


def _error_response(status: int, info: ErrorInfo, headers: Mapping[str, str] | None) -> JSONResponse:
    error = _error_info(status, info.message)
    error.details = None if info.code is None else {"error_code": info.code}
    body = MessagesError(error=error)
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


def _plan(planner: ModelPlanner, body: MessagesRequest) -> ChatPlan:
    with _anthropic_context_errors():
        return planner.plan(body)


def _count_tokens(planner: ModelPlanner, body: CountTokensRequest) -> bytes:
    with _anthropic_context_errors():
        return encode(TokenCount(input_tokens=len(planner.prompt_token_ids(body))))


@contextlib.contextmanager
def _anthropic_context_errors() -> Iterator[None]:
    """Raise the error for a prompt that is too long with the message of Anthropic, by which clients recognize it."""
    try:
        yield
    except ContextLengthError as error:
        message = f"prompt is too long: {error.num_tokens} tokens > {error.maximum} maximum"
        raise RequestError(message, error.param, error.code) from None


ANTHROPIC_ERRORS: Final = ErrorForm(MessagesError, _error_response)

MESSAGES: Final = Endpoint(
    "/v1/messages",
    "create_message",
    "Generate the next message of a conversation (Anthropic).",
    MessagesRequest,
    MessagesResponse,
    _plan,
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
