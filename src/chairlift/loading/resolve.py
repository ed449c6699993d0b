"""Resolution of a model's name to its files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from chairlift.errors import ModelLoadError
from chairlift.loading.fetch import DEFAULT_MODEL, PACKAGED_MODELS, fetch_model
from chairlift.loading.gguf_file import SPLIT_NAME, existing_parts, part_paths
from chairlift.loading.model_source import CONFIG, FolderSource, GGUFSource, ModelSource
from chairlift.loading.pooling_config import static_embedding_folder
from chairlift.system.input_files import open_regular_file

HUB_NAME: Final = re.compile(r"(?=.{3,96}\Z)[A-Za-z0-9][\w.-]*/[\w.-]+")
"""Names on the Hugging Face hub have at most 96 characters."""
HUB_OWNER: Final = re.compile(r"[A-Za-z0-9][\w.-]*")
"""A name on the hub without its second half."""
HUB_FILE: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/(.+\.gguf)")
"""A GGUF file in a repository of the hub: the name of the repository, and the path of the file in it."""
HUB_ADDRESS: Final = re.compile(r"(?:https://)?(?:hf\.co|huggingface\.co)/|:[\w.-]+\Z")
"""What llama.cpp and Ollama accept around the name of a repository: the address of the hub, and a quantization."""
HUB_FILES: Final = ["*.safetensors", "*.json", "*.jinja"]
IN_SUBFOLDERS: Final = ["*/*.safetensors"]
"""Weights in folders of a repository, which are a second copy in another format (openai/gpt-oss-20b)."""
MODEL_KINDS: Final = (
    f"a model is one of {', '.join(PACKAGED_MODELS)} (the first is the default), a .gguf file, a folder with "
    "config.json, or a name on the Hugging Face hub such as Qwen/Qwen3-0.6B (with /FILE.gguf for one of its GGUF files)"
)


def resolve_model(model: str | None, *, accept_terms: bool = False) -> ModelSource:
    """Return the source of a model, and download its files first if necessary.

    Args:
        model: a key of PACKAGED_MODELS, or None for DEFAULT_MODEL; the path of a .gguf file, a folder with config.json,
            or only a config.json (for random weights); otherwise a name on the Hugging Face hub, or a name and the path
            of a GGUF file in it.
        accept_terms: see fetch_model.

    Raises:
        ModelLoadError: there is no such model, or it cannot be downloaded; the message names the reason.
    """
    model = DEFAULT_MODEL if model is None else model
    if (packaged := PACKAGED_MODELS.get(model)) is not None:
        path = fetch_model(packaged, accept_terms=accept_terms)
        return GGUFSource(path, packaged.name, packaged.sampling_defaults)
    path = Path(model).expanduser()
    try:
        name = model_name(model)
        if model and path.is_dir():  # The path of no text is the working folder.
            return _folder(path, name)
        if path.is_file():
            return _file(path, name)
    except OSError as error:
        raise ModelLoadError(f"model {model!r:.100}: {error.strerror or error}; {MODEL_KINDS}") from None
    if (hub_file := HUB_FILE.fullmatch(model)) is not None and HUB_NAME.fullmatch(hub_file[1]):
        return _file(_download_file(*hub_file.groups()), name)
    if path.suffix == ".gguf" or not HUB_NAME.fullmatch(model):
        raise ModelLoadError(f"model {model!r:.100}: there is no such file or folder; {_hint(model)}")
    return _folder(_download(model), name)


def _hint(model: str) -> str:
    """What to write instead of a name that no packaged model, file, folder or repository has."""
    if HUB_NAME.fullmatch(name := HUB_ADDRESS.sub("", model)):
        return f"on the Hugging Face hub write {name}, or {name}/FILE.gguf for one of its GGUF files"
    if not HUB_OWNER.fullmatch(model) or model.endswith(".gguf"):
        return MODEL_KINDS
    close = [name for name in PACKAGED_MODELS if name.startswith(model.lower())]
    close = close or get_close_matches(model.lower(), PACKAGED_MODELS, 1)
    meant = f"did you mean {close[0]}? A" if close else f"on the Hugging Face hub write OWNER/{model}; a"
    return meant + MODEL_KINDS[1:]


def model_root(model: str | None) -> str:
    """The repository or the absolute path from which `resolve_model` reads a model, without a download or a check."""
    model = DEFAULT_MODEL if model is None else model
    if (packaged := PACKAGED_MODELS.get(model)) is not None:
        return packaged.repository
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def model_name(model: str | None) -> str:
    """The name of a model in responses, which `resolve_model` returns, without a download or a check."""
    model = DEFAULT_MODEL if model is None else model
    if (packaged := PACKAGED_MODELS.get(model)) is not None:
        return packaged.name
    path = Path(model).expanduser()
    if path.suffix == ".json":
        return path.resolve().parent.name if path.name == CONFIG else path.stem
    if path.suffix == ".gguf" or path.is_file():
        part = SPLIT_NAME.fullmatch(path.name)
        return path.stem if part is None else part[1]
    return path.resolve().name if path.is_dir() else model


def _folder(path: Path, name: str) -> ModelSource:
    if (path / CONFIG).is_file() or static_embedding_folder(path) is not None:
        return FolderSource(path, name)
    ggufs = sorted(path.glob("*.gguf"))
    hint = f"name the GGUF file: {ggufs[0]}" if ggufs else MODEL_KINDS
    raise ModelLoadError(f"{path}: contains no config.json; {hint}")


def _file(path: Path, name: str) -> ModelSource:
    if path.suffix == ".json":
        return FolderSource(path, name)
    with os.fdopen(open_regular_file(path), "rb") as file:
        magic = file.read(4)
    if path.suffix != ".gguf" and magic != b"GGUF":
        raise ModelLoadError(f"{path}: is neither a GGUF file nor a config.json; {MODEL_KINDS}")
    return GGUFSource(existing_parts(path)[0], name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(name):
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=IN_SUBFOLDERS))


def _download_file(name: str, file: str) -> Path:
    """Download a file, or all parts of a split model, and return the path of the file or of the first part."""
    from huggingface_hub import hf_hub_download

    found = []
    for part in map(str, part_paths(Path(file))):
        with _hub_errors(name, part):
            found.append(Path(hf_hub_download(name, part)))
    return found[0]


@contextmanager
def _hub_errors(name: str, file: str | None = None) -> Iterator[None]:
    from huggingface_hub import errors

    missing = f"model {name!r}: there is no such file or folder"
    prefix = f"{missing}, and the Hugging Face hub"
    try:
        yield
    except errors.GatedRepoError as error:
        hint = f"accept them at https://huggingface.co/{name} and log in with `hf auth login`"
        raise ModelLoadError(f"{prefix} requires that its terms are accepted; {hint}") from error
    except errors.RepositoryNotFoundError as error:
        hint = "check the spelling, and log in with `hf auth login` if it is private"
        raise ModelLoadError(f"{prefix} does not have it; {hint}") from error
    except errors.RemoteEntryNotFoundError as error:
        hint = f"https://huggingface.co/{name}/tree/main lists its files"
        raise ModelLoadError(f"model {name!r} on the Hugging Face hub has no file {file!r}; {hint}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, *_connection_errors()) as error:  # type: ignore[misc]
        hint = "check the network connection, set HF_ENDPOINT to a mirror, or name a local folder or .gguf file"
        raise ModelLoadError(f"{prefix} cannot be reached; {hint}") from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{missing}, and the download from the Hugging Face hub failed: {error}; {MODEL_KINDS}"
        ) from error


def _connection_errors() -> list[type[Exception]]:
    """The errors of connections of the HTTP library that the installed huggingface_hub uses."""
    libraries = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return [ConnectionError, *(library.TransportError for library in libraries)]
