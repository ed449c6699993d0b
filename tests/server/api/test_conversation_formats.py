"""Tools, calls and reasoning reach the chat templates of model families, and answers are parsed in their formats."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from chat_planner import planner

from chairlift.errors import ConfigError, RequestError
from chairlift.loading.text import template_sandbox
from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.outputs import CompletionOutput
from chairlift.server.preparation import conversation
from chairlift.server.preparation.conversation import ChatPlan
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.tools.answer_parser import DeltaMessage
from support.call_templates import APRIEL, COHERE, DEEPSEEK_V3, DEEPSEEK_V31, HUNYUAN, PLAIN_LFM2, START
from support.case_loop import loop_over
from support.chat_templates import TEMPLATES

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
FUNCTION = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [{"id": "c", "function": FUNCTION}], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
]
CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
DECLARED = "{'name': 'get_weather', 'description': 'Weather', 'parameters': "


def plan(template: str, **fields: Any) -> ChatPlan:
    return planner(template).plan(plan_body(**fields))


def plan_body(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": CONVERSATION, "tools": [TOOL], **fields})


def parse_answer(plan: ChatPlan, text: str) -> DeltaMessage:
    return DeltaMessage.joined(plan.new_parser().read(CompletionOutput(0, text, [], "stop")))


def prompt(template: str, **fields: Any) -> str:
    return plan(template, **fields).prompts[0][0] or ""


@pytest.mark.parametrize(
    ("template", "tools", "call", "answer"),
    [
        ("granite3", '<|start_of_role|>tools<|end_of_role|>[\n    {\n        "type"', f"<|tool_call|>[{CALL}]", None),
        ("phi4_mini", '<|system|><|tool|>[{"name": "get_weather"', f"<|tool_call|>[{CALL}]<|/tool_call|>", None),
        (
            "gemma4",
            "<|tool>declaration:get_weather{description:",
            '<|channel>thought\nHm.\n<channel|><|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>',
            None,
        ),
        ("smollm3", f"<tools>\n{DECLARED}", f"<tool_call>\n{CALL}\n</tool_call>", None),
        ("olmo3", '<functions>[{"type": "function"', '<function_calls>get_weather(city="Rome")</function_calls>', None),
        (
            "gpt_oss",
            "type get_weather = () => any;",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary "
            'json<|message|>{"city": "Rome"}<|call|>',
            ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}',
        ),
    ],
)
def test_a_family_of_models(template: str, tools: str, call: str, answer: str | None) -> None:
    planned = plan(template)
    text = planned.prompts[0][0] or ""
    assert tools in text
    assert call in text
    assert "sunny" in text
    assert planned.params.skip_special_tokens == (template in ("smollm3", "olmo3"))  # Their tags are no special tokens.
    (found,) = parse_answer(planned, call if answer is None else answer).tool_calls
    assert (found.name, found.arguments) == ("get_weather", '{"city": "Rome"}')


@pytest.mark.parametrize("template", ["granite3", "phi4_mini", "smollm3", "olmo3"])
def test_a_prompt_without_tools_does_not_mention_them(template: str) -> None:
    text = prompt(template, tools=None, messages=CONVERSATION[:1])
    assert "tool" not in text
    assert "function" not in text


def test_structured_answers_of_gpt_oss_follow_the_header_of_the_final_channel() -> None:
    structured = plan("gpt_oss", tools=None, response_format={"type": "json_object"})
    assert (structured.prompts[0][0] or "").endswith("<|start|>assistant<|channel|>final<|message|>")
    assert parse_answer(structured, '{"a": 1}').content == '{"a": 1}'
    forced = plan("gpt_oss", tool_choice="required")
    assert parse_answer(forced, f"[{CALL}]").tool_calls[0].arguments == '{"city": "Rome"}'
    free = plan("gpt_oss", tool_choice="none")
    final = "<|start|>assistant<|channel|>final<|message|>Yes."
    parsed = parse_answer(free, f"<|channel|>analysis<|message|>Hm.<|end|>{final}")
    assert (parsed.content, parsed.reasoning) == ("Yes.", "Hm.")


SPELLINGS = [
    '{"city":"Rome","n":[1,2.50, -3e2]}',
    '{ "city" :\t"Rome" }',
    '{\n  "city": "R\\u00f6me \\ud83d\\ude00\\/\\"",\n  "n": {\n  }\n}',
    '{"city": "Röme", "n": []}',
    "{}",
]
CALLS_IN_JSON = {
    "gpt_oss": "<|channel|>commentary to=functions.get_weather json<|message|>%s<|call|>",
    "qwen3": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
    "llama31": '{"name": "get_weather", "parameters": %s}',
    "smollm3": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
}
REWRITTEN = ("gpt_oss", "qwen3", "llama31")  # Their templates write the arguments, the others whole calls.


@loop_over(("template", "spelling"), itertools.product(CALLS_IN_JSON, SPELLINGS))
def test_arguments_keep_the_spelling_of_the_model_in_the_answer_and_in_the_next_prompt(
    template: str, spelling: str
) -> None:
    text = CALLS_IN_JSON[template] % spelling
    parser = plan(template).new_parser()
    pieces = DeltaMessage.joined([*(parser.feed(character) for character in text), parser.finish(True)])
    for answer in (parse_answer(plan(template), text), pieces):
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("get_weather", spelling)]
    calling = {"role": "assistant", "tool_calls": [{"id": "c", "function": {**FUNCTION, "arguments": spelling}}]}
    history = prompt(template, messages=[CONVERSATION[0], calling, CONVERSATION[2]])
    assert template not in REWRITTEN or spelling in history


def test_reasoning_of_gpt_oss_needs_no_other_parser() -> None:
    with pytest.raises(ConfigError, match="reasoning_parser=qwen3 cannot be combined with tool_call_parser=openai"):
        planner("gpt_oss", reasoning_parser="qwen3")


def test_calls_are_written_in_python_for_a_template_that_reads_lists_of_python() -> None:
    arguments = '{"city": "it\'s", "n": [1.5, null, true]}'
    second = {"id": "d", "function": {"name": "get_weather", "arguments": arguments}}
    calling = {**CONVERSATION[1], "content": "Well.", "tool_calls": [{"id": "c", "function": FUNCTION}, second]}
    text = prompt(PLAIN_LFM2, messages=[CONVERSATION[0], calling, CONVERSATION[2]])
    calls = """[get_weather(city='Rome'), get_weather(city="it's", n=[1.5, None, True])]"""
    assert f"Well.\n<|tool_call_start|>{calls}<|tool_call_end|><|im_end|>" in text
    answer = f"<|tool_call_start|>{calls}<|tool_call_end|>"
    assert [call.name for call in parse_answer(plan(PLAIN_LFM2), answer).tool_calls] == ["get_weather"] * 2


def test_a_call_with_a_key_that_is_no_name_of_python_is_written_as_json() -> None:
    function = {"name": "get_weather", "arguments": '{"max-results": 1}'}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}
    text = prompt(PLAIN_LFM2, messages=[CONVERSATION[0], calling, CONVERSATION[2]])
    written = '<|tool_call_start|>[{"name": "get_weather", "arguments": {"max-results": 1}}]<|tool_call_end|>'
    assert written in text
    (call,) = parse_answer(plan(PLAIN_LFM2), written).tool_calls
    assert call.arguments == '{"max-results": 1}'


def test_tools_are_described_with_a_call_in_the_format_that_the_template_writes() -> None:
    template = DEEPSEEK_V31.replace("{{ bos_token }}", "{{ bos_token }}{{ messages[0].content }}") + (
        "{% if messages[-1].role == 'tool' %}<｜tool▁output▁begin｜>{{ messages[-1].content }}{% endif %}"
    )
    text = prompt(template)
    example = '<｜tool▁call▁begin｜>the_name<｜tool▁sep｜>{"an_argument": "its value"}<｜tool▁call▁end｜>'
    assert f"<｜tool▁calls▁begin｜>{example}<｜tool▁calls▁end｜>" in text
    assert '<tools>\n{"name": "get_weather"' in text
    assert '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>' in text
    assert text.endswith("<｜tool▁output▁begin｜>sunny")
    hybrid = plan(template + "{{ '<think>' if thinking }}{# </think> #}")
    assert parse_answer(hybrid, "It is sunny.").content == "It is sunny."
    assert "<tool_call>" not in text


@pytest.mark.parametrize("template", ["llama31", "gpt_oss"])
def test_templates_that_write_one_call_get_each_call_in_a_turn_before_its_result(template: str) -> None:
    calls = [{"id": name, "function": {**FUNCTION, "arguments": f'{{"city": "{name}"}}'}} for name in ("Oslo", "Bern")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"in {name}"} for name in ("Bern", "Oslo")]
    text = prompt(template, messages=[CONVERSATION[0], {"role": "assistant", "tool_calls": calls}, *results])
    order = [text.index(part) for part in ('"Oslo"', "in Oslo", '"Bern"', "in Bern")]
    assert order == sorted(order)


def test_reasoning_is_given_by_the_name_that_the_template_reads() -> None:
    template = f"{START}{{{{ m.thinking }}}}{{% endfor %}}"
    assert prompt(template).endswith("Hm.<|im_start|>tool\nsunny")
    assert "Hm." not in prompt(template + "{# reasoning_content #}")
    assert "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>" in prompt(COHERE)


def test_tags_around_an_answer_are_removed_with_and_without_reasoning() -> None:
    answers = [
        (plan(HUNYUAN), "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm."),
        (plan(HUNYUAN, chat_template_kwargs={"enable_thinking": False}), "<answer>\nYes.\n</answer>", ""),
        (plan(COHERE), "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm."),
        (plan(COHERE), "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", ""),
        (plan(COHERE), "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", "Hm."),
        (plan(COHERE), "<|START_TEXT|>Yes.<|END_TEXT|>", ""),
        (plan(COHERE, tool_choice="none"), "<|START_TEXT|>Yes.<|END_TEXT|>", ""),
        (plan(APRIEL), "Hm. \n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]\n", "Hm."),
    ]
    for planned, answer, reasoning in answers:
        parsed = parse_answer(planned, answer)
        assert (parsed.content, parsed.reasoning) == ("Yes.", reasoning)
    tags = planner(COHERE, reasoning_parser="none").plan(plan_body())
    assert parse_answer(tags, "<|START_TEXT|>Yes.<|END_TEXT|>").content == "Yes."
    granite = plan(f"{START}{{% endfor %}}{{# </think> <response></response> #}}")
    assert parse_answer(granite, "<response><a/></response>").content == "<response><a/></response>"
    assert parse_answer(granite, "<think>Hm.</think><response>\nYes.\n</response>").content == "Yes."
    assert parse_answer(plan(HUNYUAN, tool_choice="required"), f"[{CALL}]").tool_calls[0].name == "get_weather"


def test_the_closing_tag_is_removed_from_an_answer_that_goes_on_with_a_message() -> None:
    messages = [CONVERSATION[0], {"role": "assistant", "content": "It is "}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert parse_answer(plan(COHERE, **fields), "sunny.<|END_RESPONSE|>").content == "sunny."
    assert parse_answer(plan(HUNYUAN, **fields), "sunny.</answer>").content == "sunny.</answer>"


def test_a_call_in_reasoning_that_is_not_closed_is_returned_if_the_model_chooses_calls() -> None:
    answer = f"<think>Hm.\n<tool_call>{CALL}</tool_call>"
    parsed = parse_answer(plan("qwen3"), answer)
    assert ([call.name for call in parsed.tool_calls], parsed.reasoning) == (["get_weather"], "Hm.")
    assert parse_answer(plan("qwen3", tool_choice="none"), answer).reasoning.endswith("</tool_call>")


def test_text_before_a_call_is_a_turn_for_a_template_that_writes_calls_only_without_text() -> None:
    messages = [CONVERSATION[0], {**CONVERSATION[1], "content": "Let me see."}]
    text = prompt(DEEPSEEK_V3 + "{# 'tool' #}", messages=messages)
    assert "<｜Assistant｜>Let me see.<｜end▁of▁sentence｜><｜Assistant｜><｜tool▁calls▁begin｜>" in text


def test_tools_are_completed_for_a_template_that_rejects_them() -> None:
    strict = (
        "{{ messages[0].content }}{% for t in tools %}{% set f = t.function %}{{ f.description + f.name }}"
        "{% for k, v in f.parameters.properties.items() %}({{ k + v.type + v.description }}){% endfor %}{% endfor %}"
    )
    parts = {"a": {"type": ["string", "null"]}, "b": {"type": "integer", "description": "B"}}
    functions = [
        {"name": "f"},
        {"name": "g", "description": "G", "parameters": {"type": "object", "properties": parts}},
        {"name": "h", "parameters": {"properties": None}},
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    assert prompt(strict, tools=tools) == "Weather?fGg(astring)(bintegerB)h"
    with pytest.raises(RequestError, match="no attribute 'kind'"):
        prompt(strict.replace("v.type", "v.kind"), tools=tools)


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system') }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("template", [TEMPLATES["llama31"], TEMPLATES["gpt_oss"], DEEPSEEK_V3 + "{# 'tool' #}"])
def test_turns_that_are_combined_for_a_strict_template_keep_their_calls(template: str) -> None:
    calls = [{"id": name, "function": {**FUNCTION, "arguments": f'{{"city": "{name}"}}'}} for name in ("Oslo", "Bern")]
    calling = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    later = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "So?"}]
    text = prompt(SYSTEM_FIRST + template, messages=[CONVERSATION[0], calling, *later])
    assert all(part in text for part in ("Oslo", "Bern", "Be brief.\n\nSo?"))


R1 = (
    "{{ tools or '' }}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'tool' %}"
    "<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>{% else %}{{ m.tool_calls }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>{% endif %}{# </think> #}"
)


def test_an_answer_after_a_result_is_reasoning_only_if_the_prompt_begins_a_turn() -> None:
    def answered(text: str, template: str = R1, **fields: Any) -> DeltaMessage:
        planned = planner(template, tool_call_parser="deepseek_v3").plan(plan_body(**fields))
        return parse_answer(planned, text)

    assert answered("It is sunny.").content == "It is sunny."
    assert answered("<think>Hm.</think>It is sunny.").reasoning == "Hm."
    assert answered("Hm.", messages=CONVERSATION[:1]).reasoning == "Hm."
    assert answered("Hm.", R1.replace(" and messages[-1].role != 'tool'", "")).reasoning == "Hm."


ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(("statement", "num_renders"), [("{{ raise_exception('no') }}", 4), (ENDLESS, 1)])
def test_a_request_that_a_template_rejects_is_rendered_a_few_times(
    statement: str, num_renders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (template_sandbox, conversation):
        monkeypatch.setattr(module, "CPU_SECONDS", 0.05)
    renders: list[Any] = []
    render = ChatTemplate.render

    def counted(template: ChatTemplate, messages: Any, **variables: Any) -> Any:
        renders.append(messages)
        return render(template, messages, **variables)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    body = {"messages": CONVERSATION, "tools": [{"type": "function", "function": {"name": "f"}}]}
    planned = planner(f"{START}{statement}{{% endfor %}}")
    renders.clear()
    with pytest.raises(RequestError):
        planned.plan(ChatCompletionRequest.model_validate(body))
    assert len(renders) == num_renders
