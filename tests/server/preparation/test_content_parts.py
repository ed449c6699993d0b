"""Texts of one message, as every endpoint takes them, in prompts of templates that read texts or lists of parts."""

from __future__ import annotations

from typing import Any

from chat_planner import planner

from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.messages import MessagesRequest
from chairlift.server.protocol.responses import ResponsesRequest
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
