"""The storage formats of a model's matrices, read from the headers of its files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chairlift.errors import ModelLoadError
from chairlift.loading.resolve import ModelFiles, open_gguf
from chairlift.models.config import ModelConfig
from chairlift.models.registry import get_architecture

if TYPE_CHECKING:
    from chairlift.loading.gguf_file import GGUFFile

DTYPE_FORMATS: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SAFETENSORS_FORMATS: Final = {"F16": "f16", "BF16": "bf16"}


def matrix_formats(files: ModelFiles | None, config: ModelConfig) -> Callable[[str], str]:
    """Return a function from the name of a parameter to its `PackedRows.format`.

    The format of a parameter that is in no file is that of the configuration's type.

    Args:
        files: the files of the model, or None for random weights.

    Raises:
        ModelLoadError: A file cannot be read.
    """
    default = DTYPE_FORMATS[config.dtype]
    if files is None:
        return lambda name: default
    if files.kind == "gguf":
        return _gguf_formats(open_gguf(files.path), config, default)
    found: dict[str, str] = {}
    for file in sorted(files.path.glob("*.safetensors")):
        found.update(_safetensors_formats(file))
    hf_names = get_architecture(config).hf_names
    return lambda name: next((found[each] for each in hf_names(name) if each in found), default)


def _gguf_formats(file: GGUFFile, config: ModelConfig, default: str) -> Callable[[str], str]:
    gguf_name = get_architecture(config).gguf_name

    def find(name: str) -> str:
        tensor = file.tensors.get(gguf_name(name) or "")
        return default if tensor is None else tensor.type.name.lower()

    return find


def _safetensors_formats(file: Path) -> dict[str, str]:
    """Read the header of a safetensors file: its length in 8 bytes, followed by JSON."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
    except (OSError, ValueError, struct.error, MemoryError, OverflowError) as error:
        raise ModelLoadError(f"{file}: truncated or damaged ({error}); download it again") from error
    return {
        name: SAFETENSORS_FORMATS.get(tensor["dtype"], "f32")
        for name, tensor in header.items()
        if name != "__metadata__"
    }
