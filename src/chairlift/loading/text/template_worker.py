"""The process that renders chat templates: it reads a line of JSON and writes a line of JSON.

A timer of CPU seconds ends a template that loops. A single operation that does not return is ended by the limit on the
CPU time of this process, or by the parent process; the limit on memory ends one that allocates too much. In case a
template leaves the sandbox, the process can open no file or socket, write no file and start no process.
"""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType
from typing import Any

import jinja2

from chairlift.loading.text.marked_text import MarkedText, from_spans, template_spans, template_text
from chairlift.loading.text.template_sandbox import compile_template, undeclared_variables

CPU_SECONDS = 2.0
MEMORY_BYTES = 1 << 30
MAX_OUTPUT_CHARACTERS = 16 << 20
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles that count as template text: some templates spell a special token out of them, such as `<|user|>`."""


class OutOfTimeError(BaseException):
    """The CPU time is used up. It is not an `Exception`, so that Jinja2 does not catch it."""


def _ring(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTimeError


def limit_this_process() -> None:
    """Bound the resources of this process, and ignore Ctrl-C at the terminal, which is for the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGVTALRM, _ring)
    import resource

    _import_what_templates_use()
    none = (0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, none)
    resource.setrlimit(resource.RLIMIT_FSIZE, none)
    resource.setrlimit(resource.RLIMIT_NPROC, none)
    resource.setrlimit(resource.RLIMIT_NOFILE, none)


def _import_what_templates_use() -> None:
    """Load what Python and Jinja2 import when it is first needed, while files can still be opened."""
    for template in (
        "{{ lipsum(n=1) }}{{ 'a b' | wordwrap(1) }}{{ [1] | pprint }}{{ [1] | random }}{{ '<b>' | striptags }}",
        "{{ strftime_now('%c %Z') }}{{ 'http://a.b' | urlize }}{{ 'a'.encode('utf-16') }}",
        "{% for a in nothing.more %}{% endfor %}",
        "{% if %}",
    ):
        answer({"do": "render", "template": template, "variables": {}})


def _limit_cpu_time(seconds: float) -> None:
    """The kernel ends the process if it computes for longer than this from now on, whatever it is doing."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, hard))


def answer(request: dict[str, Any], cpu_seconds: float = CPU_SECONDS) -> dict[str, Any]:
    """The result of a request: `text` and the `spans` of template text in it, or `variables`; or `error` ("syntax",
    "refused") and a `message`.

    Args:
        request: `do` ("render" or "variables") and the `template`; to render it, its `variables`, the names of those
            that are template text (`template_variables`), and the spans of template text in message fields (`marks`:
            index of the message, name of the field, spans).
    """
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        return _answer(request)
    except OutOfTimeError:
        return _error("refused", f"it was stopped after {cpu_seconds:g} s of computing")
    except MemoryError:
        return _error("refused", f"it needs more than {MEMORY_BYTES >> 20} MiB of memory")
    except jinja2.TemplateSyntaxError as error:
        return _error("syntax", f"line {error.lineno}: {error.message}")
    except OSError:  # its text names files of this machine
        return _error("refused", "it uses something that is not available to templates")
    except Exception as error:  # a template is a foreign program and can raise anything
        return _error("refused", str(error)[:1000] or type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "variables":
        return {"variables": undeclared_variables(request["template"])}
    text = compile_template(request["template"]).render(**marked_variables(request))
    if len(text) > MAX_OUTPUT_CHARACTERS:
        return _error("refused", f"the prompt would have {len(text)} characters")
    return {"text": text, "spans": template_spans(text)}


def marked_variables(request: dict[str, Any]) -> dict[str, Any]:
    """The variables of a request with every string in them marked: content, unless the request marks it as template
    text or it is the role of a message."""
    variables: dict[str, Any] = request["variables"]
    _mark_as_content(variables)
    for name in request.get("template_variables", ()):
        variables[name] = template_text(variables[name])
    messages = variables.get("messages", [])
    for message in messages:
        if isinstance(message, dict) and (role := message.get("role")) in ROLES:
            message["role"] = template_text(role)
    for index, field, spans in request.get("marks", ()):
        messages[index][field] = from_spans(messages[index][field], spans)
    return variables


def _mark_as_content(variables: dict[str, Any]) -> None:
    pending: list[Any] = [variables]
    while pending:
        container = pending.pop()
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, str):
                container[key] = MarkedText(value)
            elif isinstance(value, (dict, list)):
                pending.append(value)


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": kind, "message": message}


def main() -> None:
    """Answer requests until the parent process closes the pipe."""
    limit_this_process()
    for line in sys.stdin:
        _limit_cpu_time(1.5 * CPU_SECONDS)
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
