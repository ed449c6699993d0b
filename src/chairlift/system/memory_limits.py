"""Too little memory, as a sentence: which errors mean it, and what to do about it.

A limit of the address space (`ulimit -v`) shows in many forms: as MemoryError, as a library that cannot be mapped, as a
thread that cannot be started, or as an abort inside a native library, which no handler sees.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Final

from chairlift.errors import ConfigError

try:
    import resource  # Here, since it could not be imported any more when it is needed.
except ImportError:  # Windows has no such limits.
    resource = None  # type: ignore[assignment]

MIN_ADDRESS_SPACE: Final = 1 << 30
"""Bytes of address space without which no engine starts: PyTorch's libraries alone map 640 MB."""

_WORDS: Final = (
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
)
_THREAD_WORDS: Final = ("can't start new thread", "resource temporarily unavailable")
"""A thread needs address space for its stack; without a limit of that, it is processes that there are too many of."""


def address_space_limit() -> int | None:
    """Bytes that a process may map (RLIMIT_AS); None if they are not limited."""
    if resource is None:
        return None
    limit, _hard = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def check_address_space() -> None:
    """Refuse a limit of the address space under which no engine can start.

    Raises:
        ConfigError: names the limit and the least that is needed.
    """
    limit = address_space_limit()
    if limit is not None and limit < MIN_ADDRESS_SPACE:
        raise ConfigError(
            f"the address space of a process is limited to {_mebibytes(limit)} (ulimit -v), and an engine needs at "
            f"least {_mebibytes(MIN_ADDRESS_SPACE)} besides its model: raise the limit"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that caused it, means that there is too little memory."""
    return _memory_error(error) is not None


def describe_out_of_memory(error: BaseException) -> str:
    """A sentence about such an error, with the ways out."""
    found = _memory_error(error) or error
    reason = (str(found).strip() or type(found).__name__).splitlines()[0]
    return f"there is too little memory ({reason:.200}): free some, use a smaller model or KV cache{limit_hint()}"


def limit_hint() -> str:
    """The way out that a limit of the address space offers; "" if there is none."""
    limit = address_space_limit()
    return "" if limit is None else f", or raise the limit of the address space, {_mebibytes(limit)} (ulimit -v)"


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
    if isinstance(error, SystemError):  # Native code that has failed without an error of its own.
        return is_limited
    text = str(error).lower()
    words = (*_WORDS, *_THREAD_WORDS) if is_limited else _WORDS
    return isinstance(error, ImportError | OSError | RuntimeError) and any(word in text for word in words)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
