"""The server's side of a preparation worker: starts the process, sends bodies to it, and kills it after a timeout."""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from typing import Final

from chairlift.engine.served_engine import EngineFacts
from chairlift.errors import ChairliftError, Failure, OverloadedError, RequestError
from chairlift.loading.resolve import ModelFiles
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.planners import Planners, PreparedRequest
from chairlift.system.child_process import START_SECONDS, ChildProcess, python_command

logger = logging.getLogger("chairlift")

MAX_MEMORY: Final = 512 << 20
"""A worker that uses more bytes of memory after a body is ended, which frees its memory."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The data with which a worker plans requests.

    Attributes:
        model: as `EngineConfig.model`. The tokenizer is loaded from its files.
        skip_tokenizer_init: as `EngineConfig.skip_tokenizer_init`.
        facts: the description of the engine, as the engine reported it when it was ready.
        api: the options of the API.
        fingerprint: `tokenizer_fingerprint` of the model's files when the server loaded them. A worker that finds
            other files fails, because it might tokenize differently from the server.
        planners: the planners of the endpoints. They are pickled by the names of their functions.
    """

    model: str | None
    skip_tokenizer_init: bool
    facts: EngineFacts
    api: ApiOptions
    fingerprint: str
    planners: Planners


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """The reply of a worker to one body.

    Attributes:
        outcome: the prepared request; the error if the body is invalid; a string if the worker failed for a reason that
            is not in the body, with this reason.
        memory: resident memory of the worker after the body, in bytes.
    """

    outcome: PreparedRequest | RequestError | str
    memory: int


def tokenizer_fingerprint(files: ModelFiles) -> str:
    """A string that identifies the files of a tokenizer by their names, sizes and modification times."""
    path = files.path
    folder = path if path.is_dir() else path.parent
    if files.kind == "gguf":
        found = [path]
    else:
        found = sorted(file for pattern in ("*.json", "*.jinja") for file in folder.glob(pattern))
    stats = [(file.name, file.stat()) for file in found]
    return ";".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def preparation_error(reason: str) -> OverloadedError:
    """The error of a call whose preparation failed for a reason that is not in the request, which is logged."""
    failure = Failure(reason)
    logger.error("a request could not be prepared: %s", failure)
    message, public = (
        f"the request could not be prepared: {text}; send it again, and shorten it if it fails again"
        for text in failure.texts
    )
    return OverloadedError(message, 1.0, "preparation_failed", public)


class PreparationProcess(ChildProcess):
    """A worker process, which is started for the first body, and started again after it has ended.

    The contents of frames are pickled, which is safe because both processes run this program, and request bodies are
    bytes inside of the pickles.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        # Ctrl-C at a terminal must reach only the server, which ends its workers.
        super().__init__(python_command("chairlift.server.preparation.worker"), start_new_session=True)
        self._setup = setup
        self.prepare_call(is_cancelled=False)

    def prepare_call(self, *, is_cancelled: bool) -> None:
        """Reset the state of the previous call. The caller must do this before each `run`, on the thread of `cancel`.

        Args:
            is_cancelled: whether `run` must not process the body.
        """
        self._is_cancelled = is_cancelled

    def run(self, endpoint: str, body: bytes, seconds: float) -> PreparedRequest | ChairliftError:
        """Prepare a body. Return the prepared request or the error of the call.

        Args:
            endpoint: the path of the endpoint.
            seconds: the timeout.
        """
        try:
            reply = self._exchange_body(endpoint, body, seconds)
        except Exception as error:
            self.close()
            if isinstance(error, TimeoutError):
                problem = f"parsing and tokenizing the request took more than {seconds:g} s"
                return RequestError(f"{problem}: shorten it")
            reason = "ended" if isinstance(error, EOFError) else f"failed ({error})"
            return preparation_error(f"the worker process {reason}")
        if isinstance(reply.outcome, str) or reply.memory > MAX_MEMORY:
            self.close()
        return preparation_error(reply.outcome) if isinstance(reply.outcome, str) else reply.outcome

    def _exchange_body(self, endpoint: str, body: bytes, seconds: float) -> WorkerReply:
        requests = [pickle.dumps((endpoint, body))]
        if not self.is_running:
            self.start()
            requests.insert(0, pickle.dumps(self._setup))
            seconds += START_SECONDS
        if self._is_cancelled:  # Perhaps before the process was started, so that `kill` had no effect.
            raise EOFError
        reply = pickle.loads(self.exchange(*requests, seconds=seconds))
        assert isinstance(reply, WorkerReply)
        return reply

    def cancel(self) -> None:
        """End the call that uses the process, also before it has started the process."""
        self._is_cancelled = True
        self.kill()
