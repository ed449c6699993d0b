"""Derives the format of tool calls from a chat template: what it writes for a call must be read back."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from itertools import product
from typing import Any, Final, NamedTuple

from chairlift.errors import RequestError
from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.loading.text.marked_text import unmarked
from chairlift.loading.text.written_object import json_text
from chairlift.server.tools.answer_formats import TOOL_CALL_FORMATS, CallFormat, tool_call_format
from chairlift.server.tools.answer_parser import DeltaMessage
from chairlift.server.tools.channel_parser import ChannelParser
from chairlift.server.tools.tool_instructions import TOOL_VARIABLES, written_variables
from chairlift.server.tools.tool_parser import ToolParser

PROBE: Final = "qzvx"
OTHER: Final = "qzvy"
ARGUMENTS: Final = {"qzkey": "qzvalue"}
IDS: Final = ("abcdefghi", f"functions.{PROBE}:0")
PARAMETERS: Final = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
TOOL: Final = {"type": "function", "function": {"name": "a", "description": "a", "parameters": PARAMETERS}}
MARKER_START: Final = re.compile(r"(?:[<\[][^<>\[\]\s]*|to=)$")
"""The beginning of a marker, or of a recipient, at the end of a text."""
ADVICE: Final = ", so requests whose tools the model may call are rejected. Name a format with --tool-call-parser"
UNKNOWN_CALLS: Final = (
    "tools: the format in which this model writes tool calls is not known from its chat template. Start the server "
    f"with --tool-call-parser and one of {', '.join(TOOL_CALL_FORMATS)}, or set tool_choice to required or one tool"
)
logger = logging.getLogger(__name__)


class CallStyle(NamedTuple):
    """How a chat template writes a call: the text of the probe's call (None if it writes none), whether it expects
    arguments as JSON text, whether it writes calls only in messages whose content is null, and whether it writes only
    one call of a message."""

    text: str | None = None
    has_text_arguments: bool = False
    has_null_content: bool = False
    has_one_call: bool = False

    def adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its calls in the form that the template expects."""
        calls = message.get("tool_calls")
        if calls and self.has_text_arguments:
            texts = (json_text(call["function"]["arguments"]) for call in calls)
            functions = ({**call["function"], "arguments": text} for call, text in zip(calls, texts, strict=True))
            calls = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
            message = {**message, "tool_calls": calls}
        return {**message, "content": None} if calls and self.has_null_content and not message["content"] else message

    def example(self, form: CallFormat) -> str | None:
        """A call in words as the template writes it; None if it is not read in this format."""
        if self.text is None or math.isinf(_num_left(form, self.text)):
            return None
        before, closing, _ = self.text.rpartition(form.closing or "\0")
        example = before + closing or self.text
        for probe, word in ((PROBE, "the_name"), ("qzkey", "an_argument"), ("qzvalue", "its value")):
            example = example.replace(probe, word)
        return example.strip()


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
        start = next((i for i, pair in enumerate(zip(plain, text, strict=False)) if pair[0] != pair[1]), 0)
        text = text[len(MARKER_START.sub("", text[:start])) :].removesuffix(plain.rpartition("~")[2])
        if all(part in text for part in (PROBE, *ARGUMENTS, *ARGUMENTS.values())):
            return style._replace(text=text, has_one_call=_has_one_call(template, calling))
    return CallStyle()


def _has_one_call(template: ChatTemplate, calling: dict[str, Any]) -> bool:
    """Whether the template omits or rejects a second call of a message."""
    (call,) = calling["tool_calls"]
    other = {**call, "id": call["id"].replace(PROBE, OTHER), "function": {**call["function"], "name": OTHER}}
    with contextlib.suppress(RequestError):
        return OTHER not in _rendered(template, {**calling, "tool_calls": [call, other]})
    return True


def _rendered(template: ChatTemplate, last: dict[str, Any]) -> str:
    return unmarked(
        template.render(
            [{"role": "user", "content": "a"}, last],
            add_generation_prompt=False,
            tools=[TOOL],
            **written_variables(template, [TOOL]),
        )
    )


def detected_format(name: str, template: ChatTemplate | None, style: CallStyle) -> CallFormat | None:
    """The format of this name. `auto` is the first format in which the call that the template writes is read back
    with the least text left as content, or else the one that the template's words indicate.

    None, with a warning, if it writes calls and they are read in no format. If it writes no calls and indicates no
    format, they are read in Hermes' format, with a warning if it reads tools.
    """
    text = None if template is None else template.text
    chosen = tool_call_format(name, text)
    if name != "auto":
        return chosen
    if style.text is None:
        if chosen is None and template is not None and "tool_calls" in template.text:
            logger.warning("chat template: it reads tool calls, but rejects or omits a call of a test%s", ADVICE)
            return None
        if chosen is None and template is not None and not template.variables.isdisjoint(TOOL_VARIABLES):
            logger.warning(
                "chat template: it reads tools, but does not show the format of tool calls, which are read in that of "
                "hermes. Name another one with --tool-call-parser"
            )
        return chosen or TOOL_CALL_FORMATS["hermes"]
    forms = [form for each in TOOL_CALL_FORMATS if (form := tool_call_format(each, text)) is not None]
    lefts = [_num_left(form, style.text) for form in forms]
    if math.isinf(min(lefts)):
        logger.warning(
            "chat template: it writes tool calls as %r, which no --tool-call-parser reads%s", style.text[:200], ADVICE
        )
        return None
    return forms[lefts.index(min(lefts))]


def _num_left(form: CallFormat, text: str) -> float:
    """The number of characters that remain content, or infinity if the call is not read."""
    parser = (ToolParser if form.channels is None else ChannelParser)(form, frozenset((PROBE,)))
    answer = DeltaMessage.joined([parser.feed(text), parser.finish(is_complete=True)])
    with contextlib.suppress(ValueError):  # Arguments that are no JSON.
        if [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [(PROBE, ARGUMENTS)]:
            return len(answer.content)
    return math.inf
