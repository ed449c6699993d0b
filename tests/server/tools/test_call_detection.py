"""The format of calls is derived from what a chat template writes for a call."""

from __future__ import annotations

import logging

import pytest
from test_call_formats import FAMILIES, ONE_CALL, template_of

from chairlift.server.tools.answer_formats import TOOL_CALL_FORMATS
from chairlift.server.tools.call_detection import call_style, detected_format
from support.call_templates import DEEPSEEK_V31, KIMI, UNKNOWN


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_is_derived_from_what_the_template_writes(family: str, caplog: pytest.LogCaptureFixture) -> None:
    name, text = FAMILIES[family]
    template = template_of(text)
    style = call_style(template)
    assert detected_format("auto", template, style) is TOOL_CALL_FORMATS[name]
    assert caplog.text == ""
    assert style.has_text_arguments == family.startswith("deepseek")
    assert style.has_null_content == (family == "deepseek_v3")
    assert style.has_one_call == (family in ONE_CALL)


def test_a_call_in_an_unknown_form_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    template = template_of(UNKNOWN)
    with caplog.at_level(logging.WARNING):
        assert detected_format("auto", template, call_style(template)) is TOOL_CALL_FORMATS["hermes"]
        assert "CALL qzvx WITH" in caplog.text
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
