"""Chat templates: their functions and errors, and the forms of content that they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.engine.chat_arguments import with_joined_parts
from chairlift.errors import RequestError
from chairlift.loading.text.chat_template import ChatTemplate, TextParts, named_templates
from chairlift.loading.text.hf_tokenizer import folder_tokenizer
from support.byte_tokenizer import write_byte_tokenizer
from support.case_loop import loop_over

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


def test_constructs_of_transformers() -> None:
    assert render("a\n  {% if true %}\n  b\n  {% endif %}\nc") == "a\n  b\nc"
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("a{% generation %}{{ bos_token }}{% endgeneration %}b") == "a<s>b"
    assert json.loads(render("{{ messages[0] | tojson }}")) == USER
    assert render("{{ messages[0].content | tojson }}") == "\"<hi> & 'bye' é\""
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}") == '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}'
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


PARTS = "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}<image>{% endif %}{% endfor %}"
FORMS = {
    "text": "{{ m.content }}",
    "trimmed text": "{{ (m['role'] + ': ' + m['content']) | trim }}",
    "json": "{{ m | tojson }}",
    "parts": PARTS,
    "parts after a look at the first": "{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}" + PARTS,
    "selected parts": "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}",
    "parts that a filter joins": "{{ m.content | map(attribute='text') | join('') }}",
    "parts alone": "{% if m.content is string %}{{ raise_exception('a list') }}{% endif %}" + PARTS,
    "parts of a variable": "{% set content = m.content %}{% for p in content %}{{ p.text }}{% endfor %}",
    "parts in a macro": "{% macro w(c) %}{% for p in c %}{{ p['text'] }}{% endfor %}{% endmacro %}{{ w(m.content) }}",
    "first part": "{{ m.content[0]['text'] }}",
    "first part in a macro": "{% macro write(c) %}{{ c[0].text | trim }}{% endmacro %}{{ write(m['content']) }}",
    "either": "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}",
    "either, of a list the first": "{{ m.content if m.content is string else m.content[0].text }}",
}
"""How templates write the content of the message `m`."""

JOINED = {"text", "trimmed text", "json", "first part", "first part in a macro", "either, of a list the first"}
"""The forms that read no list of several parts: the texts are joined as in vLLM and llama.cpp."""

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
TOOL = {"type": "function", "function": {"name": "f"}}


def template(form: str) -> ChatTemplate:
    return ChatTemplate("{% for m in messages %}[" + FORMS[form] + "]{% endfor %}", {})


def conversation(content: str) -> list[dict[str, Any]]:
    turns = [{"role": role, "content": content} for role in ("system", "user", "assistant", "user")]
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    return [*turns, calling, {"role": "tool", "content": content, "name": "f", "tool_call_id": "abcdefghi"}]


@loop_over("form", FORMS)
def test_the_words_of_every_role_are_in_the_prompt(form: str) -> None:
    for content, written in (("Hello", "Hello"), (TextParts(["Hello"]), "Hello"), (TextParts(["a", "", "="]), "a=")):
        prompt = str(template(form).render(conversation(content)))
        if written == "a=" and form in JOINED:
            written = json.dumps("a\n=")[1:-1] if form == "json" else "a\n="
        assert prompt.count(written) == 5
        assert "'type'" not in prompt


def test_a_template_for_tools_has_its_own_form() -> None:
    loop = "{% for m in messages %}" + FORMS["parts"] + "{% endfor %}"
    text = "{% for m in messages %}" + FORMS["text"] + "{% endfor %}"
    for default, with_tools in ((loop, text), (text, loop)):
        made = ChatTemplate({"default": default, "tool_use": with_tools}, {})
        for tools in (None, [TOOL]):
            assert made.render([{"role": "user", "content": "Hello"}], tools=tools) == "Hello"


def test_a_template_that_reads_results_only_with_tools() -> None:
    turns = "{% for m in messages %}" + PARTS + "{% endfor %}"
    rejects = "{% if messages[-1].role == 'tool' and not tools %}{{ raise_exception('no tools') }}{% endif %}"
    assert "Hello" in ChatTemplate(rejects + turns, {}).render(conversation("Hello")[1:], tools=[TOOL])


def test_each_role_has_its_own_form() -> None:
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}" + PARTS + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    assert ChatTemplate(text, {}).render(turns) == "systemuserassistant"


def test_special_tokens_of_content_remain_content() -> None:
    prompt = template("parts").render([{"role": "user", "content": "<s>"}])
    assert prompt == "[<s>]"
    assert [prompt._mask[i] for i in range(len(prompt))] == [1, 0, 0, 0, 1]


def test_offline_parts_are_read_too() -> None:
    parts = [{"type": "text", "text": text} for text in ("a", "=")]
    message = with_joined_parts({"role": "user", "content": parts}, 0)
    assert (template("text").render([message]), template("parts").render([message])) == ("[a\n=]", "[a=]")


def test_files_that_have_the_template(tmp_path: Path) -> None:
    """The first of these files that has a template; transformers 5 reads the last two for processors alone."""
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    files = {
        "processor_config.json": json.dumps({"chat_template": "processor"}),
        "chat_template.json": json.dumps({"chat_template": named}),
        "tokenizer_config.json": json.dumps({"chat_template": "config"}),
        "chat_template.jinja": "jinja",
    }
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert folder_tokenizer(tmp_path).chat_template is None
    expected = ["processor", "named", "config", "jinja"]
    for (name, text), default in zip(files.items(), expected, strict=True):
        (tmp_path / name).write_text(text)
        found = folder_tokenizer(tmp_path).chat_template
        assert found is not None
        assert found.render([]) == default
        assert found.render([], tools=[TOOL]) == ("tools" if default == "named" else default)
