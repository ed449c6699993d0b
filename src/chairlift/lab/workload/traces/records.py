"""Rows of CSV files and lines of JSON files, with checked fields and errors that name the line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from chairlift.errors import ConfigError


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

    def integer(self, name: str, low: int = 0) -> int:
        value = self.get(name)
        if self.is_text:
            try:
                value = int(value)
            except ValueError:
                raise self.error(name, f"must be an integer, got {value!r}") from None
        if type(value) is not int or value < low:
            raise self.error(name, f"must be an integer >= {low}, got {value!r:.80}")
        return value

    def number(self, name: str) -> float:
        """Returns the value of a field that must be a finite number >= 0."""
        value = self.get(name)
        if self.is_text:
            try:
                value = float(value)
            except ValueError:
                raise self.error(name, f"must be a number, got {value!r}") from None
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.error(name, f"must be a number >= 0, got {value!r:.80}")
        return float(value)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {value!r:.80}")
        return value

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


def csv_records(path: Path, columns: tuple[str, ...]) -> Iterator[TraceRecord]:
    """Yields the rows of a CSV file; raises ConfigError if its header lacks one of the columns."""
    with open_text_file(path) as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(_rows(path, rows), [])]
        if missing := [name for name in columns if name not in header]:
            raise ConfigError(
                f"{path}: line 1: column {missing[0]!r} is missing; the columns are {', '.join(header) or 'none'}"
            )
        for row in _rows(path, rows):
            if row:
                yield TraceRecord(f"{path}: line {rows.line_num}", dict(zip(header, row, strict=False)), is_text=True)


def _rows(path: Path, rows: Iterator[list[str]]) -> Iterator[list[str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise ConfigError(f"{path}: not valid CSV ({error})") from None


def json_records(path: Path) -> Iterator[TraceRecord]:
    """Yields the objects of a JSON lines file, without blank lines."""
    with open_text_file(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _json_record(f"{path}: line {number}", line)


def _json_record(place: str, text: str) -> TraceRecord:
    """Parses one JSON object; a null field counts as missing."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place}: not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: must be a JSON object, got {text.strip():.80}")
    return TraceRecord(place, {name: value for name, value in fields.items() if value is not None})
