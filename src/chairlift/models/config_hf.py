"""Hugging Face `config.json` -> ModelConfig. Keys are those of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chairlift.models.architecture import Architecture, HFReader
from chairlift.models.architectures import ARCHITECTURES
from chairlift.models.config import ModelConfig
from chairlift.models.config_fields import REQUIRED, Fields, unique
from chairlift.models.neutral_fields import NEUTRAL_HF

DTYPES = ("float32", "float16", "bfloat16")
NO_QUANTIZED = "quantized checkpoints are read from GGUF files only; take the unquantized model or a GGUF"


def read_hf_config(
    config: Mapping[str, Any], *, source: str, generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read a Hugging Face `config.json` (and `generation_config.json`, for its end-of-sequence tokens).

    Args:
        config, generation_config: the parsed files.
        source: the file's name, for error messages.

    Raises:
        ModelLoadError: a key is missing, has a wrong type or an absurd value, is not supported, or is not declared by
            the architecture; the message names the file, the key and the value.
    """
    fields = Fields(config, source)
    architecture, reader = _find_reader(fields)
    fields.refuse("quantization_config", None, NO_QUANTIZED)
    generation = Fields(generation_config or {}, source.replace("config.json", "generation_config.json"))
    bos = fields.token_ids("bos_token_id")
    read = replace(
        reader(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=unique(fields.token_ids("eos_token_id"), generation.token_ids("eos_token_id")),
        dtype=_dtype(fields),
    )
    fields.refuse_undeclared(architecture.name, NEUTRAL_HF)
    return read


def _find_reader(fields: Fields) -> tuple[Architecture, HFReader]:
    names = fields.get("architectures", REQUIRED)
    for name in names if isinstance(names, list) else [names]:
        for architecture in ARCHITECTURES.values():
            if isinstance(name, str) and name in architecture.hf_readers:
                return architecture, architecture.hf_readers[name]
    known = ", ".join(name for architecture in ARCHITECTURES.values() for name in architecture.hf_readers)
    raise fields.fail("architectures", f"is {names!r}, which is not supported; supported: {known}")


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return fields.choice(key, DTYPES, "float32")
