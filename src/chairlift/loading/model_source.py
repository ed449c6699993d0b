"""ModelSource: the files of a model, a GGUF file or a folder, and what is read from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.kernels.weight_formats import FLOATS
from chairlift.loading.generation_config import FILE_NAME, read_folder_defaults, read_gguf_defaults
from chairlift.loading.gguf_file import ROPE_FACTORS, GGUFFile, part_paths
from chairlift.loading.json_files import read_json
from chairlift.loading.pooled_text_config import lowers_case
from chairlift.loading.pooling_config import load_pooling, static_embedding_folder
from chairlift.models.architectures.static_embedding import static_config
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.pooling import PoolingConfig
from chairlift.models.quantization import quantized_module
from chairlift.models.registry import find_gguf_architecture, get_architecture, read_gguf_config, read_hf_config
from chairlift.sampling_params import SamplingDefaults

if TYPE_CHECKING:
    import torch

    from chairlift.loading.file_weights import FileWeights
    from chairlift.loading.text.tokenizer import Tokenizer

DTYPE_FORMATS: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SAFETENSORS_FORMATS: Final = {"F16": "f16", "BF16": "bf16"}
CONFIG: Final = "config.json"
EMBEDDING: Final = "token_embd.weight"
NUM_ROWS: Final = 8
"""The number of rows at each end of LM head and embedding that are compared."""

QUANTIZATION: Final = "quantize_config.json"
"""The file in which AutoGPTQ stores the quantization, in its first versions only there."""


@dataclass(frozen=True)
class ModelSource(ABC):
    """The files of a model. A source holds the file that it has opened; nothing else does, except weights.

    Attributes:
        path: the GGUF file, or the first part of a split one; or the folder with config.json, or only a config.json.
        name: the name of the model in responses.
    """

    path: Path
    name: str

    def config(self, *, needs_predictor: bool = False) -> ModelConfig:
        """Read the configuration; raises as `read_hf_config`, `read_gguf_config` and `choose_predictor`."""
        return choose_predictor(self._read_config(), self.name, needs_predictor)

    def decoder_config(self, *, needs_predictor: bool = False) -> ModelConfig:
        """As `config`, of a model with KV memory. Raises ConfigError if it is an encoder."""
        config = self.config(needs_predictor=needs_predictor)
        if config.encoder is not None:
            raise encoder_error(self.name)
        return config

    def formats(self, config: ModelConfig) -> Callable[[str], str]:
        """Return a function from the name of a parameter to its `PackedRows.format`; a parameter that is in no file has
        the type of the configuration. Raises ModelLoadError if a file cannot be read."""
        latents = (spec.latent for spec in config.attention_specs.values() if spec.latent is not None)
        parts = (item for latent in latents for item in latent.stored.items())
        transposed = {f"{name}.weight" for name, part in parts if part.is_transposed}
        stored_format = self._stored_formats(config, DTYPE_FORMATS[config.dtype])

        def matrix_format(name: str) -> str:
            found = stored_format(name)
            return found if name not in transposed or found in FLOATS else "f32"

        return matrix_format

    @abstractmethod
    def weights(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> FileWeights:
        """Open the weights. Raises ModelLoadError if a file is missing, damaged or not supported."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises ModelLoadError if it is missing, damaged or not supported."""

    @abstractmethod
    def defaults(self) -> SamplingDefaults:
        """Read the sampling defaults. Raises ModelLoadError if a value is out of range."""

    def pooling(self, config: ModelConfig) -> PoolingConfig | None:
        """Read how the model computes vectors or scores; None if it generates text. Raises as `load_pooling`."""
        return None

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """The files with weights."""

    @abstractmethod
    def is_quantized(self, config: ModelConfig) -> bool:
        """Whether the files may hold matrices that are not stored as floats."""

    @abstractmethod
    def check(self) -> None:
        """Check the files without importing torch, which takes seconds. Raises ModelLoadError if one is damaged, or the
        architecture is not supported."""

    @abstractmethod
    def _read_config(self) -> ModelConfig:
        """Read the whole configuration."""

    @abstractmethod
    def _stored_formats(self, config: ModelConfig, default: str) -> Callable[[str], str]:
        """As `formats`, of the matrices as they are in the files; `default` for parameters that are in none."""


@dataclass(frozen=True)
class GGUFSource(ModelSource):
    """A model in a GGUF file.

    Attributes:
        packaged_defaults: the sampling defaults of a packaged model, which the metadata of the file replace.
    """

    packaged_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @cached_property
    def file(self) -> GGUFFile:
        """The open file. Its pages leave memory when neither this source nor weights refer to it."""
        return GGUFFile(self.path)

    def weights(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> FileWeights:
        from chairlift.loading.gguf_weights import GGUFWeights

        return GGUFWeights(self.file, config, dtype, device).checked()

    def tokenizer(self) -> Tokenizer:
        from chairlift.loading.text.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(self.file)

    def defaults(self) -> SamplingDefaults:
        return self.packaged_defaults.updated(read_gguf_defaults(self.file.metadata, self.path))

    def weight_files(self) -> list[Path]:
        return part_paths(self.path)

    def is_quantized(self, config: ModelConfig) -> bool:
        return True

    def check(self) -> None:
        find_gguf_architecture(self.file.metadata, source=str(self.file.path))

    def _read_config(self) -> ModelConfig:
        metadata, source = self.file.metadata, str(self.file.path)
        name, _ = find_gguf_architecture(metadata, source=source)
        shapes = {name: tensor.shape for name, tensor in self.file.tensors.items()}
        if EMBEDDING in shapes:  # Its rows count, whatever the number of tokens.
            metadata = {**metadata, f"{name}.vocab_size": shapes[EMBEDDING][0]}
        return read_gguf_config(metadata, source=source, tensor_names=shapes, rope_factors=self._rope_factors())

    def _rope_factors(self) -> dict[str, list[float]]:
        names = [name for name in ROPE_FACTORS if name in self.file.tensors]
        if not names:
            return {}
        from chairlift.loading.gguf_weights import dequantize

        return {name: [float(factor) for factor in dequantize(self.file, name).ravel()] for name in names}

    def _stored_formats(self, config: ModelConfig, default: str) -> Callable[[str], str]:
        architecture = get_architecture(config)
        found = {name: self.file.packed_format(name, architecture.gguf_scale(name)) for name in self.file.tensors}
        return lambda name: (
            default if (stored := architecture.gguf_name(name)) is None else found.get(stored.name, default)
        )


class FolderSource(ModelSource):
    """A model in a folder with config.json and safetensors files, or only a config.json, for random weights."""

    @property
    def _config_file(self) -> Path:
        return self.path if self.path.is_file() else self.path / CONFIG

    @cached_property
    def _static_folder(self) -> Path | None:
        return static_embedding_folder(self.path)

    @property
    def _weights_folder(self) -> Path:
        return self._static_folder or self.path

    def weights(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> FileWeights:
        if self.path.is_file():
            raise ModelLoadError(
                f"{self.path}: a config.json contains no weights; use --load-format dummy for random ones"
            )
        from chairlift.loading.safetensors_weights import SafetensorsWeights

        return SafetensorsWeights(self._weights_folder, config, dtype, device).checked()

    def tokenizer(self) -> Tokenizer:
        from chairlift.loading.text.hf_tokenizer import folder_tokenizer

        if self._static_folder is not None:
            return folder_tokenizer(self._static_folder, has_settings=False)
        tokenizer = folder_tokenizer(self._config_file.parent)
        if lowers_case(self.path):
            tokenizer.lower_case()
        return tokenizer

    def defaults(self) -> SamplingDefaults:
        return read_folder_defaults(self.path)

    def pooling(self, config: ModelConfig) -> PoolingConfig | None:
        return load_pooling(self.path, config)

    def weight_files(self) -> list[Path]:
        return sorted(self._weights_folder.glob("*.safetensors"))

    def is_quantized(self, config: ModelConfig) -> bool:
        return config.quantization is not None and self.path.is_dir()

    def check(self) -> None:
        self._file_config()
        for file in self.weight_files():
            _safetensors_header(file)

    def _read_config(self) -> ModelConfig:
        read = self._file_config()
        if read.tie_word_embeddings and read.encoder is None and self.path.is_dir() and self._has_own_head(read):
            return replace(read, tie_word_embeddings=False)
        return read

    def _file_config(self) -> ModelConfig:
        """The configuration as it is in the files of JSON."""
        if self._static_folder is not None:
            file = self._static_folder / "model.safetensors"
            return read_hf_config(static_config(_safetensors_header(file), str(file)), source=str(file))
        generation, file = read_json(self.path / FILE_NAME), self._config_file
        config = read_json(file)
        if "quantization_config" not in config and (separate := read_json(file.with_name(QUANTIZATION))):
            config["quantization_config"] = {"quant_method": "gptq", **separate}
        return read_hf_config(config, source=str(file), generation_config=generation)

    def _has_own_head(self, config: ModelConfig) -> bool:
        """Whether the files have an LM head with other values than the embedding, as transformers 5 looks it up.

        Only the first and the last rows are compared.
        """
        hf_names, files = get_architecture(config).hf_names, self.weight_files()
        matrices = config.head.weight_names[0], config.embedding.weight_names[0]
        rows = [_end_rows(files, [place.name for place in hf_names(name)]) for name in matrices]
        return None not in rows and rows[0] != rows[1]

    def _stored_formats(self, config: ModelConfig, default: str) -> Callable[[str], str]:
        hf_names, quantization = get_architecture(config).hf_names, config.quantization
        found = {name: each for file in self.weight_files() for name, each in _safetensors_formats(file).items()}
        widths = {name: matrix.in_features for matrix in config.matrices for name in matrix.weight_names}

        def stored_format(name: str) -> str:
            names = [each.name for each in hf_names(name)]
            module = quantized_module(names, found)
            if module is None or quantization is None or (scheme := quantization.scheme(module, *names)) is None:
                return next((found[each] for each in names if each in found), default)
            return scheme.packed_format(widths[name])

        return stored_format


def _safetensors_formats(file: Path) -> dict[str, str]:
    return {name: SAFETENSORS_FORMATS.get(kind, "f32") for name, (kind, _shape) in _safetensors_header(file).items()}


def _safetensors_header(file: Path) -> dict[str, tuple[str, list[int]]]:
    """The type and the shape of each tensor in a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file}: cannot be read ({error}); if it is truncated or damaged, download it again"
        ) from error


def _end_rows(files: Sequence[Path], names: Sequence[str]) -> list[list[float]] | None:
    """Return the first and last rows of a matrix that has one of the names, or None if no file has it."""
    from safetensors import safe_open

    for file in files:
        if (name := next(iter(_safetensors_header(file).keys() & set(names)), None)) is not None:
            with safe_open(file, framework="pt") as opened:
                rows = opened.get_slice(name)
                return [*rows[:NUM_ROWS].tolist(), *rows[-NUM_ROWS:].tolist()]
    return None


def declared_formats(config: ModelConfig) -> Callable[[str], str]:
    """As `ModelSource.formats`, of random weights, which have the type of the configuration."""
    declared = DTYPE_FORMATS[config.dtype]
    return lambda name: declared


def choose_predictor(config: ModelConfig, name: str, is_needed: bool) -> ModelConfig:
    """The configuration without its predictor unless it is needed. Raises ConfigError if it is, but there is none."""
    if is_needed and config.predictor is None:
        raise ConfigError(
            f"speculative_config: method=mtp needs a layer that predicts a further token (MTP), and {name} has none: "
            "use method=ngram, or a draft model"
        )
    return config if is_needed else replace(config, predictor=None)


def encoder_error(name: str) -> ConfigError:
    """The error that a command needs a model with KV memory."""
    return ConfigError(f"model {name!r} is an encoder, which has no KV memory: use a decoder")
