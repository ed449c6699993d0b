"""The position of the tools in a prompt, which events show."""

from __future__ import annotations

from typing import Any

import pytest
from chat_planner import planner

from chairlift.server.protocol.chat import ChatCompletionRequest

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds two numbers.", "parameters": {"type": "object"}},
}
MESSAGES = [{"role": "system", "content": "You add numbers with add."}, {"role": "user", "content": "What is 1 + 2?"}]


def tools_start(template: str, **fields: Any) -> tuple[int | None, str]:
    plan = planner(template).plan(ChatCompletionRequest.model_validate({"messages": MESSAGES, **fields}))
    text = plan.prompts[0][0]
    assert text is not None
    return plan.params.tools_start, text


@pytest.mark.parametrize("template", ["qwen3", "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_tools_are_found_in_the_prompt(template: str) -> None:
    start, text = tools_start(template, tools=[TOOL])
    assert start is not None
    encode = planner(template).engine.tokenizer.encode
    assert abs(start - len(encode(text[: text.index("Adds two numbers.")]))) <= len(encode(text)) // 8


def test_tools_that_chairlift_writes_are_in_front_of_the_system_message() -> None:
    _, text = tools_start("{% for m in messages %}{{ m.content }}{% endfor %}", tools=[TOOL])
    assert text.index("Adds two numbers.") < text.index("You add numbers")


def test_a_prompt_without_tools_has_no_position() -> None:
    assert tools_start("qwen3")[0] is None
    assert tools_start("qwen3", tools=[TOOL], tool_choice="none")[0] is None
