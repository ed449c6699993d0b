"""Chat templates: the functions that they can use, and the errors that they cause."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chairlift.errors import RequestError
from chairlift.loading.text.chat_template import ChatTemplate, named_templates

USER = {"role": "user", "content": "<hi> & 'bye' é"}


def render(text: str, messages: list[dict[str, Any]] | None = None, **extra: Any) -> str:
    template = ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render([USER] if messages is None else messages, **extra)


def test_variables() -> None:
    text = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
    assert render(text) == "<s>user:<hi> & 'bye' é</s>"
    assert render("{% if add_generation_prompt %}go{% endif %}") == "go"
    assert render("{% if add_generation_prompt %}go{% endif %}", add_generation_prompt=False) == ""
    assert render("{{ tools is none }} {{ thinking }}", thinking=3) == "True 3"


def test_blocks_are_trimmed() -> None:
    assert render("a\n  {% if true %}\n  b\n  {% endif %}\nc") == "a\n  b\nc"


def test_loop_controls() -> None:
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"


def test_generation_tag_renders_its_body() -> None:
    assert render("a{% generation %}{{ bos_token }}{% endgeneration %}b") == "a<s>b"


def test_tojson_does_not_escape_html() -> None:
    assert json.loads(render("{{ messages[0] | tojson }}")) == USER
    assert render("{{ messages[0].content | tojson }}") == "\"<hi> & 'bye' é\""
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}") == '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}'


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "cannot be compiled"),
        ("{{ messages[0]['nothing']['more'] }}", "nothing"),
        ("{{ messages[7].content }}", "undefined|out of range|no element"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable|immutable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined|access to attribute"),
    ],
)
def test_errors_name_messages_as_the_parameter(text: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        render(text)
    assert caught.value.param == "messages"


def test_named_templates() -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}, {"name": "x"}, "y"]
    assert named_templates("X") == {"default": "X"}
    assert (
        named_templates(named)
        == named_templates({"tool_use": "T", "default": "D"})
        == {"tool_use": "T", "default": "D"}
    )
    assert named_templates([]) == named_templates(None) == named_templates({"default": 1}) == {}


@pytest.mark.parametrize(
    ("named", "without", "with_tools"),
    [
        ({"tool_use": "T", "default": "D"}, "D", "T"),
        ({"default": "D", "rag": "R"}, "D", "D"),
        ({"tool_use": "T"}, "T", "T"),
    ],
)
def test_tools_choose_the_template(named: dict[str, str], without: str, with_tools: str) -> None:
    template = ChatTemplate(named, {})
    assert (template.render([]), template.render([], tools=None)) == (without, without)
    assert template.render([], tools=[]) == template.render([], tools=[{"type": "function"}]) == with_tools
    assert template.text == "".join(dict.fromkeys((without, with_tools)))
