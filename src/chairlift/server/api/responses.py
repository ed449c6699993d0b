"""The endpoint /v1/responses, whose requests are converted to chats and whose answers consist of items."""

from __future__ import annotations

import time
from typing import Any, Final, Literal

from pydantic_core import from_json

from chairlift.outputs import TokenLogprobs
from chairlift.request import FinishReason
from chairlift.server.api.endpoint import endpoint
from chairlift.server.api.item_call import AnswerItem, ItemCall
from chairlift.server.api.logprobs import LogprobWriter
from chairlift.server.preparation.conversation import ChatPlan, ModelPlanner
from chairlift.server.protocol.base import ErrorInfo
from chairlift.server.protocol.encoding import to_event
from chairlift.server.protocol.response_tools import CUSTOM_ARGUMENT
from chairlift.server.protocol.responses import InputTokensDetails, ResponseObject, ResponsesRequest, ResponsesUsage

ITEM_NAMES: Final = {
    "reasoning": ("rs", "response.reasoning_text"),
    "message": ("msg", "response.output_text"),
    "function_call": ("fc", "response.function_call_arguments"),
    "custom_tool_call": ("ctc", "response.custom_tool_call_input"),
}
"""Kind of item -> the beginning of its id, and of its events `.delta` and `.done`."""


ECHOED: Final = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
    "prompt_cache_retention", "safety_identifier", "user",
)  # fmt: skip
"""Fields of the request that the response repeats."""


class ResponsesCall(ItemCall[ResponsesRequest]):
    """One call of /v1/responses. The events of its items follow each other."""

    id_prefix = "resp_"

    def __init__(self, *context: Any) -> None:
        super().__init__(*context)
        self._logprobs = LogprobWriter(self.llm.engine.tokenizer)
        self._sequence_number = 0

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return b"".join(self._event(kind, response=response) for kind in ("response.created", "response.in_progress"))

    def closing(self) -> bytes:
        events = self.end_answer()
        response = self.finished()
        return events + self._event(f"response.{response.status}", response=response)

    def failure(self, status: int, info: ErrorInfo) -> bytes:
        error = {"code": "server_error", "message": info.message}
        event = self._event("error", code=info.type, message=info.message, param=info.param)
        return event + self._event("response.failed", response=self._response("failed", error=error))

    def end_answer(self) -> bytes:
        events = b""
        if self.open_item is None and not self.ended_items:
            events = self.start(AnswerItem("message"))
            if positions := self.last.logprobs:
                events += self.extend("", positions)
        return events + self.end(self._status)

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self.last.finish_reason == FinishReason.LENGTH else "completed"

    def finished(self) -> ResponseObject:
        is_complete, output = self._status == "completed", list(map(_value, self.ended_items))
        self.body.keep(self.id, output)
        return self._response(
            self._status,
            completed_at=int(time.time()) if is_complete else None,
            incomplete_details=None if is_complete else {"reason": "max_output_tokens"},
            output=output,
            usage=self._usage(),
            timings=self.timings(),
        )

    def _response(self, state: str, **fields: Any) -> ResponseObject:
        """The response in a state of the call, without output unless `fields` have it."""
        body, text = self.body, {"format": {"type": "text"}}
        choice = body.tool_choice or ("auto" if body.tools else "none")
        if body.text is not None and body.text.format is not None:
            text = {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
        common = {
            "status": state,
            "output": [],
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "temperature": self.plan.params.temperature,
            "text": text,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump(exclude_none=True, by_alias=True) for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.plan.params.top_p,
            **{name: getattr(body, name) for name in ECHOED},
        }
        return ResponseObject(id=self.id, created_at=self.created, model=self.model, **common | fields)

    def _usage(self) -> ResponsesUsage:
        usage = self.usage
        reasoning = sum(self.num_tokens(item.text) for item in self.ended_items if item.kind == "reasoning")
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(**dict(usage.usage().prompt_tokens_details)),
            output_tokens=usage.completion_tokens,
            output_tokens_details={"reasoning_tokens": reasoning},
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )

    def item_start(self, item: AnswerItem) -> bytes:
        if item.kind == "function_call":
            tool = self.body.called_tool(item.name)
            item.name, item.namespace = tool.name, tool.namespace
            item.kind = "custom_tool_call" if tool.is_custom else "function_call"
        events = self._event("response.output_item.added", output_index=len(self.ended_items), item=_value(item))
        if item.kind in ("reasoning", "message"):
            events += self._item_event("response.content_part.added", item, part=_part(item))
        if item.kind == "reasoning":
            events += self._summary_event("part.added", item, part=_summary(item))
        return events

    def item_delta(self, item: AnswerItem, text: str, positions: list[TokenLogprobs]) -> bytes:
        if item.kind == "custom_tool_call":
            return b""  # The input is known at the end of its JSON string.
        logprobs = list(map(self._logprobs.chat, positions))
        item.logprobs += logprobs
        more = {"logprobs": _without_bytes(logprobs)} if item.kind == "message" else {}
        events = self._item_event(f"{ITEM_NAMES[item.kind][1]}.delta", item, delta=text, **more)
        return events + (self._summary_event("text.delta", item, delta=text) if item.kind == "reasoning" else b"")

    def item_end(self, item: AnswerItem) -> bytes:
        name = ITEM_NAMES[item.kind][1]
        if item.kind == "function_call":
            events = self._item_event(f"{name}.done", item, arguments=item.text)
        elif item.kind == "custom_tool_call":
            text = _custom_input(item.text)
            events = self._item_event(f"{name}.delta", item, delta=text)
            events += self._item_event(f"{name}.done", item, input=text)
        else:
            more = {"logprobs": _without_bytes(item.logprobs)} if item.kind == "message" else {}
            events = self._item_event(f"{name}.done", item, text=item.text, **more)
            events += self._item_event("response.content_part.done", item, part=_part(item))
        if item.kind == "reasoning":
            events += self._summary_event("text.done", item, text=item.text)
            events += self._summary_event("part.done", item, part=_summary(item))
        return events + self._event("response.output_item.done", output_index=len(self.ended_items), item=_value(item))

    def _item_event(self, kind: str, item: AnswerItem, **fields: Any) -> bytes:
        place = {"item_id": _id(item), "output_index": len(self.ended_items)}
        if item.kind in ("reasoning", "message"):
            place["content_index"] = 0
        return self._event(kind, **place, **fields)

    def _summary_event(self, name: str, item: AnswerItem, **fields: Any) -> bytes:
        place = {"item_id": _id(item), "output_index": len(self.ended_items), "summary_index": 0}
        return self._event(f"response.reasoning_summary_{name}", **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self.body.stream:
            return b""
        event = to_event(kind, sequence_number=self._sequence_number, **fields)
        self._sequence_number += 1
        return event


def _id(item: AnswerItem) -> str:
    return f"{ITEM_NAMES[item.kind][0]}_{item.key}"


def _value(item: AnswerItem) -> dict[str, Any]:
    """An item as an entry of `output`. One in progress has no content yet."""
    is_empty = item.status == "in_progress"
    if item.kind in ("function_call", "custom_tool_call"):
        namespace = {} if item.namespace is None else {"namespace": item.namespace}
        text = {"arguments": item.text} if item.kind == "function_call" else {"input": _custom_input(item.text)}
        call = {"call_id": item.call_id, "name": item.name, **namespace, **text}
        return {"id": _id(item), "type": item.kind, "status": item.status, **call}
    content = [] if is_empty else [_part(item)]
    if item.kind == "reasoning":
        summary = [] if is_empty else [_summary(item)]
        return {"id": _id(item), "type": "reasoning", "summary": summary, "content": content, "status": item.status}
    return {"id": _id(item), "type": "message", "role": "assistant", "status": item.status, "content": content}


def _part(item: AnswerItem) -> dict[str, Any]:
    """The content part of a message or of reasoning."""
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": item.logprobs}


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


def _without_bytes(value: Any) -> Any:
    """Logprobs in the form of events, which have no `bytes`."""
    if isinstance(value, list):
        return [_without_bytes(entry) for entry in value]
    return {n: _without_bytes(v) for n, v in value.items() if n != "bytes"} if isinstance(value, dict) else value


@endpoint("/v1/responses", ResponseObject, ResponsesCall)
def create_response(planner: ModelPlanner, body: ResponsesRequest) -> ChatPlan:
    """Generate a response to input items (OpenAI)."""
    return planner.plan(body)
