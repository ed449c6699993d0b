"""What a trace is read with, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to read a trace.

    Attributes:
        limit: the first so many requests of the file; what follows is not read. None: all.
        vocab_size: synthetic token ids are below this, and below 256 in any case.
        tokenize: token ids of a text, as it stands; needed by formats that hold text (sharegpt, custom).
        output_len: custom only: output tokens of requests that do not say.
        multi_turn: sharegpt only: all turns of a conversation, each after the one before, instead of the first alone.
        hash_block_size: mooncake only: tokens for each of hash_ids; None: 512.

    Raises:
        ConfigError: a number is less than 1.
    """

    limit: int | None = None
    vocab_size: int = 256
    tokenize: Callable[[str], Sequence[int]] | None = None
    output_len: int | None = None
    multi_turn: bool = False
    hash_block_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("limit", "vocab_size", "output_len", "hash_block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"trace: {name} must be at least 1, got {value}")

    def tokenizer(self, path: Path) -> Callable[[str], Sequence[int]]:
        """`tokenize`, or a ConfigError that says why it is needed."""
        if self.tokenize is None:
            raise ConfigError(f"{path}: this trace holds text, and its lengths depend on the tokenizer: give one")
        return self.tokenize


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A trace in memory.

    Attributes:
        format: one of FORMATS.
        requests: by arrival; the first arrives at 0, those that arrive together keep the order of the file, and those
            that come after another one follow it.
        num_skipped: requests of the file that cannot be served: without a prompt or an output token (that is how logs
            write a failed request) or, of sharegpt, outside the bounds that its reader states.
    """

    format: str
    requests: list[WorkloadRequest]
    num_skipped: int


Reader = Callable[[Path, TraceOptions], Iterator[WorkloadRequest | None]]
"""Yields the requests of a file in its order, and None for one that is skipped. Arrivals count from anywhere."""
