"""Tests the prefix cache on disk: what is read is what was written, whatever happened to the files in between."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.errors import ConfigError
from chairlift.kernels.attention import KVCache
from chairlift.worker import disk_block_store
from chairlift.worker.disk_block_store import HEADER_BYTES, DiskBlockStore

NUM_BLOCKS, BLOCK_SIZE = 16, 4
HASHES = [bytes([number]) * 32 for number in range(1, 13)]


def make_caches(seed: int = 0) -> list[KVCache]:
    """The KV memory of two layers: bfloat16, and int8 with scales."""
    torch.manual_seed(seed)
    shape = (NUM_BLOCKS, 2, BLOCK_SIZE, 8)
    plain = KVCache(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16())
    bytes_ = [torch.randint(-128, 127, shape, dtype=torch.int8) for _ in range(2)]
    scales = [torch.rand(shape[:3]) for _ in range(2)]
    return [plain, KVCache(*bytes_, *scales)]


def open_store(folder: Path, caches: list[KVCache], **options: Any) -> DiskBlockStore:
    return DiskBlockStore(folder, {"model": "m"}, caches, BLOCK_SIZE, options.pop("max_bytes", 1 << 20), **options)


def contents(caches: list[KVCache], block_id: int) -> list[torch.Tensor]:
    return [tensor[block_id].clone() for cache in caches for tensor in disk_block_store.cache_tensors(cache)]


def saved(folder: Path, count: int = 4, **options: Any) -> list[list[torch.Tensor]]:
    """Save `count` blocks and close the store; returns their contents."""
    caches = make_caches()
    store = open_store(folder, caches, **options)
    store.save(HASHES[:count], range(count))
    store.close()
    return [contents(caches, block_id) for block_id in range(count)]


def check(caches: list[KVCache], block_ids: list[int], expected: list[list[torch.Tensor]]) -> None:
    for block_id, tensors in zip(block_ids, expected, strict=True):
        for found, given in zip(contents(caches, block_id), tensors, strict=True):
            assert torch.equal(found, given)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def test_blocks_are_found_after_a_restart(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    caches = make_caches(1)
    before = contents(caches, 3)
    store = open_store(tmp_path, caches)
    assert store.num_blocks == 4
    assert store.load([*HASHES[:4], HASHES[5]], [9, 10, 11, 12, 13], 0) == 4
    check(caches, [9, 10, 11, 12], expected)
    assert all(torch.equal(*pair) for pair in zip(contents(caches, 3), before, strict=True))
    assert store.load([HASHES[5], HASHES[0]], [1, 2], 0) == 0
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data[: HEADER_BYTES + 5] + bytes([data[HEADER_BYTES + 5] ^ 1]) + data[HEADER_BYTES + 6 :],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data + b"x",
    ],
    ids=["short", "header only", "empty", "flipped bit", "magic", "long"],
)
def test_a_damaged_file_is_removed_and_never_read(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = saved(tmp_path)
    damaged = files(tmp_path)[1]
    damaged.write_bytes(damage(damaged.read_bytes()))
    caches = make_caches(1)
    before = contents(caches, 10)
    store = open_store(tmp_path, caches)
    with caplog.at_level("WARNING"):
        assert store.load(HASHES[:4], [9, 10, 11, 12], 0) == 1
    check(caches, [9], expected[:1])
    assert all(torch.equal(*pair) for pair in zip(contents(caches, 10), before, strict=True))
    assert f"{damaged} is damaged and was removed" in caplog.text
    assert not damaged.exists()
    assert store.load(HASHES[1:2], [10], 0) == 0
    store.close()


def test_a_file_with_the_name_of_another_block_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path)
    first, second = files(tmp_path)[:2]
    second.write_bytes(first.read_bytes())
    store = open_store(tmp_path, make_caches(1))
    assert store.load(HASHES[:2], [9, 10], 0) == 1
    assert store.num_damaged == 1
    store.close()


def test_a_removed_file_is_missing(tmp_path: Path) -> None:
    saved(tmp_path)
    store = open_store(tmp_path, make_caches(1))
    files(tmp_path)[0].unlink()
    assert store.load(HASHES[:2], [9, 10], 0) == 0
    store.close()


def test_a_file_that_cannot_be_read_now_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, _max_bytes: int) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    saved(tmp_path)
    store = open_store(tmp_path, make_caches(1))
    monkeypatch.setattr("chairlift.worker.disk_block_store.read_bytes", fail)
    assert store.load(HASHES[:1], [9], 0) == 0
    assert (store.num_damaged, files(tmp_path)[0].exists()) == (0, True)
    store.close()


def test_another_model_has_other_blocks(tmp_path: Path) -> None:
    saved(tmp_path)
    other = DiskBlockStore(tmp_path, {"model": "n"}, make_caches(1), BLOCK_SIZE, 1 << 20)
    assert other.num_blocks == 0
    assert other.load(HASHES[:2], [9, 10], 0) == 0
    other.close()


def test_the_least_recently_used_blocks_are_removed(tmp_path: Path) -> None:
    saved(tmp_path)
    size = files(tmp_path)[0].stat().st_size
    caches = make_caches(1)
    for number, file in enumerate(files(tmp_path)):
        os.utime(file, (1000.0 + number, 1000.0 + number))
    store = open_store(tmp_path, caches, max_bytes=5 * size)
    assert store.load(HASHES[:1], [9], 0) == 1  # now the most recently used one
    store.save(HASHES[6:9], [1, 2, 3])
    store.close()
    assert {file.stem for file in files(tmp_path)} == {HASHES[i].hex() for i in (0, 3, 6, 7, 8)}


def write_now(store: DiskBlockStore, first: int, count: int) -> None:
    """Save blocks, and wait until the thread has handled them. The time without writing is over."""
    store._resume_writing = 0.0
    save_now(store, first, count)


def save_now(store: DiskBlockStore, first: int, count: int) -> None:
    """Save blocks, and wait until the thread has handled them."""
    store.save(HASHES[first : first + count], range(first, first + count))
    while store._pending:
        time.sleep(0.005)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_logged_once_and_writing_is_tried_again(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, make_caches())
    attempts = []

    def full(self: Path, target: Path) -> Path:
        attempts.append(target)
        raise OSError(code, os.strerror(code))

    with caplog.at_level("WARNING"), monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        write_now(store, 0, 3)
        assert len(attempts) == 1, "the other blocks are dropped"
        write_now(store, 0, 3)
        assert len(attempts) == 2
        assert caplog.text.count(os.strerror(code)) == 1
        assert not list(tmp_path.glob("*/*.[tk]*"))
    write_now(store, 0, 3)
    assert caplog.text.count("blocks are written again") == 1
    store.close()
    assert len(files(tmp_path)) == 3


def test_a_folder_that_was_removed_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    folder, caches = tmp_path / "cache", make_caches()
    store = open_store(folder, caches, clock=lambda: now[0])
    save_now(store, 0, 4)
    shutil.rmtree(folder)
    with caplog.at_level("WARNING"):
        assert store.load(HASHES[:2], [9, 10], 0) == 0
        assert store.num_blocks == 0, "no lost block is in the index"
        for seconds in (0.0, disk_block_store.RETRY_SECONDS - 1):
            now[0] = 100.0 + seconds
            save_now(store, 0, 4)
            assert not folder.exists(), "it is created after the time without writing"
        assert caplog.text.count("the folder was removed") == 1
        folder.touch()  # It cannot be created.
        now[0] = 200.0
        save_now(store, 0, 4)
        folder.unlink()
        now[0] = 300.0
        save_now(store, 0, 4)
        assert caplog.text.count("blocks are written again") == 1
    assert store.load(HASHES[:4], [9, 10, 11, 12], 0) == 4
    check(caches, [9, 10, 11, 12], [contents(caches, block_id) for block_id in range(4)])
    second = open_store(folder, make_caches(1))
    save_now(second, 4, 1)
    assert len(files(folder)) == 4, "the new folder is locked"
    for each in (store, second):
        each.close()
    # Other tests of the process may have set the level of the logger, so that lines at INFO are records too.
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 4, caplog.text


FULL_SCRIPT = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_disk_block_store import HASHES, check, contents, make_caches, open_store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for num_bytes in (0, 100):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, -1))
    expected, caches = make_caches(), make_caches(1)
    store = open_store(Path(sys.argv[1]), caches)
    store.save(HASHES[6:8], [6, 7])
    assert store.load(HASHES[:4], [9, 10, 11, 12], 0) == 4
    check(caches, [9, 10, 11, 12], [contents(expected, block_id) for block_id in range(4)])
    store.close()
"""


def test_a_server_starts_and_reads_while_the_disk_is_full(tmp_path: Path) -> None:
    """The first bytes of a file fit, or none."""
    saved(tmp_path)
    command = [sys.executable, "-c", FULL_SCRIPT, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("File too large") == 2
    assert len(files(tmp_path)) == 4
    assert not list(tmp_path.glob("*/*.tmp"))
    store = open_store(tmp_path, make_caches())
    assert (store.num_blocks, store.load(HASHES[:4], range(4), 0), store.num_damaged) == (4, 4, 0)
    store.close()


def test_a_new_folder_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, **_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        store = open_store(tmp_path / "new", make_caches())
        assert store.load(HASHES[:1], [0], 0) == 0
        write_now(store, 0, 2)
    assert not (tmp_path / "new").exists()
    write_now(store, 0, 2)
    store.close()
    assert len(files(tmp_path / "new")) == 2


def test_a_second_process_reads_and_writes_once_the_first_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = saved(tmp_path)
    first = open_store(tmp_path, make_caches())
    caches = make_caches(1)
    with caplog.at_level("WARNING"):
        second = open_store(tmp_path, caches)
        write_now(second, 6, 2)
        write_now(second, 6, 2)
    assert caplog.text.count("another process writes to this folder") == 1
    assert second.load(HASHES[:2], [9, 10], 0) == 2
    check(caches, [9, 10], expected[:2])
    assert len(files(tmp_path)) == 4
    write_now(first, 4, 1)
    first.close()
    write_now(second, 6, 2)
    assert second.num_blocks == 7, "and it has found the file that the first one has written meanwhile"
    second.close()
    assert len(files(tmp_path)) == 7


def test_both_processes_together_respect_the_budget(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    size = files(tmp_path)[0].stat().st_size
    first, second = (open_store(tmp_path, make_caches(), max_bytes=3 * size) for _ in range(2))
    for number in range(1, 6):
        write_now(first, number, 1)
        write_now(second, number + 6, 1)
    assert len(files(tmp_path)) == 3
    first.close()
    for number in range(6):
        write_now(second, number, 1)
    assert len(files(tmp_path)) == 3
    second.close()


def test_a_file_that_the_writer_removes_is_missing_for_the_reader(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    size = files(tmp_path)[0].stat().st_size
    writer = open_store(tmp_path, make_caches(), max_bytes=4 * size)
    caches = make_caches(1)
    reader = open_store(tmp_path, caches)
    assert writer.load(HASHES[:1], [0], 0) == 1  # now the most recently used one
    write_now(writer, 8, 2)
    assert reader.load(HASHES[:4], [9, 10, 11, 12], 0) == 1
    check(caches, [9], expected[:1])
    assert (reader.num_damaged, len(files(tmp_path))) == (0, 4)
    writer.close()
    reader.close()


def test_blocks_that_are_computed_faster_are_not_read(tmp_path: Path) -> None:
    saved(tmp_path)
    asked = []

    def compute_seconds(start: int, num_tokens: int) -> float:
        asked.append((start, num_tokens))
        return 1e-9

    fast = open_store(tmp_path, make_caches(1), compute_seconds=compute_seconds)
    assert fast.load(HASHES[:3], [9, 10, 11], 8) == 0
    assert asked == [(8, 12)]
    fast.close()
    slow = open_store(tmp_path, make_caches(1), compute_seconds=lambda _start, _count: 10.0)
    assert slow.load(HASHES[:3], [9, 10, 11], 8) == 3
    slow.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"prefix_cache_dir=.*file: Not a directory .*; choose another folder"):
        open_store(tmp_path / "file", make_caches())


WRITER = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_disk_block_store import make_caches, open_store
caches = make_caches()
store = open_store(Path(sys.argv[1]), caches, max_bytes=1 << 30)
number, num_lines = 0, 0
while True:
    hashes = [(number + index).to_bytes(32) for index in range(12)]
    store.save(hashes, range(12))
    number += 12
    if store.num_saved > 100 and not num_lines:
        num_lines = print("writing", flush=True) or 1
"""


def test_a_reader_beside_a_process_that_evicts_and_is_killed(tmp_path: Path) -> None:
    expected = [contents(make_caches(), block_id) for block_id in range(12)]
    script = WRITER.replace("max_bytes=1 << 30", "max_bytes=1 << 16")
    process = start_writer(tmp_path, script)
    caches, num_read = make_caches(1), 0
    for _ in range(20):
        reader = open_store(tmp_path, caches, max_bytes=1 << 16)
        assert reader._lock_file is None
        for block_hash in list(reader._files):
            if reader.load([block_hash], [14], 0):
                check(caches, [14], [expected[int.from_bytes(block_hash) % 12]])
                num_read += 1
        assert reader.num_damaged == 0
        reader.close()
    assert num_read > 0
    process.kill()
    process.wait()
    successor = open_store(tmp_path, caches, max_bytes=1 << 16)
    assert successor._lock_file is not None
    write_now(successor, 0, 12)
    successor.close()
    assert sum(file.stat().st_size for file in files(tmp_path)) <= 1 << 16


def start_writer(folder: Path, script: str = WRITER) -> subprocess.Popen[str]:
    """Start a process that writes blocks without end, and wait until it has saved some."""
    command = [sys.executable, "-c", script, str(folder), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_files_of_a_killed_process_are_whole(tmp_path: Path) -> None:
    process = start_writer(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    expected = [contents(make_caches(), block_id) for block_id in range(12)]
    caches = make_caches(1)
    store = open_store(tmp_path, caches, max_bytes=1 << 30)
    assert store.num_blocks > 50
    assert not list(tmp_path.glob("*/*.tmp"))
    for file in files(tmp_path):
        block_hash = bytes.fromhex(file.stem)
        assert store.load([block_hash], [14], 0) == 1
        check(caches, [14], [expected[int.from_bytes(block_hash) % 12]])
    assert store.num_damaged == 0
    store.close()


def test_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    saved(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    for name in ("model.json", "lock"):
        victim = tmp_path / f"victim of {name}"
        victim.write_text("kept")
        (folder / name).unlink()
        (folder / name).symlink_to(victim)
        with pytest.raises(ConfigError, match="prefix_cache_dir"):
            open_store(tmp_path, make_caches())
        assert victim.read_text() == "kept"
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(ConfigError, match="prefix_cache_dir"):
            open_store(tmp_path, make_caches())
        (folder / name).rmdir()
