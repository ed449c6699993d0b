"""Derives the format of tool calls from a chat template: what it writes for a call must be read back."""

from __future__ import annotations

import json
import logging
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

from chairlift.errors import RequestError
from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.loading.text.marked_text import unmarked
from chairlift.server.tools.answer_formats import TOOL_CALL_FORMATS, CallFormat, tool_call_format
from chairlift.server.tools.answer_parser import DeltaMessage
from chairlift.server.tools.harmony_parser import HarmonyParser
from chairlift.server.tools.tool_parser import ToolParser

PROBE: Final = "qzvx"
ARGUMENTS: Final = {"qzkey": "qzvalue"}
IDS: Final = ("abcdefghi", f"functions.{PROBE}:0")
PARAMETERS: Final = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
TOOL: Final = {"type": "function", "function": {"name": "a", "description": "a", "parameters": PARAMETERS}}
logger = logging.getLogger(__name__)


class CallStyle(NamedTuple):
    """How a chat template writes a call: the text of the probe's call (None if it writes none), whether it expects
    arguments as JSON text, and whether it writes calls only in messages whose content is null."""

    text: str | None = None
    has_text_arguments: bool = False
    has_null_content: bool = False

    def adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its calls in the form that the template expects."""
        calls = message.get("tool_calls")
        if calls and self.has_text_arguments:
            functions = [call["function"] for call in calls]
            texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
            functions = [{**function, "arguments": text} for function, text in zip(functions, texts, strict=True)]
            calls = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
            message = {**message, "tool_calls": calls}
        return {**message, "content": None} if calls and self.has_null_content and not message["content"] else message


def call_style(template: ChatTemplate | None) -> CallStyle:
    """Render a conversation with a call in several forms, and return the first one in which the call is written."""
    if template is None or "tool_calls" not in template.text:
        return CallStyle()
    for is_null, is_text, call_id in product((False, True), (False, True), IDS):
        style = CallStyle(None, is_text, is_null)
        call = {"id": call_id, "type": "function", "function": {"name": PROBE, "arguments": ARGUMENTS}}
        calling = style.adapt({"role": "assistant", "content": "", "tool_calls": [call]})
        try:
            plain, text = (_rendered(template, last) for last in ({"role": "assistant", "content": "~"}, calling))
        except RequestError:
            continue
        text = text[next((i for i, pair in enumerate(zip(plain, text, strict=False)) if pair[0] != pair[1]), 0) :]
        if all(part in text for part in (PROBE, *ARGUMENTS, *ARGUMENTS.values())):
            return style._replace(text=text)
    return CallStyle()


def _rendered(template: ChatTemplate, last: dict[str, Any]) -> str:
    return unmarked(
        template.render([{"role": "user", "content": "a"}, last], add_generation_prompt=False, tools=[TOOL])
    )


def detect_format(name: str, template: ChatTemplate | None, style: CallStyle) -> CallFormat:
    """The format of this name. `auto` is the first format in which the call that the template writes is read back, or
    else that of the words of the template; a warning is logged if a call that it writes is read in no format."""
    chosen = tool_call_format(name, None if template is None else template.text)
    if name != "auto" or style.text is None:
        return chosen
    found = next((form for form in TOOL_CALL_FORMATS.values() if _is_read(form, style.text)), None)
    if found is None:
        logger.warning(
            "chat template: it writes tool calls as %r, which no --tool-call-parser reads, so they remain content",
            style.text[:200],
        )
    return found or chosen


def _is_read(form: CallFormat, text: str) -> bool:
    parser = (HarmonyParser if form.is_harmony else partial(ToolParser, form))(frozenset((PROBE,)))
    calls = DeltaMessage.joined([parser.feed(text), parser.finish(is_complete=True)]).tool_calls
    return [call.name for call in calls] == [PROBE] and json.loads(calls[0].arguments) == ARGUMENTS
