"""The program of the process that renders chat templates. Its requests and answers are frames of JSON.

A timer of CPU seconds stops a template that loops. A single operation that does not return is stopped by the limit on
the CPU time of this process or by the parent process, and one that allocates too much by the limit on memory. If a
template escapes from the sandbox, the process cannot open or write files, open sockets or start processes.
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
from chairlift.system.child_process import read_frame, write_frame

CPU_SECONDS = 2.0
MEMORY_BYTES = 1 << 30
MAX_OUTPUT_CHARACTERS = 16 << 20
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles that are template text, because some templates build special tokens from them, such as `<|user|>`."""


class OutOfTimeError(BaseException):
    """The CPU time is exhausted. It is not an `Exception`, so Jinja2 does not catch it."""


def _raise_out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTimeError


def limit_process() -> None:
    """Limit the resources of this process, and ignore SIGINT, which the terminal sends for the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGVTALRM, _raise_out_of_time)
    import resource

    _import_lazy_modules()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):
        resource.setrlimit(limit, (0, 0))


def _import_lazy_modules() -> None:
    """Import the modules that Python and Jinja2 import on first use, while files can still be opened."""
    for template in (
        "{{ lipsum(n=1) }}{{ 'a b' | wordwrap(1) }}{{ [1] | pprint }}{{ [1] | random }}{{ '<b>' | striptags }}",
        "{{ strftime_now('%c %Z') }}{{ 'http://a.b' | urlize }}{{ 'a'.encode('utf-16') }}",
        "{% for a in nothing.more %}{% endfor %}",
        "{% if %}",
    ):
        answer({"operation": "render", "template": template, "variables": {}})


def _limit_cpu_time(seconds: float) -> None:
    """Let the operating system kill the process after this CPU time from now on, even inside one operation."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, hard))


def answer(request: dict[str, Any], cpu_seconds: float = CPU_SECONDS) -> dict[str, Any]:
    """Return the result of a request.

    It has `text` and the `spans` of template text in it, or `variables`, or `error` ("syntax" or "rejected") and
    `message`.

    Args:
        request: `operation` ("render" or "variables") and the `template`. To render it, also its `variables`, the names
            of those that are template text (`template_variables`), and the spans of template text in message fields
            (`marks`: index of the message, name of the field, spans).
    """
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        return _answer(request)
    except OutOfTimeError:
        return _error("rejected", f"it was stopped after {cpu_seconds:g} s of CPU time")
    except MemoryError:
        return _error("rejected", f"it needs more than {MEMORY_BYTES >> 20} MiB of memory")
    except jinja2.TemplateSyntaxError as error:
        return _error("syntax", f"line {error.lineno}: {error.message}")
    except OSError:  # The text of the error may contain file names of this machine.
        return _error("rejected", "it uses a resource that is not available to templates")
    except Exception as error:  # A template can raise any exception.
        return _error("rejected", str(error)[:1000] or type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["operation"] == "variables":
        return {"variables": undeclared_variables(request["template"])}
    text = compile_template(request["template"]).render(**marked_variables(request))
    if len(text) > MAX_OUTPUT_CHARACTERS:
        return _error("rejected", f"the prompt has {len(text)} characters; the limit is {MAX_OUTPUT_CHARACTERS}")
    return {"text": text, "spans": template_spans(text)}


def marked_variables(request: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a request with every string marked.

    Strings are content, except the roles of messages and what the request marks as template text.
    """
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
    limit_process()
    while (request := read_frame(sys.stdin.buffer)) is not None:
        _limit_cpu_time(1.5 * CPU_SECONDS)
        write_frame(sys.stdout.buffer, json.dumps(answer(json.loads(request))).encode())


if __name__ == "__main__":
    main()
