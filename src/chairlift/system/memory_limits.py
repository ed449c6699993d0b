"""Recognizes errors that mean too little memory, and describes them in one sentence.

A limit of the address space (`ulimit -v`) can cause a MemoryError, a library that cannot be mapped, a thread that
cannot be started, or an abort in a native library, which cannot be handled.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from typing import Final

from chairlift.errors import ConfigError

MIN_ADDRESS_SPACE: Final = 1 << 30
"""The least address space of an engine, in bytes. The libraries of PyTorch alone map 640 MB."""

_WORDS: Final = (
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
)
_THREAD_WORDS: Final = ("can't start new thread", "resource temporarily unavailable")
"""These mean too little memory only if the address space is limited; otherwise there are too many processes."""


def address_space_limit() -> int | None:
    """The limit of the address space in bytes (RLIMIT_AS); None if there is no limit."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def check_address_space() -> None:
    """Check that the limit of the address space allows an engine to start.

    Raises:
        ConfigError: the limit is too low; the message has the limit and the minimum.
    """
    limit = address_space_limit()
    if limit is not None and limit < MIN_ADDRESS_SPACE:
        raise ConfigError(
            f"the address space is limited to {_mebibytes(limit)} (ulimit -v), but an engine needs at least "
            f"{_mebibytes(MIN_ADDRESS_SPACE)} in addition to its model: increase the limit"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means that there is too little memory."""
    return _memory_error(error) is not None


def describe_out_of_memory(error: BaseException) -> str:
    """One sentence that describes an error of memory and says what to do."""
    found = _memory_error(error) or error
    reason = (str(found).strip() or type(found).__name__).splitlines()[0]
    return f"out of memory ({reason:.200}): free memory, use a smaller model or KV cache{limit_hint()}"


def limit_hint() -> str:
    """The advice to increase the limit of the address space; "" if there is no limit."""
    limit = address_space_limit()
    return "" if limit is None else f", or increase the limit of the address space, {_mebibytes(limit)} (ulimit -v)"


def _memory_error(error: BaseException) -> BaseException | None:
    return next((cause for cause in _causes(error) if _means_out_of_memory(cause)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _means_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    is_limited = address_space_limit() is not None
    if isinstance(error, SystemError):  # Native code failed without setting an error.
        return is_limited
    text = str(error).lower()
    words = (*_WORDS, *_THREAD_WORDS) if is_limited else _WORDS
    return isinstance(error, ImportError | OSError | RuntimeError) and any(word in text for word in words)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
