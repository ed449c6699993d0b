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
def test_tools_begin_with_the_name_next_to_the_description(template: str) -> None:
    messages = [{"role": "system", "content": "Füge mit add Zahlen zusammen 🙂. " * 20}, *MESSAGES[1:]]
    start, text = tools_start(template, tools=[TOOL], messages=messages)
    assert start is not None
    name = text.rindex("add", 0, text.index("Adds two numbers."))
    ids = planner(template).engine.tokenizer.encode(text, add_special_tokens=False)
    before = planner(template).engine.tokenizer.decode(ids[:start], skip_special_tokens=False)
    including = planner(template).engine.tokenizer.decode(ids[: start + 1], skip_special_tokens=False)
    assert len(before) <= name < len(including)


def test_reordered_tools_differ_behind_the_start_of_the_tools() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    other = {**TOOL, "function": {**TOOL["function"], "name": "sub", "description": "Subtracts two numbers."}}
    start, text = tools_start(template, tools=[TOOL, other])
    _, reordered = tools_start(template, tools=[other, TOOL])
    first, second = (
        planner(template).engine.tokenizer.encode(each, add_special_tokens=False) for each in (text, reordered)
    )
    assert start is not None
    assert first[:start] == second[:start]


def test_a_tool_without_a_description_is_found_by_its_name() -> None:
    function = {"name": "multiply", "parameters": {"type": "object"}}
    start, text = tools_start("qwen3", tools=[{"type": "function", "function": function}])
    assert start is not None
    assert "multiply" not in planner("qwen3").engine.tokenizer.decode(
        planner("qwen3").engine.tokenizer.encode(text, add_special_tokens=False)[:start]
    )


def test_tools_that_chairlift_writes_are_in_front_of_the_system_message() -> None:
    _, text = tools_start("{% for m in messages %}{{ m.content }}{% endfor %}", tools=[TOOL])
    assert text.index("Adds two numbers.") < text.index("You add numbers")


def test_a_prompt_without_tools_has_no_position() -> None:
    assert tools_start("qwen3")[0] is None
    assert tools_start("qwen3", tools=[TOOL], tool_choice="none")[0] is None
