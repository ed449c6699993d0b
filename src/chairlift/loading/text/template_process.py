"""TemplateProcess: runs chat templates in a separate process, which is killed if it does not answer.

The sandbox of Jinja2 isolates a template from the machine, but limits neither its time nor its memory, and one
operation (`"x" * 10**10`) can exhaust both.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from chairlift.errors import RequestError
from chairlift.system.child_process import START_SECONDS, ChildProcess

TIMEOUT_SECONDS = 10.0
"""The maximum wall-clock time of one answer. The worker's limit in CPU seconds is much lower."""
PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "HOME", "LD_LIBRARY_PATH")
"""The environment variables of the process. Others may contain secrets."""


class TemplateProcess(ChildProcess):
    """Starts a worker process at the first request, and another one if it has ended.

    Any thread may call `run`; requests run one at a time.
    """

    def __init__(self, seconds: float = TIMEOUT_SECONDS) -> None:
        environment = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        super().__init__("chairlift.loading.text.template_worker", env=environment)
        self._seconds = seconds
        self._requests = threading.Lock()

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the worker and return its answer (see `template_worker.answer`).

        The CPU time is charged to the account of the calling thread.

        Raises:
            RequestError: The worker ended or did not answer in time, or `request` is not made of JSON values.
        """
        try:
            content = json.dumps(request).encode()
        except (TypeError, ValueError) as error:
            raise RequestError(f"messages: must contain only JSON values: {error}", "messages") from None
        with self._requests:
            seconds = self._seconds
            if not self.is_running:
                self.start()
                seconds = START_SECONDS
            try:
                answer: dict[str, Any] = json.loads(self.exchange(content, seconds=seconds))
            except (OSError, EOFError):
                self.close()
                problem = f"was stopped: it gave no answer within {seconds:g} s, or exceeded a limit of time or memory"
                raise RequestError(f"messages: the model's chat template {problem}", "messages") from None
        return answer


_OWN_TEMPLATES = TemplateProcess()
_REQUEST_TEMPLATES = TemplateProcess()


def run_template(request: dict[str, Any], *, from_request: bool = False) -> dict[str, Any]:
    """Run a template in the worker process of its kind; see `TemplateProcess.run`.

    Args:
        from_request: whether the template is part of an API request. Such templates share a process of their own, so
            that they can neither delay nor observe the conversations that the server's template renders.
    """
    return (_REQUEST_TEMPLATES if from_request else _OWN_TEMPLATES).run(request)
