"""Downloads from the Hugging Face hub that continue after an interruption.

`huggingface_hub` begins a file again if its process was ended. Large files are therefore downloaded here first, to the
place in its cache where it looks for them, and through a file that keeps what has arrived.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

MIN_BYTES: Final = 8 << 20
"""Smaller files are downloaded again if they are interrupted."""

PARTIAL_SUFFIX: Final = ".chairlift-partial"
SHA256: Final = re.compile(r"[0-9a-f]{64}")


def download_snapshot(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> Path:
    """Download the files of a repository that match the patterns, and return their folder.

    Raises:
        HfHubHTTPError, OSError: as `huggingface_hub.snapshot_download`.
    """
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    with suppress(ConnectionError, httpx.TransportError):  # then the library takes what is in its cache
        files = HfApi().list_repo_files(name)
        _prefetch(name, filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
    return Path(snapshot_download(name, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))


def download_file(name: str, file: str) -> Path:
    """Download one file of a repository, and return its path.

    Raises:
        HfHubHTTPError, OSError: as `huggingface_hub.hf_hub_download`.
    """
    import httpx
    from huggingface_hub import hf_hub_download

    with suppress(ConnectionError, httpx.TransportError):
        _prefetch(name, [file])
    return Path(hf_hub_download(name, file))


def _prefetch(name: str, files: Iterable[str]) -> None:
    """Download the large files that are not in the cache."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
    for file in files:
        url = hf_hub_url(name, file)
        metadata = get_hf_file_metadata(url)
        if metadata.etag is None or metadata.size is None or metadata.size < MIN_BYTES:
            continue
        blob = blobs / metadata.etag
        if not blob.exists():
            blobs.mkdir(parents=True, exist_ok=True)
            _continue_download(url, file, blob, metadata.size)


def _continue_download(url: str, file: str, blob: Path, size: int) -> None:
    """Download a file from where it was interrupted. If another process downloads it, nothing is done."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    path = blob.with_name(f"{blob.name}{PARTIAL_SUFFIX}")
    with path.open("ab") as partial:
        try:
            fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        if partial.tell() > size:
            partial.truncate(0)
        start = partial.tell()
        http_get(
            url, partial, resume_size=start, headers=build_hf_headers(), expected_size=size, displayed_filename=file
        )
        partial.flush()
        if _is_complete(path, blob.name, size):
            os.replace(path, blob)
        else:
            path.unlink()


def _is_complete(path: Path, etag: str, size: int) -> bool:
    """Whether a file has its size and, if the hub knows it, its digest."""
    if path.stat().st_size != size:
        return False
    if not SHA256.fullmatch(etag):
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == etag
