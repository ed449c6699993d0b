"""From what the user calls a model to its files, and from the files to configuration, weights and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from chairlift.errors import ModelLoadError
from chairlift.loading.fetch import DEFAULT_MODEL, fetch_default_model
from chairlift.models.config import ModelConfig
from chairlift.models.registry import read_gguf_config, read_hf_config

if TYPE_CHECKING:
    import torch

    from chairlift.loading.file_weights import FileWeights
    from chairlift.loading.gguf_file import GGUFFile
    from chairlift.loading.text.tokenizer import Tokenizer

HUB_NAME: Final = re.compile(r"(?=.{3,96}\Z)[A-Za-z0-9][\w.-]*/[\w.-]+")
"""At most 96 characters, which is the hub's limit."""
HUB_FILES: Final = ["*.safetensors", "*.json", "*.jinja"]
WAYS: Final = (
    f"a model is {DEFAULT_MODEL} (the default), a .gguf file, a folder with config.json, or a name on the "
    "Hugging Face hub like Qwen/Qwen3-0.6B"
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies.

    Attributes:
        kind: "gguf": `path` is the file; "hf": `path` is a folder with config.json, or such a file alone.
        name: what the model is called in answers.
    """

    kind: Literal["gguf", "hf"]
    path: Path
    name: str


def resolve_model(model: str | None) -> ModelFiles:
    """Find a model's files, fetching them if need be.

    Args:
        model: None or DEFAULT_MODEL; a .gguf file; a folder with config.json; a config.json alone (for random
            weights); else a name on the Hugging Face hub.

    Raises:
        ModelLoadError: it is nothing of that, or cannot be fetched; says what was tried.
    """
    if model is None or model == DEFAULT_MODEL:
        return ModelFiles("gguf", fetch_default_model(), DEFAULT_MODEL)
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _folder(path, path.resolve().name)
        if path.is_file():
            return _file(path)
    except OSError as error:
        raise ModelLoadError(f"model {model!r:.100}: {error.strerror or error}; {WAYS}") from None
    if path.suffix == ".gguf" or not HUB_NAME.fullmatch(model):
        raise ModelLoadError(f"model {model!r:.100}: there is no such file or folder; {WAYS}")
    return _folder(_download(model), model)


def _folder(path: Path, name: str) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles("hf", path, name)
    ggufs = sorted(path.glob("*.gguf"))
    way = f"name the file itself: {ggufs[0]}" if ggufs else WAYS
    raise ModelLoadError(f"{path}: has no config.json; {way}")


def _file(path: Path) -> ModelFiles:
    if path.suffix == ".json":
        return ModelFiles("hf", path, path.resolve().parent.name if path.name == "config.json" else path.stem)
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix != ".gguf" and magic != b"GGUF":
        raise ModelLoadError(f"{path}: neither a GGUF file nor a config.json; {WAYS}")
    return ModelFiles("gguf", path, path.stem)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(name):
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    from huggingface_hub import errors

    tried = f"model {name!r}: there is no such file or folder here, and the Hugging Face hub"
    try:
        yield
    except errors.GatedRepoError as error:
        way = f"accept its terms at https://huggingface.co/{name} and log in with `hf auth login`"
        raise ModelLoadError(f"{tried} wants its terms accepted first; {way}") from error
    except errors.RepositoryNotFoundError as error:
        way = "check the spelling, and log in with `hf auth login` if it is private"
        raise ModelLoadError(f"{tried} does not have it; {way}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        way = "get online, set HF_ENDPOINT to a mirror, or give a local folder or .gguf file"
        raise ModelLoadError(f"{tried} cannot be reached; {way}") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise ModelLoadError(f"{tried} failed: {error}; {WAYS}") from error


@lru_cache(maxsize=1)
def _open_gguf(path: Path, mtime_ns: int, size: int) -> GGUFFile:
    from chairlift.loading.gguf_file import GGUFFile

    return GGUFFile(path)


def open_gguf(path: Path) -> GGUFFile:
    """The open file; configuration, weights and tokenizer of one model share it until `close_gguf`.

    Raises:
        ModelLoadError: see GGUFFile.
    """
    stat = path.stat()
    return _open_gguf(path, stat.st_mtime_ns, stat.st_size)


def close_gguf() -> None:
    """Let go of the file that is open, and so of the pages of it that are in memory, once nobody reads it any more."""
    _open_gguf.cache_clear()


def load_config(files: ModelFiles) -> ModelConfig:
    """The model's configuration.

    Raises:
        ModelLoadError: see read_hf_config and read_gguf_config.
    """
    if files.kind == "gguf":
        return _gguf_config(open_gguf(files.path))
    from chairlift.loading.text.hf_tokenizer import read_json

    file = files.path if files.path.is_file() else files.path / "config.json"
    generation = read_json(file.with_name("generation_config.json")) if files.path.is_dir() else {}
    return read_hf_config(read_json(file), source=str(file), generation_config=generation)


def _gguf_config(file: GGUFFile) -> ModelConfig:
    return read_gguf_config(
        file.metadata, source=str(file.path), tensor_names=file.tensors.keys(), rope_freqs=_rope_freqs(file)
    )


def _rope_freqs(file: GGUFFile) -> list[float] | None:
    from chairlift.loading.gguf_file import ROPE_FREQS

    if ROPE_FREQS not in file.tensors:
        return None
    from chairlift.loading.gguf_weights import dequantize

    return [float(factor) for factor in dequantize(file, ROPE_FREQS).ravel()]


def open_weights(files: ModelFiles, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> FileWeights:
    """The model's weights, a `Weights` that also tells what was left `unused()`.

    Raises:
        ModelLoadError: a file is missing, damaged or of a kind that is not supported.
    """
    if files.kind == "gguf":
        from chairlift.loading.gguf_weights import GGUFWeights

        return GGUFWeights(files.path, config, dtype, device, file=open_gguf(files.path))
    from chairlift.loading.safetensors_weights import SafetensorsWeights

    if files.path.is_file():
        raise ModelLoadError(f"{files.path}: a configuration alone has no weights; use --random-weights")
    return SafetensorsWeights(files.path, config, dtype, device)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The model's tokenizer.

    Raises:
        ModelLoadError: there is none, or it is damaged or of a kind that is not supported.
    """
    if files.kind == "gguf":
        from chairlift.loading.gguf_file import GGUFFile
        from chairlift.loading.text.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(GGUFFile(files.path, metadata_only=True))
    from chairlift.loading.text.hf_tokenizer import folder_tokenizer

    return folder_tokenizer(files.path.parent if files.path.is_file() else files.path)
