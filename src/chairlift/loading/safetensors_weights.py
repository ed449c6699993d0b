"""SafetensorsWeights: the parameters in the safetensors files of a Hugging Face folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from chairlift.errors import ModelLoadError
from chairlift.kernels.weights import PackedRows, packed_tensor
from chairlift.loading.block_rows import MXFP4_INPUTS, NAN_SCALE, decode_mxfp4, mxfp4_rows
from chairlift.loading.file_weights import FileWeights, oriented
from chairlift.loading.quantized_tensors import QuantizedReader
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.quantization import ACTIVATION_SCALES, MXFP4_ENDS, quantized_module
from chairlift.models.reading.architecture import StoredName
from chairlift.models.reading.wrappers import WRAPPERS
from chairlift.models.registry import get_architecture
from chairlift.system.input_files import read_text

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOAT_TYPES: Final = ("F64", "F32", "F16", "BF16")
MXFP4_ENDING: Final = re.compile(f"({'|'.join(MXFP4_ENDS)})$")
MTP_PREFIX: Final = "mtp."
"""The beginning of the names of a predictor's parameters."""
RECOMPUTED: Final = ("rotary_emb.inv_freq", "embeddings.position_ids")
"""The ends of the names of tensors whose values follow from the configuration."""


class SafetensorsWeights(FileWeights):
    """A `Weights` over `model.safetensors` or over the shards in `model.safetensors.index.json`.

    Pickled weights are never opened, since they can run code.

    Raises:
        ModelLoadError: there is neither file, or one is missing, truncated or damaged.
    """

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._architecture = get_architecture(config)
        self._wrapper = None if config.wrapper is None else WRAPPERS[config.wrapper]
        unread = (*self._architecture.unread_prefixes, *(self._wrapper.unread if self._wrapper else ()))
        if config.predictor is not None:
            unread = tuple(prefix for prefix in unread if prefix != MTP_PREFIX)
        last = len(config.layers) + config.num_unread_layers
        further = (f"model.layers.{number}." for number in range(len(config.layers), last))
        ends = None if config.quantization is None else ACTIVATION_SCALES
        super().__init__(path, config, dtype, device, (*unread, *further), ends)
        weight_map = _weight_map(path)
        files = _single_file(path) if weight_map is None else sorted(set(weight_map.values()))
        self._shards = {file: _open(path / file, device) for file in files}
        self._shard_of = {name: file for file, shard in self._shards.items() for name in shard.keys()}  # noqa: SIM118
        for name, file in (weight_map or {}).items():
            if self._shard_of.get(name) != file:
                raise ModelLoadError(f"{path / INDEX}: tensor {name} is not in {file}; download both files again")
        self._scale_errors: dict[str, float] = {}
        self._other_zero_points: list[str] = []
        self._divided: tuple[str, PackedRows] | None = None
        """The last quantized module that was read in parts, whose parts are read in succession, and its matrix."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        packed = self._quantized(name, shape)
        if packed is None:
            return super().tensor(name, shape)
        return torch.from_numpy(packed.to_floats(packed.rows)).to(device=self.device, dtype=self.dtype)

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        packed = self._quantized(name, shape)
        return super().packed(name, shape) if packed is None else packed

    def notes(self) -> list[str]:
        notes = super().notes()
        if self._wrapper is not None:
            notes.append(f"only the text model of {self.config.wrapper} is served: {self._wrapper.inputs} are not read")
        matrices = {name: error for name, error in self._scale_errors.items() if error > 0}
        if matrices:
            worst = max(matrices, key=lambda name: matrices[name])
            notes.append(
                f"scales of {len(matrices)} quantized matrices are rounded to float16: the error is at most "
                f"{matrices[worst]:.2g} of their root mean square ({worst})"
            )
        if self._other_zero_points:
            notes.append(
                f"{len(self._other_zero_points)} quantized matrices are symmetric by their configuration: their zero "
                f"points outside the middle are ignored ({self._other_zero_points[0]})"
            )
        return notes

    def _quantized(self, name: str, shape: tuple[int, ...]) -> PackedRows | None:
        """Read the matrix of a quantized layer, or return None if the parameter is not quantized."""
        places = self._places(name)
        module = quantized_module([each.name for each in places], self._shard_of)
        if module is None or len(shape) != 2:
            return None
        quantization = self.config.quantization
        scheme = None if quantization is None else quantization.scheme(module, *(each.name for each in places))
        if scheme is None:
            raise ModelLoadError(
                f"{self.path}: {module} has tensors of a quantized layer, but quantization_config in config.json "
                f"{'is missing' if quantization is None else 'does not name it as one'}"
            )

        place = next((each for each in places if each.name == module), None)
        is_mxfp4 = scheme.method == "mxfp4"
        if (place is not None) != is_mxfp4:
            raise ModelLoadError(
                f"{self.path}: {module} is {'not ' if is_mxfp4 else ''}stored in MXFP4, but config.json has "
                f"quant_method {scheme.method}; use the configuration that belongs to the weights"
            )
        if place is not None:
            return self._mxfp4(place, shape[0], shape[1])

        def read(end: str) -> torch.Tensor | None:
            file_name = f"{module}.{end}"
            if file_name not in self._shard_of:
                return None
            self._tensors_read.add(file_name)
            return self._read(StoredName(file_name)).cpu()

        def error(end: str, problem: str) -> ModelLoadError:
            return ModelLoadError(f"{self.path}: tensor {module}.{end} {problem}")

        part = next(each for each in places if each.name.removesuffix(".weight") == module)
        if part.expert is not None:
            raise ModelLoadError(
                f"{self.path}: tensor {part.name} holds the quantized experts of a layer, which is supported in MXFP4 "
                f"only, not in {scheme.method}; use the unquantized model or a GGUF file"
            )
        out, inputs = part.file_shape(shape, self._num_experts)
        if self._divided is not None and self._divided[0] == module:
            packed = self._divided[1]
        else:
            reader = QuantizedReader(read, error, scheme, (out, inputs))
            matrix = reader.matrix()
            if reader.ignores_zero_points:
                self._other_zero_points.append(module)
            self._scale_errors[module] = found = matrix.scale_error()
            if found == math.inf:
                raise error("scales", "exceed the range of float16; use --kernels torch with the unquantized model")
            packed = matrix.packed()
            self._divided = None if part.part is None else (module, packed)
        return oriented(replace(packed, rows=part.select_rows(packed.rows, self._head_dim)), part)

    def _mxfp4(self, place: StoredName, out: int, inputs: int) -> PackedRows:
        """Read the matrix of an expert in MXFP4.

        All experts have numbers [experts, out, in / 32, 16] and the exponents of the scales [experts, out, in / 32],
        as in `integrations/mxfp4.py` of transformers.
        """
        if inputs % MXFP4_INPUTS:
            raise ModelLoadError(
                f"{self.path}: tensor {place.name}{MXFP4_ENDS[0]} has blocks of {MXFP4_INPUTS} inputs, but the "
                f"configuration requires {inputs} inputs; use the configuration that belongs to the weights"
            )
        shapes = (out, inputs // MXFP4_INPUTS, MXFP4_INPUTS // 2), (out, inputs // MXFP4_INPUTS)
        arrays = []
        for end, shape in zip(MXFP4_ENDS, shapes, strict=True):
            stored = place._replace(name=place.name + end, is_transposed=False)
            if stored.name not in self._shard_of:
                raise self._missing(stored.name)
            tensor = self._read(self._check_shape(stored, shape)).cpu()
            if tensor.dtype != torch.uint8:
                raise ModelLoadError(
                    f"{self.path}: tensor {stored.name} is {tensor.dtype}, but MXFP4 requires torch.uint8"
                )
            arrays.append(tensor.contiguous().numpy())
        blocks, scales = arrays
        if (scales == NAN_SCALE).any():
            raise ModelLoadError(
                f"{self.path}: tensor {place.name}{MXFP4_ENDS[1]} contains NaN; download the file again"
            )
        return PackedRows("mxfp4", mxfp4_rows(blocks, scales), inputs, decode_mxfp4)

    def _places(self, name: str) -> list[StoredName]:
        return self._with_parts(name, self._architecture.hf_names(name))

    def _names(self) -> Collection[str]:
        return self._shard_of

    def _shape(self, file_name: str) -> tuple[int, ...]:
        return tuple(self._shards[self._shard_of[file_name]].get_slice(file_name).get_shape())

    def _read(self, stored: StoredName) -> torch.Tensor:
        file = self._shard_of[stored.name]
        try:
            tensor: torch.Tensor
            if stored.expert is None:
                tensor = self._shards[file].get_tensor(stored.name)
            else:
                tensor = self._shards[file].get_slice(stored.name)[stored.expert]
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelLoadError(f"{self.path / file}: tensor {stored.name} cannot be read: {error}") from error
        return stored.select_rows(tensor.t() if stored.is_transposed else tensor, self._head_dim)

    def _read_packed(self, stored: StoredName) -> PackedRows:
        tensor = self._read(stored).cpu()
        return packed_tensor(tensor.reshape(-1, tensor.shape[-1]))

    def _check_format(self, file_name: str) -> None:
        kind = self._shards[self._shard_of[file_name]].get_slice(file_name).get_dtype()
        module = MXFP4_ENDING.sub("", file_name)
        is_quantized = quantized_module([module, f"{module.rpartition('.')[0]}.weight"], self._shard_of) is not None
        if kind not in FLOAT_TYPES and not is_quantized:
            raise ModelLoadError(
                f"{self.path}: tensor {file_name} has type {kind}, but no scales; supported without scales: "
                f"{', '.join(FLOAT_TYPES)}. Use the unquantized model or a GGUF file"
            )

    def _file_names(self) -> Iterable[str]:
        tied = self.config.head.weight_names if self.config.tie_word_embeddings else ()
        return (
            name
            for name in self._shard_of
            if not (name.endswith((*RECOMPUTED, *tied)) or name.startswith(self._unread) or self._is_empty_bias(name))
        )

    def _is_empty_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, which AutoGPTQ adds to all quantized layers."""
        module = name.removesuffix(".bias")
        return module != name and f"{module}.qweight" in self._shard_of and not bool(self._read(StoredName(name)).any())


def _single_file(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{folder}: contains {pickles[0]} but no {SINGLE}. Pickled weights can run code and are never opened; "
            "convert them to safetensors with transformers' save_pretrained()"
        )
    raise ModelLoadError(f"{folder}: contains neither {SINGLE} nor {INDEX}; --load-format dummy needs no weight files")


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Read the file name of each tensor from the index, or return None if there is no index."""
    index = folder / INDEX
    if not index.is_file():
        return None
    try:
        weight_map = json.loads(read_text(index))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelLoadError(f"{index}: weight_map cannot be read ({error!r}); download the file again") from error
    if not isinstance(weight_map, dict) or not all(_is_plain_name(file) for file in weight_map.values()):
        raise ModelLoadError(
            f"{index}: weight_map must map tensor names to names of .safetensors files in the same folder"
        )
    return weight_map


def _is_plain_name(file: Any) -> bool:
    return isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file


def _open(file: Path, device: torch.device) -> Any:
    try:
        return safe_open(file, framework="pt", device=str(device))
    except FileNotFoundError:
        raise ModelLoadError(f"{file}: is missing, but {INDEX} refers to it; download the model again") from None
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file}: cannot be read ({error}); if it is truncated or damaged, download it again"
        ) from error
