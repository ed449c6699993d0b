"""Texts of one message in prompts, turns that are split and combined, and the position of the tools."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from chat_planner import planner

from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.messages import MessagesRequest
from chairlift.server.protocol.responses import ResponsesRequest
from chairlift.server.protocol.turns import with_single_calls
from support.case_loop import loop_over

TEXT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
TEXTS = ("a", "", "=")


def body(kind: type[Any], role: str, block: str) -> Any:
    parts = [{"type": block, "text": text} for text in TEXTS]
    turns = [{"role": "user", "content": "Hi"}] * (role == "assistant") + [{"role": role, "content": parts}]
    turns += [{"role": "user", "content": "Hi"}] * (role != "user")
    name = "input" if kind is ResponsesRequest else "messages"
    limit = {"max_tokens": 3} if kind is MessagesRequest else {}
    return kind.model_validate({name: turns, **limit})


@loop_over(
    ("kind", "role", "block"),
    [
        *((ChatCompletionRequest, role, "text") for role in ("system", "user", "assistant")),
        (MessagesRequest, "user", "text"),
        (MessagesRequest, "assistant", "text"),
        *((ResponsesRequest, role, "input_text") for role in ("system", "user")),
        (ResponsesRequest, "assistant", "output_text"),
    ],
)
def test_texts_of_a_message(kind: type[Any], role: str, block: str) -> None:
    given = body(kind, role, block)
    for template, joined in ((TEXT, "a\n="), (PARTS, "a=" if kind is ChatCompletionRequest else "a\n=")):
        text = planner(template).plan(given).prompts[0][0] or ""
        assert f"{role}:{joined};" in text
        assert "Hi" in text or role == "user"


@loop_over(
    ("parser", "content", "reasoning"),
    [
        ("deepseek_r1", None, True),
        ("deepseek_r1", "Well", False),
        ("deepseek_r1", "", True),
        ("qwen3", None, True),
        ("qwen3", "Well", False),
        ("none", None, False),
    ],
)
def test_what_precedes_the_answer(parser: str, content: str | None, reasoning: bool) -> None:
    """An answer that goes on with the last message has no reasoning before it."""
    turns = [
        {"role": "user", "content": "Hi"},
        *([] if content is None else [{"role": "assistant", "content": content}]),
    ]
    fields = {
        "messages": turns,
        "continue_final_message": content is not None,
        "add_generation_prompt": content is None,
    }
    for ends in ({}, {"stop": "x"}, {"min_tokens": 2}):
        body = ChatCompletionRequest.model_validate({**fields, **ends})
        params = planner("chatml", reasoning_parser=parser).plan(body).params
        assert (params.reasoning is not None) == (reasoning and bool(ends))


def test_results_of_tools_in_parts() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": text} for text in TEXTS]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": parts},
    ]
    calls = "{{ tools }}{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    for template, joined in ((TEXT, "a\n="), (PARTS, "a=")):
        text = (
            planner(template + calls).plan(ChatCompletionRequest.model_validate({"messages": messages})).prompts[0][0]
        )
        assert joined in (text or "")


class CountedCall(dict[str, Any]):
    """A call that counts the reads of its fields."""

    reads: ClassVar[Counter[str]] = Counter()

    def get(self, name: str, default: Any = None) -> Any:
        self.reads[name] += 1
        return super().get(name, default)


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def test_each_call_is_read_once_whatever_results_follow() -> None:
    calls = [CountedCall(id=str(index)) for index in range(100)]
    CountedCall.reads.clear()
    results = [result(call_id, call_id) for index in range(100) for call_id in (str(index), "unknown")]
    turns = with_single_calls([{"role": "user", "content": "Hi"}, calling(*calls), *results])
    assert CountedCall.reads["id"] == 100
    assert turns[1:201] == [turn for call in calls for turn in (calling(call), result(call["id"], call["id"]))]
    assert turns[201:] == [result("unknown", "unknown")] * 100


def test_results_of_one_call_keep_their_order() -> None:
    a, b, answers = {"id": "a"}, {"id": "b"}, [result("a", "1"), result("a", "2")]
    assert with_single_calls([calling(a, b), *answers]) == [calling(a), *answers, calling(b)]


def test_a_result_after_a_turn_of_the_user_stays_there() -> None:
    a, b, user = {"id": "a"}, {"id": "b"}, {"role": "user", "content": "So?"}
    assert with_single_calls([calling(a, b), result("a", "1"), user, result("b", "2")]) == [
        *(calling(a), result("a", "1"), calling(b)),
        *(user, result("b", "2")),
    ]


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


def test_tools_in_front_of_the_system_message_and_prompts_without_tools() -> None:
    _, text = tools_start("{% for m in messages %}{{ m.content }}{% endfor %}", tools=[TOOL])
    assert text.index("Adds two numbers.") < text.index("You add numbers")
    assert tools_start("qwen3")[0] is None
    assert tools_start("qwen3", tools=[TOOL], tool_choice="none")[0] is None
