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
