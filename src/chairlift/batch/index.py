"""What a batch holds and what of it is answered, in 17 bytes a line: bodies stay in the file."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from chairlift.batch.records import custom_id_of, is_blank, read_lines
from chairlift.errors import ConfigError

MAX_DUPLICATES_TOLD = 5


class BatchIndex:
    """The lines of a batch file, by number and by custom_id.

    Lines without a custom_id, which cannot be requests, are known by their number alone.

    Raises:
        ConfigError: it cannot be read, or a custom_id is there twice; names the lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        keys = array("Q")
        if os.path.exists(path) and not path.is_file():
            raise ConfigError(f"{path} is no file: a batch is read twice, so put it into one")
        try:
            with path.open("rb") as file:
                self._is_due = bytearray(1)  # of line 0, which does not exist
                for number, line in read_lines(file):
                    custom_id = custom_id_of(line)
                    keys.append(number if custom_id is None else _key(custom_id))
                    self._is_due.append(not is_blank(line))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        unsorted = np.frombuffer(keys, dtype=np.uint64) if keys else np.empty(0, np.uint64)
        self._order: npt.NDArray[np.int64] = np.argsort(unsorted, kind="stable")
        self._keys = unsorted[self._order]
        self.num_requests = sum(self._is_due)
        self._refuse_duplicates()

    @property
    def num_due(self) -> int:
        """Lines without an answer."""
        return sum(self._is_due)

    def mark_id(self, custom_id: str) -> bool:
        """Note an answer; False: there is no such line, or it was answered before."""
        found = int(np.searchsorted(self._keys, np.uint64(_key(custom_id))))
        if found == len(self._keys) or int(self._keys[found]) != _key(custom_id):
            return False
        return self.mark_line(int(self._order[found]) + 1)

    def mark_line(self, number: int) -> bool:
        """The same by the line's number."""
        if not 0 < number < len(self._is_due) or not self._is_due[number]:
            return False
        self._is_due[number] = False
        return True

    def due(self) -> Iterator[tuple[int, bytes]]:
        """The lines without an answer, read from the file as they are asked for."""
        with self.path.open("rb") as file:
            for number, line in read_lines(file):
                if number < len(self._is_due) and self._is_due[number]:
                    yield number, line

    def _refuse_duplicates(self) -> None:
        equal = np.flatnonzero(self._keys[1:] == self._keys[:-1]) + 1
        if not len(equal):
            return
        suspects = {int(self._order[i]) + 1 for i in (*equal, *(equal - 1))}
        first: dict[str, int] = {}
        twice = []
        with self.path.open("rb") as file:
            for number, line in read_lines(file):
                custom_id = custom_id_of(line) if number in suspects else None
                if custom_id is not None and first.setdefault(custom_id, number) != number:
                    twice.append(f"line {number}: custom_id {custom_id!r:.80} is that of line {first[custom_id]}")
        if twice:
            more = f"; and {len(twice) - MAX_DUPLICATES_TOLD} more" if len(twice) > MAX_DUPLICATES_TOLD else ""
            raise ConfigError(
                f"{self.path}, {'; '.join(twice[:MAX_DUPLICATES_TOLD])}{more}. Answers are told apart by it: give each "
                "line its own"
            )


def _key(custom_id: str) -> int:
    """64 bits of a hash. Lines that agree in it are compared before they are called the same."""
    return int.from_bytes(blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
