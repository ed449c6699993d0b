"""Typed look-ups in a model's metadata. Every failure names the file, the key, the value and what would do."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from chairlift.errors import ModelLoadError

REQUIRED: Final[Any] = object()
MAX_DIMENSION = 1 << 24


class ConfigFields:
    """A mapping that came from a file. Keys holding None count as absent.

    Args:
        values: what the file holds.
        source: the file's name, for messages.
        prefix: put before every key, here and in messages ("llama." in GGUF).
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self.source = source
        self._prefix = prefix
        self._covered: set[str] = set()
        self._nested: list[ConfigFields] = []

    def error(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {self._prefix}{key} {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        self._covered.add(key)
        value = self._values.get(self._prefix + key)
        if value is None and default is REQUIRED:
            raise self.error(key, "is missing; the file is incomplete or of a kind that is not supported")
        return default if value is None else value

    def integer(self, key: str, default: Any = REQUIRED, *, low: int = 1, high: int = MAX_DIMENSION) -> int:
        return self.as_integer(key, self.get(key, default), low=low, high=high)

    def as_integer(self, key: str, value: Any, *, low: int = 1, high: int = MAX_DIMENSION) -> int:
        """`value` of `key`, checked."""
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be an integer between {low} and {high}, got {value!r}")
        return value

    def number(self, key: str, default: Any = REQUIRED, *, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number above `low` and at most `high`."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"must be a finite number, got {value!r}")
        if not low < value <= high:
            raise self.error(key, f"must be above {low:g} and at most {high:g}, got {value!r}")
        return float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def choice(self, key: str, supported: Collection[str], default: Any = REQUIRED) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in supported:
            raise self.error(key, f"is {value!r}, which is not supported; supported: {', '.join(sorted(supported))}")
        return value

    def mapping(self, key: str) -> ConfigFields | None:
        """The nested object at `key`, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, got {value!r}")
        nested = ConfigFields({f"{key}.{name}": item for name, item in value.items()}, self.source, f"{key}.")
        self._nested.append(nested)
        return nested

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty if absent."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(key, f"must be a token id or a list of them, got {value!r}")
        return tuple(ids)

    def allow_only(self, key: str, unset: Any, why: str) -> None:
        """Raise unless the key is absent or holds `unset`."""
        value = self.get(key, unset)
        if value != unset:
            raise self.error(key, f"is {value!r}, which is not supported: {why}")

    def reject_undeclared(self, architecture: str, neutral: Collection[str] = ()) -> None:
        """Raise if a key, here or in a nested object, was never looked up.

        Args:
            architecture: whose reader has looked up all that it declares.
            neutral: keys without influence on inference.
        """
        for name, value in self._values.items():
            key = name.removeprefix(self._prefix)
            is_ours = isinstance(name, str) and name.startswith(self._prefix)
            if is_ours and value is not None and key not in self._covered and key not in neutral:
                raise self.error(
                    key,
                    f"is {shortened(value)}, and the {architecture} architecture declares no such property, so its "
                    f"influence on inference is not known; remove it from the file if it has none",
                )
        for nested in self._nested:
            nested.reject_undeclared(architecture)


def shortened(value: Any, most: int = 80) -> str:
    """The value for a message, in at most about so many characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def exact_quotient(fields: ConfigFields, key: str, value: int, by_key: str, by: int) -> int:
    """value / by; raises ModelLoadError unless it comes out even."""
    if value % by:
        raise fields.error(key, f"({value}) must be a multiple of {by_key} ({by})")
    return value // by


def unique(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """All members in order of first appearance."""
    return tuple(dict.fromkeys(token for group in groups for token in group))
