"""Conversations with cut, empty and converted turns reach the chat templates, and lose nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_planner import planner

from chairlift.errors import RequestError
from chairlift.server.api.chat import ChatCompletionRequest
from chairlift.server.api.messages import MessagesRequest
from chairlift.server.api.responses import ResponsesRequest
from chairlift.server.preparation.conversation import ChatPlan
from chairlift.server.protocol.tools import parse_arguments
from support.case_loop import loop_over
from support.chat_templates import TEMPLATES

WRITE_TURNS = """\
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('The system message must be the first one.') }}{% endif %}" + WRITE_TURNS
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}" + WRITE_TURNS
)
USER = {"role": "user", "content": "Hi"}
NEXT = {"role": "user", "content": "Go on."}
CUT = '{"text": "abc'


def call(arguments: str) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "echo", "arguments": arguments}}


def calling(arguments: str) -> list[dict[str, Any]]:
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "not valid JSON"}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}, result, NEXT]


def answered(**answer: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", **answer}, NEXT]


def plan(template: str, kind: type[Any], **body: Any) -> ChatPlan:
    return planner(template).plan(kind.model_validate(body))


def prompt(template: str, kind: type[Any], **body: Any) -> str:
    return plan(template, kind, **body).prompts[0][0] or ""


def chat(template: str, messages: list[Any], **fields: Any) -> str:
    return prompt(template, ChatCompletionRequest, messages=messages, **fields)


def claude(template: str, messages: list[Any], **fields: Any) -> str:
    return prompt(template, MessagesRequest, messages=messages, max_tokens=8, **fields)


def turns(text: str) -> list[tuple[str, str]]:
    """The roles and contents that WRITE_TURNS has written."""
    parts = text.split("<|im_start|>")[1:-1]
    return [
        (role, content.removesuffix("<|im_end|>\n")) for role, _, content in (part.partition("\n") for part in parts)
    ]


@pytest.mark.parametrize("template", [*TEMPLATES, ONE_SYSTEM, ALTERNATING], ids=lambda name: name[:12])
@loop_over(
    "messages",
    [
        calling(CUT),
        calling("[1]"),
        calling(""),
        calling('{"text": "\\ud83d"}'),
        calling('{"n": NaN}'),
        calling('{"a": ' + "[" * 500 + "]" * 500 + "}"),
        answered(content=None),
        answered(content=[]),
        answered(),
        answered(content=None, reasoning_content="Hm."),
        answered(content="Well.", provider_specific_fields={"refusal": None}, reasoning="Hm."),
        answered(content=None, reasoning={"effort": "low"}),
        answered(content=[{"type": "thinking", "thinking": "Hm."}]),
        answered(content="", reasoning_content="Hm.")[:2],
        answered(content=None, tool_calls=[call(CUT)])[:2],
    ],
)
def test_a_template_accepts_what_a_server_produced(template: str, messages: list[dict[str, Any]]) -> None:
    assert chat(template, messages)


@loop_over("text", [CUT, "[1]", "1", "null", '"a"', "{", '{"a": "\\ud83d"}', '{"a": Infinity}', "\n{]"])
def test_arguments_that_are_no_object_are_kept_as_text(text: str) -> None:
    assert parse_arguments(text) == {"INVALID_JSON": text}
    assert json.dumps({"INVALID_JSON": text}) in chat("qwen3", calling(text))


def test_arguments_reach_the_template_as_an_object() -> None:
    assert parse_arguments(' {"a": 1}\n') == {"a": 1}
    assert parse_arguments(" ") == {}
    block = {"type": "tool_use", "id": "t", "name": "echo", "input": parse_arguments(CUT)}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "bad"}
    messages = [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert json.dumps({"INVALID_JSON": CUT}) in claude("qwen3", messages)


@loop_over("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_an_answer_has_two_names(name: str) -> None:
    assert "<think>\nHm.\n</think>\n\nWell." in chat("qwen3", answered(content="Well.", **{name: "Hm."})[:2])
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}], "signature": "s"}
    parts = [thinking, {"type": "text", "text": "Well.", "annotations": [{}], "index": None}]
    messages = answered(content=parts)[:2]
    assert "<think>\nHm.\n</think>\n\nWell." in chat("qwen3", messages)
    ignored = plan("qwen3", ChatCompletionRequest, messages=messages).ignored
    assert ignored == ("messages.content.annotations", "messages.content.signature")


def test_additional_fields_of_answers_are_named() -> None:
    echoed = {**call("{}"), "provider_specific_fields": {"s": "x"}}
    echoed["function"]["thought_signature"] = "x"
    answer = answered(content="a", thinking_blocks=[{}], annotations=[], audio=None, id=None, tool_calls=[echoed])
    ignored = plan("qwen3", ChatCompletionRequest, messages=answer).ignored
    assert ignored == (
        "messages.thinking_blocks",
        "messages.tool_calls.provider_specific_fields",
        "messages.tool_calls.thought_signature",
    )
    strange = answered(content="a", **{"a\r\nb": 1, "x" * 65: 1})
    assert plan("qwen3", ChatCompletionRequest, messages=strange).ignored == ()


@loop_over("field", ["provider_specific_fields", "reasonin", "cach_control"])
@loop_over("role", ["system", "user", "tool"])
def test_additional_fields_of_other_messages_are_errors(role: str, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ChatCompletionRequest.model_validate(
            {"messages": [{"role": role, "content": "x", "tool_call_id": "c", field: 1}]}
        )


def test_cache_breakpoints_do_not_change_a_prompt() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    function = {"name": "echo", "parameters": {"type": "object"}}
    messages = [{"role": "system", "content": "Be brief."}, *calling("{}")]
    plain = chat("qwen3", messages, tools=[{"type": "function", "function": function}])
    marked = [
        {**m, "content": [{"type": "text", "text": m["content"], **mark}] if m["content"] else None} for m in messages
    ]
    for tool in ({"function": function, **mark}, {"function": {**function, **mark}}):
        assert chat("qwen3", [{**m, **mark} for m in marked], tools=[{"type": "function", **tool}]) == plain


@loop_over(
    ("content", "expected"),
    [
        ([{"type": "thinking", "thinking": "Hm.", "signature": ""}], ""),
        ([], ""),
        ("", ""),
        ([{"type": "text", "text": ""}], ""),
        ([{"type": "text", "text": "Well."}], "Well."),
    ],
)
def test_an_empty_turn_of_claude_is_a_turn(content: Any, expected: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}, NEXT]
    for template in (ONE_SYSTEM, ALTERNATING):
        assert turns(claude(template, messages)) == [("user", "Hi"), ("assistant", expected), ("user", "Go on.")]
    assert turns(claude(ALTERNATING, [USER, {"role": "assistant", "content": []}])) == [("user", "Hi")]
    assert claude(ALTERNATING, [USER, {"role": "user", "content": []}])


def test_consecutive_turns_of_claude_are_combined() -> None:
    use = {"type": "tool_use", "id": "t", "name": "echo", "input": {}}
    answers = [
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}]},
        {"role": "assistant", "content": "So."},
    ]
    messages = [{"role": "user", "content": "<reminder>x</reminder>"}, USER, *answers, NEXT]
    expected = [("user", "<reminder>x</reminder>\n\nHi"), ("assistant", "Well.\n\nSo."), ("user", "Go on.")]
    assert turns(claude(ONE_SYSTEM, messages)) == expected
    assert turns(claude(ALTERNATING, messages)) == expected
    parallel = [{"role": "assistant", "content": [{**use, "id": name}]} for name in ("a", "b")]
    text = claude("qwen3", [USER, answers[0], *parallel, NEXT])
    assert text.count("<|im_start|>assistant\nWell.\n<tool_call>") == 1
    assert text.count("<tool_call>") == 2


def test_text_after_a_call_stays_after_it() -> None:
    use = {"type": "tool_use", "id": "t", "name": "echo", "input": {}}
    answers = [{"role": "assistant", "content": [use]}, {"role": "assistant", "content": "Done."}]
    text = claude("qwen3", [USER, *answers, NEXT])
    assert text.index("<tool_call>") < text.index("Done.")


SYSTEM = [("system", "A\n\nB"), ("user", "Hi")]


def test_converted_conversations_have_one_system_message() -> None:
    items = [{"role": "developer", "content": "B"}, USER]
    for template in (ONE_SYSTEM, WRITE_TURNS.join(["{% for m in messages %}", ""])):
        assert turns(prompt(template, ResponsesRequest, instructions="A", input=items)) == SYSTEM
        assert turns(claude(template, [{"role": "system", "content": "B"}, USER], system="A")) == SYSTEM


def test_system_messages_of_a_chat_are_merged_only_if_one_would_be_lost() -> None:
    messages = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, USER]
    assert turns(chat(ONE_SYSTEM, messages)) == SYSTEM
    plain = "{% for m in messages %}" + WRITE_TURNS
    assert turns(chat(plain, messages)) == [("system", "A"), ("system", "B"), ("user", "Hi")]
    omitting = "{% for m in messages if m.role != 'system' or m == messages[0] %}" + WRITE_TURNS
    assert turns(chat(omitting, messages)) == SYSTEM
    assert turns(chat(ALTERNATING, messages)) == [("user", "A\n\nB\n\nHi")]


def test_a_later_system_message_becomes_a_turn_of_the_user_if_it_is_rejected() -> None:
    messages = [USER, {"role": "assistant", "content": "Well."}, {"role": "system", "content": "B"}, NEXT]
    expected = [("user", "Hi"), ("assistant", "Well."), ("user", "B\n\nGo on.")]
    assert turns(chat(ONE_SYSTEM, messages)) == expected
    assert turns(claude(ONE_SYSTEM, messages)) == expected
    assert turns(prompt(ONE_SYSTEM, ResponsesRequest, input=messages)) == expected


def test_the_error_of_a_template_is_that_of_the_messages_as_given() -> None:
    template = "{{ raise_exception(messages | length ~ ' messages') }}"
    with pytest.raises(RequestError, match="rejects them: 2 messages"):
        chat(template, [USER, NEXT])


LINE = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"


@loop_over(
    "system",
    [
        [{"type": "text", "text": LINE}, {"type": "text", "text": "Be brief."}],
        LINE + "\nBe brief.",
        "\n" + LINE.replace("x-a", "X-A") + "\nBe brief.",
    ],
)
def test_the_changing_line_of_a_client_is_no_part_of_the_prompt(system: Any) -> None:
    texts = {claude("qwen3", [USER], system=json.loads(json.dumps(system) % cch)) for cch in ("a", "b")}
    assert texts == {claude("qwen3", [USER], system="Be brief.")}
    messages = [{"role": "system", "content": system}, USER]
    assert chat("qwen3", messages) == chat("qwen3", [{"role": "system", "content": "Be brief."}, USER])
    assert plan("qwen3", ChatCompletionRequest, messages=messages).ignored == ("x-anthropic-billing-header",)
    assert claude("qwen3", [USER], system=LINE) == claude("qwen3", [USER])
    assert LINE in claude("qwen3", [USER], system="Explain:\n" + LINE)
