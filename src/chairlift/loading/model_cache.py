"""The downloaded models: those of Chairlift's own cache, and those of the Hugging Face cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import ModelLoadError
from chairlift.loading.cache import models_dir
from chairlift.loading.fetch import PACKAGED_MODELS


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A downloaded model.

    Attributes:
        name: the name with which it can be served.
        num_bytes: the size of all its files, in all revisions.
        last_used: when it was last read or written, in seconds since the epoch.
        remove: deletes its files.
    """

    name: str
    path: Path
    num_bytes: int
    last_used: float
    remove: Callable[[], None]


def cached_models() -> list[CachedModel]:
    """The downloaded models by name."""
    return sorted([*_own_models(), *_hub_models()], key=lambda model: model.name.lower())


def find_cached_model(name: str) -> CachedModel:
    """The downloaded model with this name.

    Raises:
        ModelLoadError: there is none; the message lists the names.
    """
    models = cached_models()
    for model in models:
        if model.name == name:
            return model
    known = ", ".join(model.name for model in models) or "none"
    raise ModelLoadError(f"model {name!r:.100} is not downloaded; downloaded are: {known}")


def _own_models() -> Iterator[CachedModel]:
    names = {model.file_name: model.name for model in PACKAGED_MODELS.values()}
    for path in sorted(models_dir().glob("*.gguf")):
        stat = path.stat()
        last_used = max(stat.st_atime, stat.st_mtime)
        yield CachedModel(names.get(path.name, str(path)), path, stat.st_size, last_used, path.unlink)


def _hub_models() -> Iterator[CachedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in cache.repos:
        if repo.repo_type == "model":
            hashes = [revision.commit_hash for revision in repo.revisions]
            deletion = cache.delete_revisions(*hashes)
            yield CachedModel(
                repo.repo_id, Path(repo.repo_path), repo.size_on_disk, repo.last_accessed, deletion.execute
            )
