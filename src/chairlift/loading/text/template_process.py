"""TemplateProcess: runs chat templates in a separate process, which is killed if it does not answer.

The sandbox of Jinja2 isolates a template from the machine, but limits neither its time nor its memory, and one
operation (`"x" * 10**10`) can exhaust both.
"""

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

TIMEOUT_SECONDS = 10.0
"""The maximum wall-clock time of one answer. The worker's limit in CPU seconds is much lower."""
START_SECONDS = 60.0
PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "HOME", "LD_LIBRARY_PATH")
"""The environment variables of the process. Others may contain secrets."""


class TemplateProcess:
    """Starts a worker process at the first request, and another one if it has ended.

    Any thread may call it; requests run one at a time.
    """

    def __init__(self, seconds: float = TIMEOUT_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the worker and return its answer (see `template_worker.answer`).

        The CPU time is charged to the account of the calling thread.

        Raises:
            RequestError: The worker ended or did not answer in time, or `request` is not made of JSON values.
        """
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise RequestError(f"messages: must contain only JSON values: {error}", "messages") from None
        with self._lock:
            process, seconds = self._running_worker()
            try:
                with charge_process(process.pid):
                    return self._exchange(process, line, seconds)
            except (OSError, EOFError, TimeoutError):
                self._kill(process)
                problem = f"was stopped: it gave no answer within {seconds:g} s, or exceeded a limit of time or memory"
                raise RequestError(f"messages: the model's chat template {problem}", "messages") from None

    def _running_worker(self) -> tuple[subprocess.Popen[bytes], float]:
        """Return the worker, which is started if necessary, and the seconds in which it must answer."""
        process = self._process
        if process is not None and process.poll() is None and self._owner == os.getpid():
            return process, self._seconds
        environment = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chairlift.loading.text.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        return self._process, START_SECONDS

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, seconds: float) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        process.stdin.write(line)
        process.stdin.flush()
        received = bytearray()
        descriptor = process.stdout.fileno()
        poll = select.poll()  # `select.select` supports no descriptor beyond 1023.
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
    """Run a template in the worker process of its kind; see `TemplateProcess.run`.

    Args:
        from_request: whether the template is part of an API request. Such templates share a process of their own, so
            that they can neither delay nor observe the conversations that the server's template renders.
    """
    return (_REQUEST_TEMPLATES if from_request else _OWN_TEMPLATES).run(request)
