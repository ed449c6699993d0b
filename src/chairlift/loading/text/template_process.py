"""Templates run in a process of their own, which is killed if it does not answer: Jinja2's sandbox keeps a template off
the machine, but limits neither its time nor its memory, and one operation (`"x" * 10**10`) can take all of both."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

from chairlift.errors import RequestError
from chairlift.system.cpu_account import charge_process

SECONDS = 10.0
"""By the clock, for one answer; the worker's own limit, in CPU seconds, comes long before."""
START_SECONDS = 60.0
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "HOME", "LD_LIBRARY_PATH")
"""Of the environment; others may hold secrets, and a template could only want to have them."""


class TemplateProcess:
    """Starts a worker when it is first needed, and another one if that is gone. For any thread; one at a time."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer (see `template_worker.answer`). Its CPU time is charged to the account of this thread.

        Raises:
            RequestError: it gave none in time, or died of this; or `request` is no JSON.
        """
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise RequestError(f"messages: a chat template takes plain JSON values: {error}", "messages") from None
        with self._lock:
            process, seconds = self._running()
            try:
                with charge_process(process.pid):
                    return self._ask(process, line, seconds)
            except (OSError, EOFError, TimeoutError):
                self._kill(process)
                problem = f"was stopped: it gave no answer within {seconds:g} s, or took too much time or memory"
                raise RequestError(f"messages: the model's chat template {problem}", "messages") from None

    def _running(self) -> tuple[subprocess.Popen[bytes], float]:
        """The worker, and how long it may take."""
        process = self._process
        if process is not None and process.poll() is None and self._owner == os.getpid():
            return process, self._seconds
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chairlift.loading.text.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        return self._process, START_SECONDS

    def _ask(self, process: subprocess.Popen[bytes], line: bytes, seconds: float) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        process.stdin.write(line)
        process.stdin.flush()
        received = bytearray()
        descriptor = process.stdout.fileno()
        poll = select.poll()  # `select` itself knows no descriptor beyond 1023
        poll.register(descriptor, select.POLLIN)
        while not received.endswith(b"\n"):
            if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise EOFError
            received += chunk
        answer: dict[str, Any] = json.loads(received)
        return answer

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process = None


_OWN_TEMPLATES = TemplateProcess()
_REQUEST_TEMPLATES = TemplateProcess()


def run_template(request: dict[str, Any], *, from_request: bool = False) -> dict[str, Any]:
    """Run a template in the worker process that is shared by all templates of its kind; see `TemplateProcess.run`.

    Args:
        from_request: the template came with an API request. It runs in another process than those of the operator and
            the model, so that it can neither delay nor observe the conversations that these render.
    """
    return (_REQUEST_TEMPLATES if from_request else _OWN_TEMPLATES).run(request)
