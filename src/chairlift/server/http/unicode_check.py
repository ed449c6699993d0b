"""Finds request bodies with unpaired surrogates, which JSON can express and which are not valid Unicode text."""

from __future__ import annotations

import re
from typing import Any, Final

Path = tuple[str | int, ...]

_HIGH: Final = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW: Final = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_UNPAIRED: Final = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH.replace(b"{2}", b"[0-9a-fA-F]"), _LOW))
_ENCODED: Final = re.compile(rb"\xed[\xa0-\xbf]")


def may_contain_surrogate(body: bytes) -> bool:
    """Whether a JSON text may contain an unpaired surrogate. It is fast, and False is always correct.

    Python's parser also accepts UTF-16 and UTF-32, which contain zero bytes, and surrogates that are encoded as UTF-8.
    """
    if (b"\\ud" in body or b"\\uD" in body) and _UNPAIRED.search(body):
        return True
    return b"\0" in body or (b"\xed" in body and _ENCODED.search(body) is not None)


def find_surrogate(parsed: Any) -> dict[str, Any] | None:
    """The error for the first string of a JSON value with an unpaired surrogate, in the form of pydantic's errors."""
    found = _locate(parsed)
    if found is None:
        return None
    path, value = found
    requirement = "must be" if isinstance(value, str) else "must have field names that are"
    message = f"{requirement} valid Unicode text, but contains an unpaired surrogate"
    return {"type": "value_error", "loc": path, "msg": message, "input": value}


def _locate(value: Any) -> tuple[Path, Any] | None:
    """The path and value of the first string with an unpaired surrogate; for a field name, those of its object."""
    if isinstance(value, str):
        return None if _is_unicode(value) else ((), value)
    if isinstance(value, dict):
        if not all(map(_is_unicode, value)):
            return (), value
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return None
    for name, item in items:
        if isinstance(item, str | dict | list) and (found := _locate(item)) is not None:
            return (name, *found[0]), found[1]
    return None


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
