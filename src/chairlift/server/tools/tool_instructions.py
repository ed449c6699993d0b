"""Describes tools in the system message, in Hermes' format, for models whose chat template does not read tools.

The text of this module counts as template text, and what the request supplies as content. The tags may be added tokens
of the model, and only the tags that this module writes are encoded as these tokens.
"""

from __future__ import annotations

import json
from typing import Any, Final

from chairlift.loading.text.marked_text import MarkedText, join_marked, template_text

INSTRUCTIONS: Final = template_text("""You can call functions. These are there, each described by a JSON schema:
<tools>
%s
</tools>
To call one, answer with its name and arguments as a JSON object between tags, and with nothing else:
<tool_call>
{"name": "the name", "arguments": {"an argument": "its value"}}
</tool_call>""")
CALL: Final = template_text("<tool_call>\n%s\n</tool_call>")
RESULT: Final = template_text("<tool_response>\n%s\n</tool_response>")
LINE_BREAK: Final = template_text("\n")


def describe_tools_in_messages(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with tools, tool calls and tool results written into their text for a template without tools."""
    converted = [_tool_text_message(message) for message in messages]
    if not tools:
        return converted
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = INSTRUCTIONS % MarkedText(lines)
    if converted[0]["role"] == "system":
        first = {**converted[0], "content": join_marked([converted[0]["content"], LINE_BREAK * 2, instructions])}
        return [first, *converted[1:]]
    return [{"role": "system", "content": instructions}, *converted]


def _tool_text_message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": RESULT % message["content"]}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [CALL % json.dumps(call["function"], ensure_ascii=False) for call in calls]
    content = LINE_BREAK.join(filter(None, [message["content"], *texts]))
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}
