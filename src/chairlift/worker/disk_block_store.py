"""DiskBlockStore: keeps blocks and checkpoints of the prefix cache in files, and checks whatever it reads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Final

import torch

from chairlift.errors import ConfigError
from chairlift.kernels.attention import KVCache
from chairlift.kernels.recurrence import RecurrentState
from chairlift.system.input_files import read_bytes
from chairlift.system.memory_amounts import format_memory

logger = logging.getLogger("chairlift")

MAGIC: Final = b"chairlift-kv-1\n\0"
DIGEST_BYTES: Final = 16
HEADER_BYTES: Final = len(MAGIC) + DIGEST_BYTES
SUFFIX: Final = ".kv"
MAX_PENDING_BYTES: Final = 256 << 20
"""Maximum size of the blocks that wait to be written. Further blocks are not kept."""

MAX_READ_BYTES: Final = 256 << 20
"""Maximum size of the blocks that are read for one request, because other requests wait meanwhile."""

RETRY_SECONDS: Final = 30.0
"""Time without writing after a write has failed, or the folder could not be locked."""

TEMPORARY: Final = ("EAGAIN", "ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "EMFILE", "ENFILE")
"""Errors with which a folder is only read, because a server whose disk is full must be able to restart its engine."""

FIRST_BANDWIDTH: Final = 0.5e9
"""Bytes per second that reading is assumed to reach before the first blocks were read."""

CLOSE_SECONDS: Final = 5.0

ComputeSeconds = Callable[[int, int], float]
"""(position of the first token, number of tokens) -> the estimated seconds to compute them."""


class DiskBlockStore:
    """A `core.kv.stored_prefixes.BlockStore` in a folder with a file for each block or checkpoint.

    A file has a header with a digest of its contents, and gets its name when it is complete, so files that were cut
    off, changed or not finished are recognized, and removed. The folder belongs to one model in one format with one
    kind of kernels (`fingerprint`). Blocks are written on a thread. Beyond `max_bytes` the least recently used files
    are removed.

    Only one process writes to a folder. Another one only reads, until the first one has ended. A folder that was
    removed is created again after RETRY_SECONDS, and the lost files are forgotten.

    Args:
        folder: the folder of all models; the folder of the fingerprint is created in it.
        fingerprint: what determines the contents of a block, besides its tokens.
        caches: the KV memory of each layer, or the memory of the checkpoints of each layer.
        num_block_tokens: the number of tokens of a block.
        compute_seconds: None if the speed of the model is unknown; then blocks are always loaded.
        what: what the files contain, for the log.
        clock: returns seconds, for the time without writing.

    Raises:
        ConfigError: the folder cannot be used, and waiting would not help.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: dict[str, Any],
        caches: Iterable[KVCache | RecurrentState],
        num_block_tokens: int,
        max_bytes: int,
        compute_seconds: ComputeSeconds | None = None,
        what: str = "blocks",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._tensors = [tensor for cache in caches for tensor in cache_tensors(cache)]
        self._num_block_tokens = num_block_tokens
        self._max_bytes = max_bytes
        self._compute_seconds = compute_seconds
        self._block_bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in self._tensors)
        self._description = json.dumps(fingerprint, sort_keys=True, default=str)
        self.folder = folder / hashlib.sha256(self._description.encode()).hexdigest()[:32]
        self._lock_file: IO[str] | None = None
        self._problem: str | None = None
        self._guard = threading.Lock()
        self._files: OrderedDict[bytes, None] = OrderedDict()
        self._pending: dict[bytes, None] = {}
        self._bytes_per_second = FIRST_BANDWIDTH
        self._resume_writing = 0.0
        self.num_saved = self.num_damaged = 0
        self._open()
        self._queue: queue.Queue[tuple[bytes, torch.Tensor] | None] = queue.Queue()
        self._writer = threading.Thread(target=self._write_all, name="chairlift-prefix-cache", daemon=True)
        self._writer.start()
        logger.info(
            f"prefix cache on disk: {len(self._files)} {what} of {format_memory(self._block_bytes)} in {self.folder}, "
            f"which may take {format_memory(max_bytes)}"
        )

    @property
    def num_blocks(self) -> int:
        """Number of blocks that can be loaded."""
        return len(self._files)

    # -- BlockStore ----------------------------------------------------------------------------------------------

    def save(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        if self._clock() < self._resume_writing:
            return
        room = max(1, MAX_PENDING_BYTES // self._block_bytes) - len(self._pending)
        with self._guard:
            chosen = [
                (block_hash, block_id)
                for block_hash, block_id in zip(hashes, block_ids, strict=True)
                if block_hash not in self._files and block_hash not in self._pending
            ][: max(0, room)]
            self._pending.update((block_hash, None) for block_hash, _ in chosen)
        if not chosen:
            return
        index = torch.tensor([block_id for _, block_id in chosen])
        rows = [tensor[index].flatten(1).view(torch.uint8) for tensor in self._tensors]
        for (block_hash, _), row in zip(chosen, torch.cat(rows, dim=1), strict=True):
            self._queue.put((block_hash, row))

    def num_stored(self, hashes: Sequence[bytes]) -> int:
        limit = min(len(hashes), max(1, MAX_READ_BYTES // self._block_bytes))
        return next((index for index in range(limit) if hashes[index] not in self._files), limit)

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], start: int, num_tokens: int | None = None) -> int:
        known = self.num_stored(hashes)
        if num_tokens is None:
            num_tokens = known * self._num_block_tokens
        if not known or not self._is_worth_reading(known, start, num_tokens):
            return 0
        started = time.monotonic()
        rows = []
        for block_hash in hashes[:known]:
            if (row := self._read(block_hash)) is None:
                break
            rows.append(row)
        if rows:
            self._copy(torch.stack(rows), block_ids[: len(rows)])
            seconds = max(1e-6, time.monotonic() - started)
            self._bytes_per_second = 0.5 * (self._bytes_per_second + len(rows) * self._block_bytes / seconds)
        return len(rows)

    def close(self) -> None:
        """Write the blocks that wait, for at most CLOSE_SECONDS."""
        self._queue.put(None)
        self._writer.join(CLOSE_SECONDS)
        if self._lock_file is not None:
            self._lock_file.close()

    # -- reading -------------------------------------------------------------------------------------------------

    def _is_worth_reading(self, num_blocks: int, start: int, num_tokens: int) -> bool:
        if self._compute_seconds is None:
            return True
        seconds = num_blocks * self._block_bytes / self._bytes_per_second
        return seconds < self._compute_seconds(start, num_tokens)

    def _read(self, block_hash: bytes) -> torch.Tensor | None:
        """The contents of a block, or None if its file is missing, unreadable or damaged."""
        path = self._path(block_hash)
        try:
            content = read_bytes(path, HEADER_BYTES + self._block_bytes)
        except OSError as error:
            if error.errno not in (errno.EFBIG, errno.EINVAL):  # A failure to read a file says nothing about it.
                self._forget(block_hash)
                if not self.folder.exists():
                    self._forget_all()  # Otherwise no block that is in the index would be written again.
                return None
            content = b""
        payload = memoryview(content)[HEADER_BYTES:]
        is_whole = len(payload) == self._block_bytes and content.startswith(MAGIC)
        if not is_whole or _digest(block_hash, payload) != content[len(MAGIC) : HEADER_BYTES]:
            self.num_damaged += 1
            logger.warning("prefix cache on disk: %s is damaged and was removed; its tokens are computed", path)
            self._forget(block_hash)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with self._guard:
            self._files.move_to_end(block_hash)
        with contextlib.suppress(OSError):
            os.utime(path)  # the order in which files are removed after a restart
        return torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    def _copy(self, rows: torch.Tensor, block_ids: Sequence[int]) -> None:
        index, first = torch.tensor(list(block_ids)), 0
        for tensor in self._tensors:
            size = tensor[0].numel() * tensor.element_size()
            part = rows[:, first : first + size].contiguous().view(tensor.dtype)
            tensor[index] = part.view(len(rows), *tensor.shape[1:])
            first += size

    def _forget(self, block_hash: bytes) -> None:
        with self._guard:
            self._files.pop(block_hash, None)

    def _forget_all(self) -> None:
        with self._guard:
            self._files.clear()

    # -- writing -------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            block_hash, row = entry
            try:
                self._write(block_hash, row.numpy())
            except OSError as error:
                self._pause_writing(error)
            with self._guard:
                self._pending.pop(block_hash, None)

    def _write(self, block_hash: bytes, payload: Any) -> None:
        if self._clock() < self._resume_writing:
            return
        self._check_lock()
        if self._lock_file is None:
            self._lock()
            self._find_files()
        path = self._path(block_hash)
        self._make_room()
        unfinished = path.with_suffix(".tmp")
        try:
            with open(unfinished, "wb", opener=_open_privately) as file:
                file.write(MAGIC + _digest(block_hash, memoryview(payload)))
                file.write(payload)
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        if self._problem is not None:
            logger.warning("prefix cache on disk: blocks are written again (%s)", self.folder)
            self._problem = None
        self.num_saved += 1
        with self._guard:
            self._files[block_hash] = None

    def _pause_writing(self, error: OSError) -> None:
        """Write nothing for RETRY_SECONDS. Each problem is logged once."""
        self._resume_writing = self._clock() + RETRY_SECONDS
        problem = error.strerror or str(error)
        if problem != self._problem:
            logger.warning(
                "prefix cache on disk: blocks are only read, because writing fails: %s (%s); it is tried every %g s",
                problem,
                self.folder,
                RETRY_SECONDS,
            )
            self._problem = problem

    def _make_room(self) -> None:
        """Remove the least recently used files until there is room for one more block."""
        limit = self._max_bytes // (HEADER_BYTES + self._block_bytes) - 1
        with self._guard:
            removed = [self._files.popitem(last=False)[0] for _ in range(len(self._files) - max(0, limit))]
        for block_hash in removed:
            with contextlib.suppress(OSError):
                self._path(block_hash).unlink()

    # -- folder --------------------------------------------------------------------------------------------------

    def _path(self, block_hash: bytes) -> Path:
        return self.folder / f"{block_hash.hex()}{SUFFIX}"

    def _open(self) -> None:
        """Open the folder, for reading only after a temporary error."""
        try:
            self._lock()
        except OSError as error:
            if errno.errorcode.get(error.errno or 0) not in TEMPORARY:
                raise ConfigError(
                    f"prefix_cache_dir={self.folder.parent}: {error.strerror} ({error.filename}); choose another "
                    "folder, or remove what is in its place"
                ) from None
            self._pause_writing(error)
        self._find_files()

    def _lock(self) -> None:
        """Create the folder, and lock it for writing.

        Raises:
            OSError: the folder cannot be written, or another process writes to it.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.folder / "model.json", "w", encoding="utf-8", opener=_open_privately) as file:
            file.write(self._description + "\n")
        lock_file = open(self.folder / "lock", "w", opener=_open_privately)  # noqa: SIM115 - open until `close`
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock_file.close()
            raise BlockingIOError(errno.EAGAIN, "another process writes to this folder") from None
        self._lock_file = lock_file

    def _check_lock(self) -> None:
        """Release the lock, and raise OSError, if its file is no longer in the folder, which was removed."""
        if self._lock_file is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.folder / "lock"), os.fstat(self._lock_file.fileno())):
                return
        self._lock_file.close()
        self._lock_file = None
        self._forget_all()
        raise FileNotFoundError(errno.ENOENT, "the folder was removed")

    def _find_files(self) -> None:
        """Index the files, the least recently used first, and remove unfinished ones."""
        found = []
        for entry in os.scandir(self.folder) if self.folder.exists() else ():
            name, dot, kind = entry.name.partition(".")
            if dot and kind == "tmp" and self._lock_file is not None:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
            elif dot + kind == SUFFIX:
                with contextlib.suppress(OSError, ValueError):
                    found.append((entry.stat().st_mtime, bytes.fromhex(name)))
        with self._guard:
            self._files = OrderedDict((block_hash, None) for _, block_hash in sorted(found))


def _open_privately(path: str, flags: int) -> int:
    """Open a file that only its owner may read, and not through a symbolic link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def cache_tensors(cache: KVCache | RecurrentState) -> list[torch.Tensor]:
    """The tensors of a layer's memory, each once. Their first dimension counts blocks, or slots of states."""
    return list(dict.fromkeys(tensor for tensor in cache if tensor is not None))


def _digest(block_hash: bytes, payload: memoryview) -> bytes:
    """The digest of a block's contents together with its hash, so that renamed files are damaged files."""
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES, key=block_hash[:64]).digest()
