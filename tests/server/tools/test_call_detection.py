"""The format of calls is derived from what a chat template writes for a call."""

from __future__ import annotations

import logging

import pytest
from test_call_formats import FAMILIES, ONE_CALL, TEXT_ARGUMENTS, template_of

from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.server.tools.answer_formats import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    reasoning_format,
    tool_call_format,
)
from chairlift.server.tools.call_detection import call_style, detected_format
from chairlift.server.tools.tool_instructions import completed_tool
from support.call_templates import DEEPSEEK_V31, KIMI, UNKNOWN


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_is_derived_from_what_the_template_writes(family: str, caplog: pytest.LogCaptureFixture) -> None:
    name, text = FAMILIES[family]
    template = template_of(text)
    style = call_style(template)
    assert detected_format("auto", template, style) is TOOL_CALL_FORMATS[name]
    assert caplog.text == ""
    assert style.has_text_arguments == (family in TEXT_ARGUMENTS)
    assert style.has_null_content == (family == "deepseek_v3")
    assert style.has_one_call == (family in ONE_CALL)


def test_a_call_in_an_unknown_form_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    template = template_of(UNKNOWN)
    with caplog.at_level(logging.WARNING):
        assert detected_format("auto", template, call_style(template)) is None
        assert "CALL qzvx WITH" in caplog.text
        assert len(caplog.records) == 1
        caplog.clear()
        assert detected_format("mistral", template, call_style(template)) is TOOL_CALL_FORMATS["mistral"]
    assert caplog.text == ""


def test_the_example_of_a_call_is_the_text_up_to_its_end() -> None:
    style = call_style(template_of(DEEPSEEK_V31))
    call = '<｜tool▁call▁begin｜>the_name<｜tool▁sep｜>{"an_argument": "its value"}<｜tool▁call▁end｜>'
    expected = f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"
    assert style.example(TOOL_CALL_FORMATS["deepseek_v3"]) == expected
    assert style.example(TOOL_CALL_FORMATS["kimi_k2"]) is None
    assert "<|tool_calls_section_end|>" in (call_style(template_of(KIMI)).example(TOOL_CALL_FORMATS["kimi_k2"]) or "")
    mistral = call_style(template_of(FAMILIES["mistral"][1])).example(TOOL_CALL_FORMATS["mistral"])
    assert (mistral or "").endswith("}]")
    assert call_style(None).example(TOOL_CALL_FORMATS["hermes"]) is None


def test_the_call_format_is_derived_from_the_chat_template() -> None:
    expected = {
        "[TOOL_CALLS]": "mistral",
        "Environment: ipython <|python_tag|>": "llama3_json",
        "ipython [func_name1(params_name1=params_value1)]": "pythonic",
        "<tool_call> <function=NAME> <parameter=KEY>": "qwen3_coder",
        "<tool_call>NAME <arg_key>": "glm45",
        "<|im_system|>tool_declare": "kimi_k2",
        "<|tool|>": "phi4_mini_json",
        "{% set prompt = 'List of tools: [' %} <|im_start|>system": "lfm2",
        "<|start_of_role|> <|tool_call|>": "granite",
        "<|start_of_role|> <tool_call>": "hermes",
    }
    assert {text: tool_call_format("auto", text) for text in expected} == {
        text: TOOL_CALL_FORMATS[name] for text, name in expected.items()
    }
    assert tool_call_format("auto", None) is None


def test_the_reasoning_format_is_derived_from_the_chat_template() -> None:
    expected = {
        "<\uff5cAssistant\uff5c><think> </think>": "deepseek_r1",
        "<\uff5cAssistant\uff5c>{% if not thinking %}</think>{% else %}<think>{% endif %}": "qwen3",
        "<\uff5cAssistant\uff5c></think>{# thinking #}": "deepseek_r1",
        "<think> </think>": "qwen3",
        "<|channel>thought <channel|>": "gemma4",
        "[THINK] [/THINK]": "mistral",
        "write 'Here is my thought process:'": "granite",
        "<think></think> <response></response>": "granite33",
        "<think> </think> <tool_response> </response>": "qwen3",
        "Here are my reasoning steps: [BEGIN FINAL RESPONSE] </think>": "apriel",
        "'</think>' '</answer>'": "hunyuan_a13b",
        "<\uff5chy_Assistant\uff5c>": "hunyuan_a13b",
        "</seed:think>": "seed_oss",
        "<|START_THINKING|><|END_THINKING|>": "cohere_command3",
    }
    assert {text: reasoning_format("auto", ChatTemplate(text, {})) for text in expected} == {
        text: REASONING_FORMATS[name] for text, name in expected.items()
    }
    assert reasoning_format("auto", ChatTemplate("<\uff5cAssistant\uff5c>", {})) is None
    assert reasoning_format("none", ChatTemplate("</think>", {})) is None
    assert reasoning_format("auto", None) is None


def test_a_tool_with_many_parameters_is_completed_in_linear_time() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {str(i): {} for i in range(200_000)}}},
    }
    properties = completed_tool(tool)["function"]["parameters"]["properties"]
    assert properties == {str(i): {"description": ""} for i in range(200_000)}
    assert tool["function"]["parameters"]["properties"]["0"] == {}
