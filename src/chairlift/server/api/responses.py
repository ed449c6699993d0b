"""The endpoint /v1/responses, whose requests are converted to chats and whose answers consist of items."""

from __future__ import annotations

import time
from typing import Any, Final

from pydantic_core import from_json

from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.request import FinishReason
from chairlift.server.api.answers import AnswerItem, ItemStreamWriter, parse_answer
from chairlift.server.api.endpoint import Endpoint
from chairlift.server.api.engine_call import GeneratingCall, StreamWriter
from chairlift.server.preparation.conversation import ChatPlan, ModelPlanner
from chairlift.server.protocol.base import ErrorInfo
from chairlift.server.protocol.chunks import to_event
from chairlift.server.protocol.response_tools import CUSTOM_ARGUMENT
from chairlift.server.protocol.responses import ResponseObject, ResponsesRequest, ResponsesUsage

ITEM_NAMES: Final = {
    "reasoning": ("rs", "response.reasoning_text"),
    "message": ("msg", "response.output_text"),
    "function_call": ("fc", "response.function_call_arguments"),
    "custom_tool_call": ("ctc", "response.custom_tool_call_input"),
}
"""Kind of item -> the beginning of its id, and of its events `.delta` and `.done`."""


class ResponsesCall(GeneratingCall[ResponsesRequest, ChatPlan]):
    """One call of /v1/responses."""

    def response(self, outputs: list[RequestOutput]) -> ResponseObject:
        (output,) = outputs[0].outputs
        answer = parse_answer(self.plan, output)
        items = answer.items() or [AnswerItem("message")]
        for item in items:
            self.resolve_call(item)
            if item.kind == "message":
                item.logprobs = list(map(self.logprob_writer().chat, output.logprobs or []))
        return self.finished(items, output)

    def writer(self) -> StreamWriter:
        return _ResponsesStream(self)

    def resolve_call(self, item: AnswerItem) -> None:
        """Replace the function of a call by the tool of the request of which it was made."""
        if item.kind == "function_call":
            tool = self.body.called_tool(item.name)
            item.name, item.namespace = tool.name, tool.namespace
            item.kind = "custom_tool_call" if tool.is_custom else "function_call"

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
                "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
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
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            tools=[tool.model_dump(exclude_none=True, by_alias=True) for tool in body.tools or []],
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
            input_tokens_details={"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            output_tokens=usage.completion_tokens,
            output_tokens_details={"reasoning_tokens": reasoning},
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


def _status(output: CompletionOutput) -> str:
    return "incomplete" if output.finish_reason == FinishReason.LENGTH else "completed"


def _id(item: AnswerItem) -> str:
    return f"{ITEM_NAMES[item.kind][0]}_{item.key}"


def _part(item: AnswerItem) -> dict[str, Any]:
    """The content part of a message or of reasoning."""
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": item.logprobs}


def _value(item: AnswerItem, status: str, *, is_empty: bool = False) -> dict[str, Any]:
    """An item as an entry of `output`."""
    if item.kind in ("function_call", "custom_tool_call"):
        namespace = {} if item.namespace is None else {"namespace": item.namespace}
        text = {"arguments": item.text} if item.kind == "function_call" else {"input": _custom_input(item.text)}
        call = {"call_id": item.call_id, "name": item.name, **namespace, **text}
        return {"id": _id(item), "type": item.kind, "status": status, **call}
    content = [] if is_empty else [_part(item)]
    if item.kind == "reasoning":
        summary = [] if is_empty else [_summary(item)]
        return {"id": _id(item), "type": "reasoning", "summary": summary, "content": content, "status": status}
    return {"id": _id(item), "type": "message", "role": "assistant", "status": status, "content": content}


def _summary(item: AnswerItem) -> dict[str, Any]:
    """The only part of the summary of reasoning, which is the whole text, because clients show only summaries."""
    return {"type": "summary_text", "text": item.text}


def _custom_input(arguments: str) -> str:
    """The input of a custom tool, also if the arguments of its function were cut."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = value.get(CUSTOM_ARGUMENT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


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

    def failure(self, status: int, info: ErrorInfo) -> bytes:
        failed = {"status": "failed", "error": {"code": "server_error", "message": info.message}}
        response = self.call.skeleton().model_copy(update=failed)
        event = self._event("error", code=info.type, message=info.message, param=info.param)
        return event + self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = to_event(kind, sequence_number=self._sequence_number, **fields)
        self._sequence_number += 1
        return event

    def item_start(self, item: AnswerItem) -> bytes:
        self.call.resolve_call(item)
        added = _value(item, "in_progress", is_empty=True)
        events = self._event("response.output_item.added", output_index=len(self.ended_items), item=added)
        if item.kind in ("reasoning", "message"):
            events += self._event("response.content_part.added", **self._place(item), part=_part(item))
        if item.kind == "reasoning":
            events += self._summary_event("part.added", item, part=_summary(item))
        return events

    def item_delta(self, item: AnswerItem, text: str, positions: list[TokenLogprobs]) -> bytes:
        if item.kind == "custom_tool_call":
            return b""  # The input is known at the end of its JSON string.
        logprobs = [self._logprobs.chat(position) for position in positions]
        item.logprobs += logprobs
        more = {"logprobs": _without_bytes(logprobs)} if item.kind == "message" else {}
        events = self._event(f"{ITEM_NAMES[item.kind][1]}.delta", **self._place(item), delta=text, **more)
        return events + (self._summary_event("text.delta", item, delta=text) if item.kind == "reasoning" else b"")

    def item_end(self, item: AnswerItem, status: str) -> bytes:
        name = f"{ITEM_NAMES[item.kind][1]}.done"
        if item.kind == "function_call":
            events = self._event(name, **self._place(item), arguments=item.text)
        elif item.kind == "custom_tool_call":
            text = _custom_input(item.text)
            events = self._event(f"{ITEM_NAMES[item.kind][1]}.delta", **self._place(item), delta=text)
            events += self._event(name, **self._place(item), input=text)
        else:
            more = {"logprobs": _without_bytes(item.logprobs)} if item.kind == "message" else {}
            events = self._event(name, **self._place(item), text=item.text, **more)
            events += self._event("response.content_part.done", **self._place(item), part=_part(item))
        if item.kind == "reasoning":
            events += self._summary_event("text.done", item, text=item.text)
            events += self._summary_event("part.done", item, part=_summary(item))
        index = len(self.ended_items)
        return events + self._event("response.output_item.done", output_index=index, item=_value(item, status))

    def _summary_event(self, name: str, item: AnswerItem, **fields: Any) -> bytes:
        place = {"item_id": _id(item), "output_index": len(self.ended_items), "summary_index": 0}
        return self._event(f"response.reasoning_summary_{name}", **place, **fields)

    def _place(self, item: AnswerItem) -> dict[str, Any]:
        place = {"item_id": _id(item), "output_index": len(self.ended_items)}
        return {**place, "content_index": 0} if item.kind in ("reasoning", "message") else place


def _without_bytes(value: Any) -> Any:
    """Logprobs in the form of events, which have no `bytes`."""
    if isinstance(value, list):
        return [_without_bytes(entry) for entry in value]
    return {n: _without_bytes(v) for n, v in value.items() if n != "bytes"} if isinstance(value, dict) else value


RESPONSES: Final = Endpoint(
    "/v1/responses",
    "create_response",
    "Generate a response to input items (OpenAI).",
    ResponsesRequest,
    ResponseObject,
    ModelPlanner.plan,
    ResponsesCall.serve,
    id_prefix="resp_",
)
