"""Errors that a user can cause. Each names the field, the value, the limit and the way out."""

from __future__ import annotations


class ChairliftError(Exception):
    """Base of every error that Chairlift raises on purpose."""


class ConfigError(ChairliftError, ValueError):
    """An option of the engine that cannot be honoured."""


class RequestError(ChairliftError, ValueError):
    """A request that cannot be honoured. `param` names the offending field, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelLoadError(ChairliftError):
    """A model that cannot be loaded: says which file, which key, and what would work."""


class EngineDeadError(ChairliftError, RuntimeError):
    """The engine stopped; requests in flight ended with it."""


class DeadlineError(ChairliftError, TimeoutError):
    """A request ran out of the time that it was given."""


class OverloadedError(ChairliftError, RuntimeError):
    """A request that was not taken in, because too much waits already or its key has had its share for now.

    Args:
        retry_after: seconds after which it may be taken in.
        code: which limit, as a word for programs.
    """

    def __init__(self, message: str, retry_after: float, code: str) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.code = code


class EngineUnavailableError(EngineDeadError, OverloadedError):
    """The engine died and cannot be started again for now; starts go on, so a request may be sent again later.

    Args:
        retry_after: seconds until the next start.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        OverloadedError.__init__(self, message, retry_after, "engine_unavailable")
