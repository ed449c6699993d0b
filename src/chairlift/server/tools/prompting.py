"""Tools for models whose chat template does not know them: told in the system message, in the format of Hermes."""

from __future__ import annotations

import json
from typing import Any

INSTRUCTIONS = """You can call functions. These are there, each described by a JSON schema:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as a JSON object between tags, and with nothing else:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def told_in_words(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation without `tools`, `tool_calls` and the role `tool`: all three are text in it."""
    spelled = [_spelled(message) for message in messages]
    if not tools:
        return spelled
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    words = INSTRUCTIONS.format(tools=lines)
    if spelled[0]["role"] == "system":
        first = {**spelled[0], "content": f"{spelled[0]['content']}\n\n{words}"}
        return [first, *spelled[1:]]
    return [{"role": "system", "content": words}, *spelled]


def _spelled(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [message["content"], *texts]))
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}
