"""The output items of /v1/responses, and the events that stream them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from chairlift.server.api.stream_chunks import encode, to_named_event


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


class ItemEventWriter:
    """Writes the events of items in their order.

    Attributes:
        done: the finished items.
        open: the item that is being generated, if any.
    """

    def __init__(self) -> None:
        self.done: list[OutputItem] = []
        self.open: OutputItem | None = None
        self._sequence_number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event with the next sequence number."""
        body = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return to_named_event(kind, encode(body))

    def start(self, item: OutputItem) -> bytes:
        """Finish the open item, and start this one."""
        events = self.end("completed")
        self.open = item
        index = len(self.done)
        added = item.value("in_progress", is_empty=True)
        events += self.event("response.output_item.added", output_index=index, item=added)
        if item.kind != "function_call":
            events += self.event("response.content_part.added", **self._place(item), part=item.part())
        return events

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """Append text to the open item."""
        item = self.open
        assert item is not None
        item.text += text
        item.logprobs += logprobs
        more = {"logprobs": _without_bytes(logprobs)} if item.kind == "message" else {}
        return self.event(f"{DELTAS[item.kind]}.delta", **self._place(item), delta=text, **more)

    def end(self, status: str) -> bytes:
        """Finish the open item, if any."""
        item = self.open
        if item is None:
            return b""
        name = f"{DELTAS[item.kind]}.done"
        if item.kind == "function_call":
            events = self.event(name, **self._place(item), arguments=item.text)
        else:
            more = {"logprobs": _without_bytes(item.logprobs)} if item.kind == "message" else {}
            events = self.event(name, **self._place(item), text=item.text, **more)
            events += self.event("response.content_part.done", **self._place(item), part=item.part())
        events += self.event("response.output_item.done", output_index=len(self.done), item=item.value(status))
        self.done.append(item)
        self.open = None
        return events

    def _place(self, item: OutputItem) -> dict[str, Any]:
        place = {"item_id": item.id, "output_index": len(self.done)}
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
