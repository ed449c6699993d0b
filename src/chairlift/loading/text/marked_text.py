"""MarkedText: a string that records which of its characters a chat template wrote and which a request supplied.

Every operation that a template can apply to a string either keeps the marks or returns content. An operation that is
not handled here therefore never turns content into template text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, SupportsIndex

CONTENT: Final = b"\0"
TEMPLATE: Final = b"\1"
_SIMPLE_FORMAT: Final = re.compile(r"%[sd%]")


class MarkedText(str):
    """A string with one mark for each character: template text or content.

    It has the public members of `str` only, so a template cannot access the marks. The functions of this module
    read them.

    Args:
        text: the characters.
        mask: one byte for each character, `CONTENT` or `TEMPLATE`; None marks everything as content, except that
            another MarkedText keeps its marks.
    """

    __slots__ = ("_mask",)
    _mask: bytes

    def __new__(cls, text: str = "", mask: bytes | None = None) -> MarkedText:
        made = str.__new__(cls, text)
        made._mask = mask_of(text) if mask is None else mask
        return made

    def __str__(self) -> str:
        """Return the marked text itself, because Jinja2 calls `str` on all output and the marks must be kept."""
        return self

    def __add__(self, other: str) -> MarkedText:
        if not isinstance(other, str):
            return NotImplemented
        return MarkedText(str.__add__(self, other), self._mask + mask_of(other))

    def __radd__(self, other: str) -> MarkedText:
        if not isinstance(other, str):
            return NotImplemented
        return MarkedText(str.__add__(other, self), mask_of(other) + self._mask)

    def __mul__(self, count: SupportsIndex) -> MarkedText:
        return MarkedText(str.__mul__(self, count), self._mask * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> MarkedText:
        """Printf-style formatting; only `%s` and `%d` keep the marks."""
        text = str.__mod__(self, values)
        pieces = self._formatted(list(values) if isinstance(values, tuple) else [values])
        joined = join_marked(pieces)
        return joined if joined == text else MarkedText(text)

    def _formatted(self, values: list[Any]) -> Iterator[str]:
        end, position = 0, 0
        for found in _SIMPLE_FORMAT.finditer(self):
            yield self[end : found.start()]
            end = found.end()
            if found[0] == "%%":
                yield self[end - 1 : end]
            elif position < len(values):
                value = values[position]
                yield str(value) if found[0] == "%s" else str.__mod__("%d", (value,))
                position += 1
        yield self[end:]

    def __getitem__(self, key: SupportsIndex | slice) -> MarkedText:
        mask = self._mask[key] if isinstance(key, slice) else bytes((self._mask[key],))
        return MarkedText(str.__getitem__(self, key), mask)

    def __iter__(self) -> Iterator[MarkedText]:
        return (self[index] for index in range(len(self)))

    def join(self, pieces: Iterable[str]) -> MarkedText:
        pieces = list(pieces)
        text = str.join(self, pieces)
        return MarkedText(text, self._mask.join(map(mask_of, pieces)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> MarkedText:
        if not old:
            return MarkedText(unmarked(self).replace(old, new, count))
        return MarkedText(new).join(self.split(old, count))

    def strip(self, chars: str | None = None) -> MarkedText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> MarkedText:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> MarkedText:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> MarkedText:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> MarkedText:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[MarkedText]:  # type: ignore[override]
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[MarkedText]:  # type: ignore[override]
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[MarkedText]:  # type: ignore[override]
        whole = self._located(str.splitlines(self, True), "")
        return whole if keepends else [line[: len(str.splitlines(line)[0])] for line in whole]

    def partition(self, sep: str, /) -> tuple[MarkedText, MarkedText, MarkedText]:
        return self._parted(*str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[MarkedText, MarkedText, MarkedText]:
        return self._parted(*str.rpartition(self, sep))

    def _parted(self, head: str, sep: str, tail: str) -> tuple[MarkedText, MarkedText, MarkedText]:
        cut, end = len(head), len(head) + len(sep)
        return self[:cut], self[cut:end], self[end:]

    def _located(self, parts: Sequence[str], separator: str | None) -> list[MarkedText]:
        """Return consecutive parts of this text as slices of it.

        Args:
            separator: the text between two parts, or None for any white space.
        """
        located, end = [], 0
        for part in parts:
            start = str.find(self, part, end) if separator is None else end
            end = start + len(part)
            located.append(self[start:end])
            end += len(separator or "")
        return located

    def upper(self) -> MarkedText:
        return self._recased(str.upper(self))

    def lower(self) -> MarkedText:
        return self._recased(str.lower(self))

    def casefold(self) -> MarkedText:
        return self._recased(str.casefold(self))

    def title(self) -> MarkedText:
        return self._recased(str.title(self))

    def capitalize(self) -> MarkedText:
        return self._recased(str.capitalize(self))

    def swapcase(self) -> MarkedText:
        return self._recased(str.swapcase(self))

    def _recased(self, text: str) -> MarkedText:
        """Apply the marks to the text in another case. Each character becomes one or more, so equal lengths match."""
        if len(text) == len(self):
            return MarkedText(text, self._mask)
        return template_text(text) if CONTENT not in self._mask else MarkedText(text)


def template_text(text: str) -> MarkedText:
    """Return the text with all characters marked as template text."""
    return MarkedText(text, TEMPLATE * len(text))


def unmarked(text: str) -> str:
    """Return the same characters as a plain `str`."""
    return str.__str__(text)


def mask_of(text: str) -> bytes:
    """Return one byte for each character, `CONTENT` or `TEMPLATE`. A plain `str` is content."""
    return text._mask if isinstance(text, MarkedText) else bytes(len(text))


def is_template_text(text: str) -> bool:
    """Whether no character is content."""
    return CONTENT not in mask_of(text)


def join_marked(pieces: Iterable[str]) -> MarkedText:
    """Concatenate the pieces with their marks."""
    return _EMPTY.join(pieces)


def template_spans(text: str) -> list[tuple[int, int]]:
    """Return start and end of each maximal run of template text, in order."""
    return [found.span() for found in _TEMPLATE_RUN.finditer(mask_of(text))]


_EMPTY: Final = MarkedText()
_TEMPLATE_RUN: Final = re.compile(TEMPLATE + b"+")
