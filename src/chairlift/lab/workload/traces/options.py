"""The options of reading a trace, and the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The options of a trace reader.

    Attributes:
        limit: maximum number of requests to read; None: all.
        vocab_size: synthetic token ids are less than this and less than 256.
        tokenize: returns the token ids of a text without special tokens; required by sharegpt and custom.
        output_len: custom only: output tokens of requests without `output_tokens`.
        multi_turn: sharegpt only: read all turns of a conversation, each after the one before, not only the first.
        hash_block_size: mooncake only: tokens in the block of each of hash_ids; None: 512.

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
        """Returns `tokenize`; raises ConfigError if it is missing."""
        if self.tokenize is None:
            raise ConfigError(f"{path}: this trace contains text, so a tokenizer is required to know its lengths")
        return self.tokenize


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """The requests of a trace file.

    Attributes:
        format: one of FORMATS.
        requests: by arrival; the first arrives at 0. Requests with equal times keep the order of the file, and a
            request with `after` follows that one.
        num_skipped: requests of the file that cannot be served: they have no prompt or output tokens (logs write failed
            requests in this way) or, in sharegpt, lengths outside the limits of `text_datasets`.
    """

    format: str
    requests: list[WorkloadRequest]
    num_skipped: int


Reader = Callable[[Path, TraceOptions], Iterator[WorkloadRequest | None]]
"""Yields the requests of a file in order, and None for a skipped one. Arrival times may start at any value."""
