"""Errors that a user can cause. Each message names the field, the value, the limit and what to do."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a part of the server has failed. The log has the reason and the id."""

    reason: str
    failure_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @property
    def texts(self) -> tuple[str, str]:
        """The reason, which may contain paths of the machine, and what a caller without an admin key reads instead."""
        return self.reason, f"the server's log has the reason (failure {self.failure_id})"

    def __str__(self) -> str:
        return f"{self.reason} [failure {self.failure_id}]"


class ChairliftError(Exception):
    """The base class of all errors of Chairlift.

    Args:
        public_message: the message for callers without an admin key, if `message` may contain paths of the machine.
    """

    def __init__(self, message: str, public_message: str | None = None) -> None:
        super().__init__(message)
        self.public_message = message if public_message is None else public_message

    def text(self, *, is_admin: bool) -> str:
        """The message for a caller with an admin key, or for one without it."""
        return str(self) if is_admin else self.public_message


class ConfigError(ChairliftError, ValueError):
    """An option has a value that is not supported."""


class RequestError(ChairliftError, ValueError):
    """A request is invalid or not supported. `param` is the name of the field that caused it, `code` the reason."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class UnknownItemError(RequestError):
    """A request refers to an item of an earlier response that is not stored."""


class ContextLengthError(RequestError):
    """A prompt of `num_tokens` tokens, or of more if its text is not tokenized, is longer than `maximum` tokens."""

    def __init__(self, message: str, param: str | None = None, num_tokens: int = 0, maximum: int = 0) -> None:
        super().__init__(message, param, "context_length_exceeded")
        self.num_tokens, self.maximum = num_tokens, maximum


class ModelLoadError(ChairliftError):
    """A model cannot be loaded. The message names the file and the key."""


class EngineDeadError(ChairliftError, RuntimeError):
    """The engine has stopped, and all unfinished requests ended with it."""


class DeadlineError(ChairliftError, TimeoutError):
    """The timeout of a request passed before it was finished."""


class OverloadedError(ChairliftError, RuntimeError):
    """A request was not admitted because the queue is full or its API key has reached a limit.

    Args:
        retry_after: seconds after which the request may be sent again.
        code: the limit, as an identifier for programs.
        public_message: see ChairliftError.
    """

    def __init__(self, message: str, retry_after: float, code: str, public_message: str | None = None) -> None:
        super().__init__(message, public_message)
        self.retry_after, self.code = retry_after, code


class EngineUnavailableError(EngineDeadError, OverloadedError):
    """The engine could not be started so far; the next attempt is in `retry_after` seconds."""

    def __init__(self, message: str, public_message: str, retry_after: float, code: str = "engine_unavailable") -> None:
        OverloadedError.__init__(self, message, retry_after, code, public_message)
