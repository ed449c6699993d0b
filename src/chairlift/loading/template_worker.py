"""The process that renders chat templates: a line of JSON in, a line out. Nothing of the server is in it.

A template that loops is ended by a timer of CPU seconds; one that hangs within a single operation, or takes too much
memory, by whoever started this process and by the limit on its memory.
"""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType
from typing import Any

import jinja2

from chairlift.loading.template_sandbox import compiled, variables_read

CPU_SECONDS = 2.0
MEMORY_BYTES = 1 << 30
MAX_OUTPUT_CHARACTERS = 16 << 20


class OutOfTimeError(BaseException):
    """The timer rang. No `Exception`, so that nothing on the way takes it for one of the template's."""


def _ring(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTimeError


def limit_this_process() -> None:
    """Bound what the process may take; Ctrl-C at the terminal is not for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGVTALRM, _ring)
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer(request: dict[str, Any], cpu_seconds: float = CPU_SECONDS) -> dict[str, Any]:
    """What becomes of a request: `text` or `variables`; or `error` ("syntax", "refused") and a `message`."""
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        return _answer(request)
    except OutOfTimeError:
        return _error("refused", f"it was stopped after {cpu_seconds:g} s of computing")
    except MemoryError:
        return _error("refused", f"it needs more than {MEMORY_BYTES >> 20} MiB of memory")
    except jinja2.TemplateSyntaxError as error:
        return _error("syntax", f"line {error.lineno}: {error.message}")
    except Exception as error:  # a template is a program of somebody else's: anything may come out of it
        return _error("refused", str(error)[:1000] or type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "variables":
        return {"variables": variables_read(request["template"])}
    text = compiled(request["template"]).render(**request["variables"])
    if len(text) > MAX_OUTPUT_CHARACTERS:
        return _error("refused", f"the prompt would have {len(text)} characters")
    return {"text": text}


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": kind, "message": message}


def main() -> None:
    """Answer until the other side closes the pipe."""
    limit_this_process()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
