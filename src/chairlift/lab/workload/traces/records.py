"""The options of trace readers, and their records: rows of CSV files and lines of JSON files with checked fields."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The options of a trace reader.

    Attributes:
        limit: maximum number of requests to read; None: all.
        vocab_size: synthetic token ids are less than this and less than 256.
        tokenize: returns the token ids of a text without special tokens; required by sharegpt and custom.

    Raises:
        ConfigError: a number is less than 1.
    """

    limit: int | None = None
    vocab_size: int = 256
    tokenize: Callable[[str], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("vocab_size", self.vocab_size)):
            if value is not None and value < 1:
                raise ConfigError(f"trace: {name} must be at least 1, got {value}")

    def tokenizer(self, path: Path) -> Callable[[str], Sequence[int]]:
        """Returns `tokenize`; raises ConfigError if it is missing."""
        if self.tokenize is None:
            raise ConfigError(f"{path}: this trace contains text, so a tokenizer is required to know its lengths")
        return self.tokenize


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """The fields of one CSV row or JSON object; all methods raise ConfigError for a missing or wrong field.

    Attributes:
        place: file and line, for errors.
        is_text: all values are strings (CSV).
    """

    place: str
    fields: Mapping[str, Any]
    is_text: bool = False

    def error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.place}: {name} {problem}")

    def get(self, name: str) -> Any:
        value = self.fields.get(name)
        if value is None:
            raise self.error(name, "is missing")
        return value

    def typed(self, name: str, kind: type, description: str) -> Any:
        """Returns the value of a field that must be of type `kind`, which errors call by `description`."""
        value = self.get(name)
        if type(value) is not kind:
            raise self.error(name, f"must be {description}, got {value!r:.80}")
        return value

    def text(self, name: str) -> str:
        return str(self.typed(name, str, "a string"))

    def integer(self, name: str, low: int = 0) -> int:
        value = self._parsed(name, int, "an integer")
        if type(value) is not int or value < low:
            raise self.error(name, f"must be an integer >= {low}, got {value!r:.80}")
        return value

    def number(self, name: str) -> float:
        """Returns the value of a field that must be a finite number >= 0."""
        value = self._parsed(name, float, "a number")
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.error(name, f"must be a number >= 0, got {value!r:.80}")
        return float(value)

    def _parsed(self, name: str, parse: Callable[[str], Any], description: str) -> Any:
        """Returns the value of a field, parsed if it is text."""
        value = self.get(name)
        try:
            return parse(value) if self.is_text else value
        except ValueError:
            raise self.error(name, f"must be {description}, got {value!r}") from None

    def items(self, name: str, kind: type) -> list[Any]:
        """Returns the value of a field that must be a list of items of type `kind`."""
        value = self.get(name)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.error(name, f"must be a list of {kind.__name__}, got {value!r:.80}")
        return value


@contextmanager
def open_text_file(path: Path) -> Iterator[TextIO]:
    """Opens a UTF-8 text file; raises ConfigError if it cannot be opened or decoded."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error})") from None


def csv_records(path: Path) -> Iterator[TraceRecord]:
    """Yields the rows of a CSV file below its header, without blank lines."""
    with open_text_file(path) as file:
        rows = csv.reader(file)
        try:
            header = [name.strip() for name in next(rows, [])]
            for row in filter(None, rows):
                yield TraceRecord(f"{path}: line {rows.line_num}", dict(zip(header, row, strict=False)), is_text=True)
        except csv.Error as error:
            raise ConfigError(f"{path}: not valid CSV ({error})") from None


def json_records(path: Path) -> Iterator[TraceRecord]:
    """Yields the objects of a JSON lines file, without blank lines. A null field counts as missing."""
    with open_text_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}: line {number}"
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{place}: not valid JSON ({error})") from None
            if not isinstance(fields, dict):
                raise ConfigError(f"{place}: must be a JSON object, got {line.strip():.80}")
            yield TraceRecord(place, {name: value for name, value in fields.items() if value is not None})
