"""Typed reads of a model's metadata. Every error names the file, the key, the value and the accepted values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from chairlift.errors import ModelLoadError

REQUIRED: Final[Any] = object()
MAX_DIMENSION = 1 << 24


class ConfigFields:
    """The fields of a configuration file. A field whose value is None counts as absent.

    Args:
        values: the content of the file.
        source: the file's name, for messages.
        prefix: the common beginning of all keys ("llama." in GGUF), which callers leave out and messages include.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self.source = source
        self._prefix = prefix
        self._read_keys: set[str] = set()
        self._nested: dict[str, ConfigFields] = {}
        self._defaults: dict[str, Any] = {}
        self._names: Mapping[str, str] = {}

    def error(self, key: str, problem: str) -> ModelLoadError:
        """Return an error that names the file and the key, for the caller to raise."""
        return ModelLoadError(f"{self.source}: {self._prefix}{self.name_of(key)} {problem}")

    def name_of(self, key: str) -> str:
        """Return the name that the field has in the file."""
        return self._names.get(key, key)

    def set_names(self, names: Mapping[str, str]) -> None:
        """Set the names in the file of fields that readers read by another name."""
        self._names = names

    def set_defaults(self, values: Mapping[str, Any]) -> None:
        """Set the values of fields that the file does not contain, which precede the default of a read."""
        self._defaults |= values

    def get(self, key: str, default: Any = None) -> Any:
        value = self._stored(key)
        value = self._defaults.get(key) if value is None else value
        if value is None and default is REQUIRED:
            raise self.error(key, "is missing; the file is incomplete or of an unsupported kind")
        return default if value is None else value

    def _stored(self, key: str) -> Any:
        """Return the value in the file or None, and note that the field has been read."""
        name = self.name_of(key)
        self._read_keys.add(name)
        return self._values.get(self._prefix + name)

    def ignore(self, *keys: str) -> None:
        """Declare that these fields have no influence on the model, so that they are no error."""
        self._read_keys.update(map(self.name_of, keys))

    def is_null(self, key: str) -> bool:
        """Whether the file has the field with the value null."""
        return self._values.get(self._prefix + self.name_of(key), 0) is None

    def window(self, default: Any = None) -> int | None:
        """Read `sliding_window`; None without one."""
        return self.optional_integer("sliding_window", default)

    def optional_integer(self, key: str, default: Any = None) -> int | None:
        """Read an integer; None without one. The value null overrules the default, unless it is REQUIRED."""
        has_none = default is not REQUIRED and self.is_null(key)
        return None if has_none or self.get(key, default) is None else self.integer(key, default)

    def uniform(
        self, key: str, default: Any = REQUIRED, *, ignores_zeros: bool = False, high: int = MAX_DIMENSION
    ) -> int:
        """Read an integer that some files repeat for each layer, and reject different values."""
        value = self.get(key, default)
        if not isinstance(value, list):
            return self.integer(key, default, high=high)
        if ignores_zeros:
            value = [item for item in value if item != 0]
        if not value or any(item != value[0] for item in value):
            raise self.error(key, f"differs between layers ({value!r}), which is not supported")
        return self.as_integer(key, value[0], high=high)

    def integer(self, key: str, default: Any = REQUIRED, *, low: int = 1, high: int = MAX_DIMENSION) -> int:
        return self.as_integer(key, self.get(key, default), low=low, high=high)

    def as_integer(self, key: str, value: Any, *, low: int = 1, high: int = MAX_DIMENSION) -> int:
        """Check that `value`, the value of `key`, is an integer from `low` to `high`, and return it."""
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be an integer between {low} and {high}, got {value!r}")
        return value

    def number(self, key: str, default: Any = REQUIRED, *, high: float = 1e12) -> float:
        """Return a number above 0 and at most `high`."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            raise self.error(key, f"must be a number above 0 and at most {high:g}, got {value!r}")
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
        """Return the nested object at `key`, the same one in every call, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, got {value!r}")
        if key not in self._nested:
            prefix = f"{self._prefix}{key}."
            fields = {f"{prefix}{name}": item for name, item in value.items()}
            self._nested[key] = ConfigFields(fields, self.source, prefix)
        return self._nested[key]

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return one token id or a list of token ids as a tuple, which is empty if the field is absent."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(key, f"must be a token id or a list of token ids, got {value!r}")
        return tuple(ids)

    def allow_only(self, key: str, supported: Any, reason: str) -> None:
        """Raise unless the field is absent or has the value `supported`, or a list that repeats it for each layer."""
        value = self.get(key, supported)
        values = value if isinstance(value, list) and value else [value]
        if value != supported and any(item != supported for item in values):
            raise self.error(key, f"is {value!r}, which is not supported: {reason}")

    def unread(self) -> dict[str, Any]:
        """Return the fields of this object that no reader has read, and that have a value."""
        names = (name for name in self._values if isinstance(name, str) and name.startswith(self._prefix))
        keys = (name.removeprefix(self._prefix) for name in names)
        values = ((key, self._values[self._prefix + key]) for key in keys if key not in self._read_keys)
        return {key: value for key, value in values if value is not None}

    def reject_undeclared(
        self,
        owner: str,
        neutral: Collection[str] = (),
        is_harmless: Callable[[str, Any], bool] = lambda key, value: False,
    ) -> dict[str, Any]:
        """Raise if no reader has read a field of this object or of a nested one that may change results.

        Args:
            owner: what the reader that has read the fields belongs to ("llama architecture"), for the message.
            neutral: the keys that have no influence on inference, and need no reader.
            is_harmless: (key, value) -> whether the field cannot change results.

        Returns:
            The names and values of the harmless fields.
        """
        harmless: dict[str, Any] = {}
        for key, value in self.unread().items():
            if key in neutral:
                continue
            if not is_harmless(key, value):
                raise ModelLoadError(
                    f"{self.source}: {self._prefix}{key} is {shortened(value)}, and the {owner} does not declare this "
                    "property; remove it from the file if it has no influence on inference"
                )
            harmless[self._prefix + key] = value
        for nested in self._nested.values():
            harmless |= nested.reject_undeclared(owner, neutral, is_harmless)
        return harmless


def shortened(value: Any, most: int = 80) -> str:
    """Return the value as text for a message, cut after `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def exact_quotient(fields: ConfigFields, key: str, value: int, by_key: str, by: int) -> int:
    """Return value / by.

    Raises:
        ModelLoadError: `value` is not a multiple of `by`; the message names both keys.
    """
    if value % by:
        raise fields.error(key, f"({value}) must be a multiple of {fields.name_of(by_key)} ({by})")
    return value // by


def unique(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """Return the distinct tokens of all groups, in the order of their first occurrence."""
    return tuple(dict.fromkeys(token for group in groups for token in group))
