"""Bounded reading of files whose path or content comes from a caller or a user."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

MAX_SETTINGS_BYTES: Final = 64 << 20
"""The largest file of settings that is read. The largest known tokenizer.json has 34 MB."""


MAX_OPTIONS_BYTES: Final = 1 << 20
"""The largest file of options or of an adapter's configuration that is read. YAML is parsed at about 50 KB/s."""


def open_regular_file(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor.

    A pipe without a writer does not block, and a device is not read.

    Raises:
        OSError: the file cannot be opened, or is not a regular file; `strerror` has the reason.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # a null character in the path, or one that cannot be encoded
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def read_bytes(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> bytes:
    """Read a regular file.

    Raises:
        OSError: as `open_regular_file`, or the file has more than `max_bytes` bytes.
    """
    content = bytearray()
    with os.fdopen(open_regular_file(path), "rb") as file:
        while part := file.read(1 << 20):
            content += part
            if len(content) > max_bytes:
                raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))
    return bytes(content)


def read_text(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """Read a regular file in UTF-8.

    Raises:
        OSError: as `read_bytes`.
        ValueError: the content is not valid UTF-8.
    """
    return read_bytes(path, max_bytes).decode("utf-8")


def read_or_empty(path: Path) -> str:
    """The content of a small file of the system; "" if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
