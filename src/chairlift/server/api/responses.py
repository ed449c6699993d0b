"""The endpoint /v1/responses, whose requests are converted to chats and whose answers consist of items."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from chairlift.errors import ChairliftError
from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.request import FinishReason
from chairlift.server.api.chat import ParsedAnswer, PartStreamWriter, parse_answer, plan_conversation
from chairlift.server.api.endpoint import Endpoint
from chairlift.server.api.engine_call import GeneratingCall, StreamWriter
from chairlift.server.api.stream_chunks import encode, to_named_event
from chairlift.server.http.error_responses import error_body
from chairlift.server.preparation.conversation import ChatPlan
from chairlift.server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
)
from chairlift.server.tools.answer_parser import DeltaToolCall


def new_item_id(kind: str) -> str:
    """A random id with the prefix `msg`, `fc` or `rs`."""
    return f"{kind}_{uuid.uuid4().hex}"


@dataclass(slots=True)
class OutputItem:
    """An output item while it is generated: reasoning, a message or a function call.

    Attributes:
        text: the text so far; for a function call its arguments.
        logprobs: the logprobs of a message, if the request includes them.
    """

    kind: str
    id: str
    call_id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        """The content part of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def value(self, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        """The item as an entry of `output`."""
        if self.kind == "function_call":
            call = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            return {"id": self.id, "type": "function_call", "status": status, **call}
        content = [] if is_empty else [self.part()]
        if self.kind == "reasoning":
            return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


DELTAS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}
"""Kind of item -> the prefix of its events `.delta` and `.done`."""


class ResponsesCall(GeneratingCall[ResponsesRequest, ChatPlan]):
    """One call of /v1/responses."""

    def response(self, outputs: list[RequestOutput]) -> ResponseObject:
        (output,) = outputs[0].outputs
        answer = parse_answer(self.plan, output.text)
        positions = output.logprobs if self.body.include_logprobs else None
        items = _items(answer, list(map(self.logprob_writer().chat, positions or [])))
        return self.finished(items, output)

    def writer(self) -> StreamWriter:
        return _ResponsesStream(self)

    def finished(self, items: list[OutputItem], output: CompletionOutput) -> ResponseObject:
        """The response at the end of the call."""
        status = _status(output)
        values = [item.value("completed") for item in items]
        if values and status == "incomplete":
            values[-1] = items[-1].value(status)
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

    def _usage(self, items: list[OutputItem]) -> ResponsesUsage:
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


class _ResponsesStream(PartStreamWriter):
    """Writes the events of one response, whose items follow each other."""

    def __init__(self, call: ResponsesCall) -> None:
        super().__init__(call)
        self._call = call
        self._logprobs = call.logprob_writer()
        self._done: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._sequence_number = 0

    def opening(self) -> bytes:
        response = self._call.skeleton()
        return b"".join(self._event(kind, response=response) for kind in ("response.created", "response.in_progress"))

    def closing(self) -> bytes:
        assert self.last is not None
        events = b""
        if self._open is None and not self._done:
            events = self._start(OutputItem("message", new_item_id("msg")))
        events += self._end(_status(self.last))
        response = self._call.finished(self._done, self.last)
        return events + self._event(f"response.{response.status}", response=response)

    def failure(self, error: ChairliftError) -> bytes:
        _, body = error_body(error)
        failed = {"status": "failed", "error": ResponseError(message=str(error))}
        response = self._call.skeleton().model_copy(update=failed)
        event = self._event("error", code=body.error.type, message=str(error), param=body.error.param)
        return event + self._event("response.failed", response=response)

    def reasoning(self, text: str) -> bytes:
        return self._append("reasoning", "rs", text, [])

    def content(self, text: str, positions: list[TokenLogprobs]) -> bytes:
        logprobs = [self._logprobs.chat(position) for position in positions] if self._call.body.include_logprobs else []
        is_open = self._open is not None and self._open.kind == "message"
        # The token of these logprobs has not become text yet: it may turn out to begin another item.
        return self._append("message", "msg", text, logprobs) if text or (logprobs and is_open) else b""

    def tool_call(self, call: DeltaToolCall) -> bytes:
        events = b""
        if call.id is not None:
            events = self._start(OutputItem("function_call", new_item_id("fc"), call.id, call.name or ""))
        return events + self._delta(call.arguments, []) if call.arguments else events

    def _append(self, kind: str, prefix: str, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        is_open = self._open is not None and self._open.kind == kind
        events = b"" if is_open else self._start(OutputItem(kind, new_item_id(prefix)))
        return events + self._delta(text, logprobs)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return to_named_event(kind, encode(body))

    def _start(self, item: OutputItem) -> bytes:
        """Finish the open item, and start this one."""
        events = self._end("completed")
        self._open = item
        added = item.value("in_progress", is_empty=True)
        events += self._event("response.output_item.added", output_index=len(self._done), item=added)
        if item.kind != "function_call":
            events += self._event("response.content_part.added", **self._place(item), part=item.part())
        return events

    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """Append text to the open item."""
        item = self._open
        assert item is not None
        item.text += text
        item.logprobs += logprobs
        more = {"logprobs": _without_bytes(logprobs)} if item.kind == "message" else {}
        return self._event(f"{DELTAS[item.kind]}.delta", **self._place(item), delta=text, **more)

    def _end(self, status: str) -> bytes:
        """Finish the open item, if any."""
        item, self._open = self._open, None
        if item is None:
            return b""
        name = f"{DELTAS[item.kind]}.done"
        if item.kind == "function_call":
            events = self._event(name, **self._place(item), arguments=item.text)
        else:
            more = {"logprobs": _without_bytes(item.logprobs)} if item.kind == "message" else {}
            events = self._event(name, **self._place(item), text=item.text, **more)
            events += self._event("response.content_part.done", **self._place(item), part=item.part())
        events += self._event("response.output_item.done", output_index=len(self._done), item=item.value(status))
        self._done.append(item)
        return events

    def _place(self, item: OutputItem) -> dict[str, Any]:
        place = {"item_id": item.id, "output_index": len(self._done)}
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
