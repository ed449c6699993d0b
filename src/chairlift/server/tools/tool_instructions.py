"""Writes tools and calls into messages, for models whose chat template does not read them.

The text of this module counts as template text, and what the request supplies as content. The tags may be added tokens
of the model, and only the tags that this module writes are encoded as these tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, Final

from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.loading.text.marked_text import MarkedText, join_marked, template_text
from chairlift.server.protocol.tools import FunctionDefinition
from chairlift.server.tools.answer_formats import TOOL_CALL_FORMATS, CallFormat

TOOL_VARIABLES: Final = ("tools", "xml_tools", "functions")
"""Variables of chat templates: a list of tools, in SmolLM3 of functions, and in FireFunction their text."""

INSTRUCTIONS: Final = template_text("""You can call functions. These are there, each described by a JSON schema:
<tools>
%s
</tools>
To call one, answer with its name and arguments in this form, and with nothing else:
%s""")
CALL: Final = template_text("<tool_call>\n%s\n</tool_call>")
RESULT: Final = template_text("<tool_response>\n%s\n</tool_response>")
HERMES: Final = TOOL_CALL_FORMATS["hermes"]
LINE_BREAK: Final = template_text("\n")
MAX_NAME_DISTANCE: Final = 64
"""The most characters between the name of a tool and its description."""
EXAMPLE: Final = CALL % template_text('{"name": "the_name", "arguments": {"an_argument": "its value"}}')


def with_described_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], example: str | None = None
) -> list[dict[str, Any]]:
    """The messages, with tools, tool calls and tool results written into their text in Hermes' format.

    Args:
        example: a call as the chat template writes it. Then the template also writes calls and results itself.
    """
    converted = messages
    if example is None:
        converted = [
            {"role": "user", "content": RESULT % message["content"]}
            if message["role"] == "tool"
            else with_written_calls(message, HERMES)
            for message in messages
        ]
    if not tools:
        return converted
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    # Tools come first, because prompts with the same tools often have different system messages.
    instructions = INSTRUCTIONS % (MarkedText(lines), template_text(example) if example else EXAMPLE)
    if converted[0]["role"] == "system":
        first = {**converted[0], "content": join_marked([instructions, LINE_BREAK * 2, converted[0]["content"]])}
        return [first, *converted[1:]]
    return [{"role": "system", "content": instructions}, *converted]


def completed_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool with the fields that some chat templates read of every tool: descriptions, parameters and one type."""
    function = tool["function"]
    parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
    properties = {**parameters["properties"]} if isinstance(parameters["properties"], dict) else {}
    for name, part in properties.items():
        if isinstance(part, dict):
            kinds = part.get("type")
            kind = {"type": next((each for each in kinds if each != "null"), "null")} if isinstance(kinds, list) else {}
            properties[name] = {"description": "", **part, **kind}
    return {**tool, "function": {"description": "", **function, "parameters": {**parameters, "properties": properties}}}


def with_tools_in_system_message(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the functions as JSON in the field `tools` of the system message, as Phi-4-mini reads them."""
    if not tools:
        return messages
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**messages[0], "tools": functions}, *messages[1:]]


def written_variables(template: ChatTemplate, tools: list[dict[str, Any]]) -> dict[str, str]:
    """The variables of FireFunction's chat template, as far as a template reads them: the functions and the date."""
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False, indent=4)
    variables = {"functions": functions, "datetime": time.strftime("%Y-%m-%d")}
    return {name: text for name, text in variables.items() if name in template.variables}


def with_written_calls(message: dict[str, Any], form: CallFormat) -> dict[str, Any]:
    """The message with its tool calls written into its text, for a template that reads tools but not calls."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    write = _python_call if form.is_list and form.is_python else partial(json.dumps, ensure_ascii=False)
    functions = [write(call["function"]) for call in calls]
    texts = [CALL % function for function in functions]
    if form.is_list:
        ends = template_text(form.openings[0]), template_text(form.closing or "")
        texts = [join_marked([ends[0], MarkedText(f"[{', '.join(functions)}]"), ends[1]])]
    content = LINE_BREAK.join(filter(None, [message["content"], *texts]))
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _python_call(function: dict[str, Any]) -> str:
    if not all(map(str.isidentifier, function["arguments"])):
        return json.dumps(function, ensure_ascii=False)
    return f"{function['name']}({', '.join(f'{name}={value!r}' for name, value in function['arguments'].items())})"


def position_of_tool(function: FunctionDefinition, prompt: str, token_lengths: Iterable[int]) -> int | None:
    """The position of a tool in a prompt, in tokens, or None if its name and its description are not found.

    Messages can have the name of a tool, too, so a name counts only if it is next to the description.

    Args:
        token_lengths: the number of bytes of each token.
    """
    texts = filter(None, (function.description, function.name))
    start = next((at for text in texts if (at := prompt.find(text)) >= 0), None)
    if start is None:
        return None
    before = prompt.rfind(function.name, max(0, start - len(function.name) - MAX_NAME_DISTANCE), start)
    num_bytes = len(prompt[: start if before < 0 else before].encode())
    return sum(1 for _ in takewhile(num_bytes.__ge__, accumulate(token_lengths)))
