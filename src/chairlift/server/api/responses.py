"""The endpoint /v1/responses, whose requests are converted to chats and whose answers consist of items."""

from __future__ import annotations

import time
from typing import Any, Final

from chairlift.errors import ChairliftError
from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.request import FinishReason
from chairlift.server.api.answers import AnswerItem, ItemStreamWriter, parse_answer, plan_conversation
from chairlift.server.api.endpoint import Endpoint
from chairlift.server.api.engine_call import GeneratingCall, StreamWriter
from chairlift.server.api.stream_chunks import to_event
from chairlift.server.http.error_responses import error_body
from chairlift.server.preparation.conversation import ChatPlan
from chairlift.server.protocol.chunks import ResponsesEvent
from chairlift.server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
)

ID_PREFIXES: Final = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
"""Kind of item -> the beginning of its id."""

DELTAS: Final = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}
"""Kind of item -> the prefix of its events `.delta` and `.done`."""


class ResponsesCall(GeneratingCall[ResponsesRequest, ChatPlan]):
    """One call of /v1/responses."""

    def response(self, outputs: list[RequestOutput]) -> ResponseObject:
        (output,) = outputs[0].outputs
        answer = parse_answer(self.plan, output)
        items = answer.items() or [AnswerItem("message")]
        for item in items:
            if item.kind == "message":
                item.logprobs = list(map(self.logprob_writer().chat, output.logprobs or []))
        return self.finished(items, output)

    def writer(self) -> StreamWriter:
        return _ResponsesStream(self)

    def finished(self, items: list[AnswerItem], output: CompletionOutput) -> ResponseObject:
        """The response at the end of the call."""
        status = _status(output)
        values = [_value(item, "completed") for item in items]
        if values and status == "incomplete":
            values[-1] = _value(items[-1], status)
        response = self.skeleton()
        return response.model_copy(
            update={
                "status": status,
                "completed_at": int(time.time()) if status == "completed" else None,
                "incomplete_details": None if status == "completed" else IncompleteDetails(reason="max_output_tokens"),
                "output": values,
                "usage": self._usage(items),
                "timings": self.usage.timings() if self.body.timings else None,
            }
        )

    def skeleton(self) -> ResponseObject:
        """The response at the beginning of a call, without output."""
        body = self.body
        choice = body.tool_choice or ("auto" if body.tools else "none")
        effort = None if body.reasoning is None else body.reasoning.effort
        text: dict[str, Any] = {"format": {"type": "text"}}
        if body.text is not None and body.text.format is not None:
            text = {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
        return ResponseObject(
            id=self.id,
            created_at=self.created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": effort, "summary": None},
            temperature=self.plan.params.temperature,
            text=text,
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in body.tools or []],
            top_logprobs=body.top_logprobs or 0,
            max_tool_calls=body.max_tool_calls,
            prompt_cache_key=body.prompt_cache_key,
            prompt_cache_retention=body.prompt_cache_retention,
            safety_identifier=body.safety_identifier,
            top_p=self.plan.params.top_p,
            user=body.user,
        )

    def _usage(self, items: list[AnswerItem]) -> ResponsesUsage:
        usage = self.usage
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


def _id(item: AnswerItem) -> str:
    return f"{ID_PREFIXES[item.kind]}_{item.key}"


def _part(item: AnswerItem) -> dict[str, Any]:
    """The content part of a message or of reasoning."""
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": item.logprobs}


def _value(item: AnswerItem, status: str, *, is_empty: bool = False) -> dict[str, Any]:
    """An item as an entry of `output`."""
    if item.kind == "function_call":
        call = {"call_id": item.call_id, "name": item.name, "arguments": item.text}
        return {"id": _id(item), "type": "function_call", "status": status, **call}
    content = [] if is_empty else [_part(item)]
    if item.kind == "reasoning":
        return {"id": _id(item), "type": "reasoning", "summary": [], "content": content, "status": status}
    return {"id": _id(item), "type": "message", "role": "assistant", "status": status, "content": content}


class _ResponsesStream(ItemStreamWriter):
    """Writes the events of one response, whose items follow each other."""

    call: ResponsesCall

    def __init__(self, call: ResponsesCall) -> None:
        super().__init__(call)
        self._logprobs = call.logprob_writer()
        self._sequence_number = 0

    def opening(self) -> bytes:
        response = self.call.skeleton()
        return b"".join(self._event(kind, response=response) for kind in ("response.created", "response.in_progress"))

    def closing(self) -> bytes:
        assert self.last is not None
        events = b""
        if self.open_item is None and not self.ended_items:
            events = self.start(AnswerItem("message"))
        events += self.end(_status(self.last))
        response = self.call.finished(self.ended_items, self.last)
        return events + self._event(f"response.{response.status}", response=response)

    def failure(self, error: ChairliftError) -> bytes:
        _, body = error_body(error)
        failed = {"status": "failed", "error": ResponseError(message=str(error))}
        response = self.call.skeleton().model_copy(update=failed)
        event = self._event("error", code=body.error.type, message=str(error), param=body.error.param)
        return event + self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = ResponsesEvent(kind, self._sequence_number, **fields)
        self._sequence_number += 1
        return to_event(event)

    def item_start(self, item: AnswerItem) -> bytes:
        added = _value(item, "in_progress", is_empty=True)
        events = self._event("response.output_item.added", output_index=len(self.ended_items), item=added)
        if item.kind != "function_call":
            events += self._event("response.content_part.added", **self._place(item), part=_part(item))
        return events

    def item_delta(self, item: AnswerItem, text: str, positions: list[TokenLogprobs]) -> bytes:
        logprobs = [self._logprobs.chat(position) for position in positions]
        item.logprobs += logprobs
        more = {"logprobs": _without_bytes(logprobs)} if item.kind == "message" else {}
        return self._event(f"{DELTAS[item.kind]}.delta", **self._place(item), delta=text, **more)

    def item_end(self, item: AnswerItem, status: str) -> bytes:
        name = f"{DELTAS[item.kind]}.done"
        if item.kind == "function_call":
            events = self._event(name, **self._place(item), arguments=item.text)
        else:
            more = {"logprobs": _without_bytes(item.logprobs)} if item.kind == "message" else {}
            events = self._event(name, **self._place(item), text=item.text, **more)
            events += self._event("response.content_part.done", **self._place(item), part=_part(item))
        index = len(self.ended_items)
        return events + self._event("response.output_item.done", output_index=index, item=_value(item, status))

    def _place(self, item: AnswerItem) -> dict[str, Any]:
        place = {"item_id": _id(item), "output_index": len(self.ended_items)}
        return place if item.kind == "function_call" else {**place, "content_index": 0}


def _without_bytes(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Logprobs in the form of events, which have no `bytes`."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]],
        }
        for entry in entries
    ]


RESPONSES: Final = Endpoint(
    "/v1/responses",
    "create_response",
    "Generate a response to input items (OpenAI).",
    ResponsesRequest,
    ResponseObject,
    plan_conversation,
    ResponsesCall.serve,
    id_prefix="resp_",
)
