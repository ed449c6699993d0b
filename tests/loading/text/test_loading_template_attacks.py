"""Hostile chat templates: what the sandbox forbids, and the limits on time and output.

docs/robustness.md refers to these cases.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from chairlift.errors import RequestError
from chairlift.loading.text import template_sandbox
from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.loading.text.marked_text import is_template_text, unmarked

USER = [{"role": "user", "content": "hi"}]


def render(text: str, **extra: Any) -> str:
    return unmarked(ChatTemplate(text, {}).render(USER, **extra))


INACCESSIBLE = {
    "class of a string": "{{ ''.__class__ }}",
    "attr filter": "{{ ''|attr('__class__') }}",
    "item instead of attribute": "{{ messages[0]['__class__'] }}",
    "name put together": "{{ messages[0].content['__cla' ~ 'ss__'] }}",
    "marks of a string": "{{ messages[0].content._mask }}{{ messages[0].content|attr('_mask') }}",
    "str.format": "{{ '{0.__class__}'.format('') }}",
    "str.format with names": "{{ '{a.__class__}'.format(a='') }}",
    "str.format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "format method through attr": "{{ ('{0.__class__}'|attr('format'))('') }}",
    "format method through map": "{{ (['{0.__class__}']|map(attribute='format')|first)('') }}",
    "join by attribute": "{{ ['a']|join(attribute='__class__') }}",
    "globals of a function": "{{ lipsum.__globals__ }}{{ lipsum|attr('__globals__') }}",
    "globals of a helper": "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}",
    "globals of a method": "{{ cycler('a').reset.__globals__ }}{{ messages[0].content.strip.__globals__ }}",
    "owner of a method": "{{ messages[0].content.strip.__self__ }}{{ messages[0].content.strip.__func__ }}",
    "inside of a namespace": "{% set ns = namespace() %}{{ ns._Namespace__attrs }}",
    "inside of self": "{{ self._TemplateReference__context }}",
    "inside of a loop": "{% for a in [1] %}{{ loop._iterable }}{% endfor %}",
    "inside of a macro": "{% macro m() %}{% endmacro %}{{ m._func }}{{ m._environment }}",
    "inside of caller": "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}x{% endcall %}",
    "frame of a generator": "{{ (messages|map('upper')).gi_frame }}{{ ([1]|map('string')).gi_code }}",
    "inside of undefined": "{{ nothing._undefined_exception }}{{ nothing.__class__ }}",
    "names of the compiled template": "{{ environment }}{{ context }}{{ concat }}{{ resolve }}{{ l_0_messages }}",
    "builtins": "{{ __builtins__ }}{{ __import__ }}{{ config }}{{ request }}{{ os }}{{ sys }}",
    "class of a class": "{{ range.__class__ }}{{ dict.__subclasses__ }}{{ dict.__base__ }}",
}
"""They see an undefined value, which is written as nothing."""

FORBIDDEN = {
    "subclasses of object": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals of a class": ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    "globals of an instance": ("{{ joiner('x').__init__.__globals__ }}", "unsafe"),
    "globals of namespace": ("{{ namespace.__init__.__globals__ }}", "unsafe"),
    "globals of loop": ("{% for a in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}", "unsafe"),
    "call of a macro": ("{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}", "unsafe"),
    "str.format, two steps": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe"),
    "open": ("{{ open('/etc/passwd').read() }}", "undefined"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "from import": ("{% from 'os' import environ %}", "no loader"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "extends": ("{% extends '/etc/passwd' %}", "no loader"),
    "do": ("{% do messages.append(1) %}", "unknown tag"),
    "debug": ("{% debug %}", "unknown tag"),
    "list is changed": ("{{ messages.append(1) }}", "unsafe"),
    "dict is changed": ("{{ messages[0].update({'a': 1}) }}", "unsafe"),
    "dict is extended": ("{{ messages[0].setdefault('z', 1) }}", "unsafe"),
    "global is changed": ("{% set lipsum.x = 1 %}", "non-namespace"),
    "class is changed": ("{% set namespace.x = 1 %}", "non-namespace"),
    "codec of bytes": ("{{ 'a'.encode('zlib') }}", "not a text encoding"),
}
"""Template and a part of the reason."""

BEYOND_LIMITS = {
    "long string": ("{{ 'x' * 10**11 }}", "beyond 16777216 entries"),
    "long list": ("{{ (10**10 * [0]) | length }}", "beyond 16777216 entries"),
    "range": ("{{ range(10**12) | list }}", "Range too big"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "recursion in two branches": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
        "stopped after",
    ),
    "doubling": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "characters",
    ),
    "nested brackets": ("{{ " + "[" * 3000 + "]" * 3000 + " }}", "recursion"),
    "nested parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
    "nested blocks": ("{% if 1 %}" * 200 + "{% endif %}" * 200, "indentation"),
    "long expression": ("{{ 1" + " and 1" * 20_000 + " }}", "recursion"),
    "long output": ("{% set part = 'x' * 1000000 %}{% for i in range(20) %}{{ part }}{% endfor %}", "characters"),
    "one long string": ("{{ 'x' | center(10**8) }}", "characters"),
    "loop": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "stopped after"),
    "loop over a variable": (
        "{% set r = range(99999) | list %}{% for a in r %}{% for b in r if b == 'x' %}{% endfor %}{% endfor %}",
        "stopped after",
    ),
}
"""Template and a part of the reason."""

HARMLESS = {
    "powers": ("{{ (9 ** (9 ** 2)) | string | length }}", "78"),
    "long date": ("{{ strftime_now('%1000000000Y') | length < 100 }}", "True"),
    "many dates": ("{{ strftime_now('%Y' * 10**5) | length }}", "400000"),
    "null byte in a date": ("{{ strftime_now('\0') | length < 2 }}", "True"),
    "brackets around a link": ("{{ ('(' * 5000 + 'http://a.b' + ')' * 5000) | urlize | length > 5000 }}", "True"),
    "unfinished tags": ("{{ ('<!--' * 10**4) | striptags | length >= 0 }}", "True"),
    "namespace with odd names": ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}", ""),
    "self": ("{{ self }}", "<TemplateReference None>"),
    "type by name": ("{{ messages[0].content is string }}{{ 1 | attr('real') }}", "True1"),
}


@pytest.mark.parametrize("name", INACCESSIBLE)
def test_inaccessible_names_are_undefined(name: str) -> None:
    assert render(INACCESSIBLE[name]) == ""


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_operations_are_rejected(name: str) -> None:
    text, reason = FORBIDDEN[name]
    with pytest.raises(RequestError, match=reason) as caught:
        render(text)
    assert not re.search(r"\.py|/lib/|/etc/(?!passwd')", str(caught.value)), "the error contains a path"


@pytest.mark.parametrize("name", BEYOND_LIMITS)
def test_templates_are_stopped_at_the_limits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, reason = BEYOND_LIMITS[name]
    if reason == "stopped after":
        monkeypatch.setattr(template_sandbox, "CPU_SECONDS", 0.3)
    started = time.thread_time()
    with pytest.raises(RequestError, match=f"messages: the model's chat template rejects them: .*{reason}"):
        render(text)
    assert time.thread_time() - started < 3 * template_sandbox.CPU_SECONDS  # A probe of the template is stopped too.
    assert render("{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_templates_are_rendered(name: str) -> None:
    text, expected = HARMLESS[name]
    assert render(text) == expected


@pytest.mark.parametrize("filter_name", ["sort", "unique", "groupby", "map", "selectattr", "min", "sum"])
def test_filters_with_an_attribute_cannot_access_classes(filter_name: str) -> None:
    option = "'__class__'" if filter_name in ("groupby", "selectattr") else "attribute='__class__'"
    try:
        text = render("{{ ['a'] | " + filter_name + "(" + option + ") | list }}")
    except RequestError:
        return
    assert "class" not in text.replace("__class__", "")


def test_no_state_is_kept_between_renders() -> None:
    text = "{{ secret }}{% set secret = 1 %}{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    assert render(text, secret="mine") == "mine1"
    assert render(text) == "1"
    turns = "{% set turns = cycler('a', 'b') %}{{ turns.next() }}"
    assert [render(turns), render(turns)] == ["a", "a"]


def test_constants_are_not_evaluated_to_find_variables() -> None:
    assert ChatTemplate("{% if messages[1] %}{{ 'x' * 10**12 }}{% endif %}{{ tools }}", {}).variables == {
        "messages",
        "tools",
    }
    assert render("{% if messages[1] %}{{ 'x' * 10**12 }}{% endif %}") == ""


def test_a_template_gets_copies_of_json_values_only() -> None:
    with pytest.raises(RequestError, match="must contain only JSON values: got an object of type module"):
        render("{{ thing }}", thing=[time])
    given = [{"role": "user", "content": "hi"}]
    assert ChatTemplate("{{ messages[0].content }}", {}).render(given) == "hi"
    assert [type(value) for value in given[0].values()] == [str, str]


def test_template_cannot_mark_content_as_template_text() -> None:
    content = "<|im_end|>"
    for text in (
        "{{ messages[0].content }}",
        "{{ messages[0].content | string | trim | upper | lower }}",
        "{{ messages[0].content | list | join }}",
        "{{ '%s' | format(messages[0].content) }}",
        "{{ '{}'.format(messages[0].content) }}",
        "{{ messages[0].content.split('im')[0] ~ messages[0].content[2:] }}",
        "{{ ''.join([messages[0].content]) }}",
        "{{ 'x'.replace('x', messages[0].content) }}",
        "{{ {'a': messages[0].content}['a'] }}",
        "{% set a %}{{ messages[0].content }}{% endset %}{{ a }}",
        "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(messages[0].content) }}",
        "{% for letter in messages[0].content %}{{ letter }}{% endfor %}",
        "{{ messages[0].content.encode().decode() }}",
        "{{ messages[0] | tojson }}",
        "{{ messages }}",
    ):
        written = ChatTemplate(text, {}).render([{"role": "user", "content": content}])
        assert "<" in written
        assert not any(is_template_text(letter) for letter in written)
