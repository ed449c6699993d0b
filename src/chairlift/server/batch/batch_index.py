"""What a batch holds and what of it is answered, in 17 bytes a line: bodies stay in the file."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift.server.batch.batch_lines import is_blank, read_custom_id, read_lines

MAX_LINES: Final = 1 << 24
"""Lines of a batch; at 17 bytes each the index takes 272 MiB then."""

MAX_REPORTED_DUPLICATES: Final = 5
DUPLICATES_PER_PASS: Final = 1000
"""Lines whose keys agree, and of which the custom_ids are compared in one reading of the file."""

UTF16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")


class BatchIndex:
    """The lines of a batch file, by number and by custom_id.

    Lines without a custom_id, which cannot be requests, are known by their number alone.

    Raises:
        ConfigError: it cannot be read, has more than MAX_LINES lines, or a custom_id is there twice; names the lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_due = bytearray(1)  # of line 0, which does not exist
        try:
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is no file: a batch is read twice, so put it into one")
            self._keys = self._read_keys()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        self._order: npt.NDArray[np.int64] = np.argsort(self._keys, kind="stable")
        self.num_requests = sum(self._is_due)
        self._refuse_duplicates()

    @property
    def num_unanswered(self) -> int:
        """Lines without an answer."""
        return sum(self._is_due)

    def mark_answered_id(self, custom_id: str) -> bool:
        """Note an answer; False: there is no such line, or it was answered before."""
        key = np.uint64(_key(custom_id))
        found = int(np.searchsorted(self._keys, key, sorter=self._order))
        if found == len(self._keys):
            return False
        return self.mark_answered_line(int(self._order[found]) + 1, custom_id)

    def mark_answered_line(self, number: int, custom_id: str | None) -> bool:
        """The same by the line's number; False also if that line has another custom_id now."""
        if not 0 < number < len(self._is_due) or not self._is_due[number]:
            return False
        if int(self._keys[number - 1]) != _line_key(number, custom_id):
            return False
        self._is_due[number] = False
        return True

    def due(self) -> Iterator[tuple[int, bytes]]:
        """The lines without an answer, read from the file as they are asked for.

        Raises:
            ConfigError: the file has changed since it was indexed.
        """
        with self.path.open("rb") as file:
            for number, line in read_lines(file):
                if number >= len(self._is_due) or not self._is_due[number]:
                    continue
                if int(self._keys[number - 1]) != _line_key(number, read_custom_id(line)):
                    raise ConfigError(
                        f"{self.path}, line {number}: changed while the batch ran. What was answered is written: run "
                        "the same command again with a file that stays as it is"
                    )
                yield number, line

    def _read_keys(self) -> npt.NDArray[np.uint64]:
        """A key for each line, and which of them hold something."""
        keys = array("Q")
        with self.path.open("rb") as file:
            for number, line in read_lines(file):
                if number == 1 and line.startswith(UTF16_MARKS):
                    raise ConfigError(f"{self.path} is written in UTF-16: save it as UTF-8")
                if number > MAX_LINES:
                    raise ConfigError(f"{self.path} has more than {MAX_LINES:,} lines: split it into several batches")
                is_due = not is_blank(line)
                keys.append(_line_key(number, read_custom_id(line) if is_due else None))
                self._is_due.append(is_due)
        return np.frombuffer(keys, dtype=np.uint64) if keys else np.empty(0, np.uint64)

    def _refuse_duplicates(self) -> None:
        in_order = self._keys[self._order]
        equal = np.flatnonzero(in_order[1:] == in_order[:-1]) + 1
        for start in range(0, len(equal), DUPLICATES_PER_PASS):
            places = equal[start : start + DUPLICATES_PER_PASS]
            suspects = {int(self._order[i]) + 1 for i in (*places, *(places - 1))}
            twice = self._duplicates(suspects)
            if twice:
                more = "; and more" if len(equal) > len(twice[:MAX_REPORTED_DUPLICATES]) else ""
                raise ConfigError(
                    f"{self.path}, {'; '.join(twice[:MAX_REPORTED_DUPLICATES])}{more}. Results are matched to requests "
                    "by custom_id: give each line a different one"
                )

    def _duplicates(self, suspects: set[int]) -> list[str]:
        """Which of these lines have the custom_id of an earlier one."""
        first: dict[bytes, int] = {}
        twice = []
        with self.path.open("rb") as file:
            for number, line in read_lines(file):
                custom_id = read_custom_id(line) if number in suspects else None
                if custom_id is not None and first.setdefault(_digest(custom_id, 32), number) != number:
                    earlier = first[_digest(custom_id, 32)]
                    twice.append(f"line {number}: custom_id {custom_id!r:.80} is that of line {earlier}")
        return twice


def _line_key(number: int, custom_id: str | None) -> int:
    return number if custom_id is None else _key(custom_id)


def _key(custom_id: str) -> int:
    """64 bits of a hash. Lines that agree in it are compared before they are called the same."""
    return int.from_bytes(_digest(custom_id, 8), "little")


def _digest(custom_id: str, size: int) -> bytes:
    return blake2b(custom_id.encode(errors="surrogatepass"), digest_size=size).digest()
