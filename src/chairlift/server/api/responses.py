"""The endpoint /v1/responses, whose requests are converted to chats and whose answers consist of items."""

from __future__ import annotations

import time
from typing import Any

from chairlift.errors import ChairliftError
from chairlift.outputs import CompletionOutput, RequestOutput
from chairlift.request import FinishReason
from chairlift.server.api.chat import ParsedAnswer, parse_answer
from chairlift.server.api.conversation import ChatPlan
from chairlift.server.api.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
)
from chairlift.server.api.response_items import ItemEventWriter, OutputItem, new_item_id
from chairlift.server.api.serving import ApiCall, Serving, StreamWriter
from chairlift.server.http.error_responses import error_body
from chairlift.server.tools.answer_parser import DeltaMessage

ResponsesCall = ApiCall[ResponsesRequest, ChatPlan]


class ResponsesServing(Serving[ResponsesRequest, ChatPlan]):
    """Answers /v1/responses."""

    id_prefix = "resp_"

    def response(self, call: ResponsesCall, outputs: list[RequestOutput]) -> ResponseObject:
        (output,) = outputs[0].outputs
        answer = parse_answer(call.plan, output.text)
        entries = self.logprob_writer().chat(output.logprobs or [])
        items = _items(answer, entries if call.body.include_logprobs else [])
        return self.finished(call, items, output)

    def writer(self, call: ResponsesCall) -> StreamWriter:
        return _ResponsesStream(self, call)

    def finished(self, call: ResponsesCall, items: list[OutputItem], output: CompletionOutput) -> ResponseObject:
        """The response at the end of a call."""
        status = _status(output)
        values = [item.value("completed") for item in items]
        if values and status == "incomplete":
            values[-1] = items[-1].value(status)
        response = self.skeleton(call)
        return response.model_copy(
            update={
                "status": status,
                "completed_at": int(time.time()) if status == "completed" else None,
                "incomplete_details": None if status == "completed" else IncompleteDetails(reason="max_output_tokens"),
                "output": values,
                "usage": self._usage(call, items),
                "timings": call.usage.timings() if call.body.timings else None,
            }
        )

    def skeleton(self, call: ResponsesCall) -> ResponseObject:
        """The response at the beginning of a call, without output."""
        body = call.body
        choice = body.tool_choice or ("auto" if body.tools else "none")
        effort = None if body.reasoning is None else body.reasoning.effort
        text: dict[str, Any] = {"format": {"type": "text"}}
        if body.text is not None and body.text.format is not None:
            text = {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
        return ResponseObject(
            id=call.id,
            created_at=call.created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=call.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": effort, "summary": None},
            temperature=call.plan.params.temperature,
            text=text,
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in body.tools or []],
            top_logprobs=body.top_logprobs or 0,
            top_p=call.plan.params.top_p,
            user=body.user,
        )

    def _usage(self, call: ResponsesCall, items: list[OutputItem]) -> ResponsesUsage:
        usage = call.usage
        reasoning = sum(self.num_tokens(item.text) for item in items if item.kind == "reasoning")
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


def _status(output: CompletionOutput) -> str:
    return "incomplete" if output.finish_reason == FinishReason.LENGTH else "completed"


def _items(answer: ParsedAnswer, logprobs: list[dict[str, Any]]) -> list[OutputItem]:
    items = []
    if answer.reasoning:
        items.append(OutputItem("reasoning", new_item_id("rs"), text=answer.reasoning))
    if answer.content or not (answer.reasoning or answer.tool_calls):
        items.append(OutputItem("message", new_item_id("msg"), text=answer.content, logprobs=logprobs))
    for call in answer.tool_calls:
        function = call.function
        items.append(OutputItem("function_call", new_item_id("fc"), call.id, function.name, function.arguments))
    return items


class _ResponsesStream(StreamWriter):
    """Writes the events of one response."""

    def __init__(self, serving: ResponsesServing, call: ResponsesCall) -> None:
        self._serving = serving
        self._call = call
        self._events = ItemEventWriter()
        self._parser = call.plan.make_parser()
        self._logprobs = serving.logprob_writer()
        self._last: CompletionOutput | None = None

    def opening(self) -> bytes:
        response = self._serving.skeleton(self._call).model_dump()
        return b"".join(
            self._events.event(kind, response=response) for kind in ("response.created", "response.in_progress")
        )

    def delta(self, index: int, output: RequestOutput) -> bytes:
        (answer,) = output.outputs
        logprobs = self._logprobs.chat(answer.logprobs or []) if self._call.body.include_logprobs else []
        events = self._write(self._parser.feed(answer.text), logprobs)
        if answer.finish_reason is not None:
            self._last = answer
            events += self._write(self._parser.finish(), [])
        return events

    def closing(self) -> bytes:
        assert self._last is not None
        events = b""
        if self._events.open is None and not self._events.done:
            events = self._events.start(OutputItem("message", new_item_id("msg")))
        events += self._events.end(_status(self._last))
        response = self._serving.finished(self._call, self._events.done, self._last)
        return events + self._events.event(f"response.{response.status}", response=response.model_dump())

    def failure(self, error: ChairliftError) -> bytes:
        _, body = error_body(error)
        failed = {"status": "failed", "error": ResponseError(message=str(error))}
        response = self._serving.skeleton(self._call).model_copy(update=failed).model_dump()
        event = self._events.event("error", code=body.error.type, message=str(error), param=body.error.param)
        return event + self._events.event("response.failed", response=response)

    def _write(self, piece: DeltaMessage, logprobs: list[dict[str, Any]]) -> bytes:
        events = b""
        if piece.reasoning:
            events += self._append("reasoning", "rs", piece.reasoning, [])
        if piece.content or (logprobs and not piece.tool_calls and self._is_message_open()):
            events += self._append("message", "msg", piece.content, logprobs)
        for call in piece.tool_calls:
            if call.id is not None:
                events += self._events.start(OutputItem("function_call", new_item_id("fc"), call.id, call.name or ""))
            if call.arguments:
                events += self._events.delta(call.arguments, [])
        return events

    def _is_message_open(self) -> bool:
        return self._events.open is not None and self._events.open.kind == "message"

    def _append(self, kind: str, prefix: str, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        is_open = self._events.open is not None and self._events.open.kind == kind
        events = b"" if is_open else self._events.start(OutputItem(kind, new_item_id(prefix)))
        return events + self._events.delta(text, logprobs)
