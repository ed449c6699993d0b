"""The table of architectures, and the readers that turn model files into a ModelConfig.

Keys of `config.json` are those of transformers 4 and 5; keys of GGUF metadata are those of the GGUF specification
(ggml, docs/gguf.md).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.models.architectures.bert import BERT
from chairlift.models.architectures.falcon_h1 import FALCON_H1
from chairlift.models.architectures.gemma import GEMMA2, GEMMA3
from chairlift.models.architectures.gemma4 import GEMMA4
from chairlift.models.architectures.gpt_oss import GPT_OSS
from chairlift.models.architectures.granite import GRANITE
from chairlift.models.architectures.lfm2 import LFM2
from chairlift.models.architectures.llama import LLAMA
from chairlift.models.architectures.ministral3 import MINISTRAL3
from chairlift.models.architectures.mixtral import MIXTRAL
from chairlift.models.architectures.modernbert import MODERNBERT
from chairlift.models.architectures.nemotron_h import NEMOTRON_H
from chairlift.models.architectures.olmo import OLMO
from chairlift.models.architectures.olmoe import OLMOE
from chairlift.models.architectures.opt import OPT
from chairlift.models.architectures.phi3 import PHI3
from chairlift.models.architectures.qwen3_moe import QWEN3_MOE
from chairlift.models.architectures.qwen35 import QWEN35
from chairlift.models.architectures.smollm3 import SMOLLM3
from chairlift.models.declaration import ModelConfig
from chairlift.models.reading.architecture import Architecture, GGUFHeader, GGUFReader, HFReader
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields, shortened, unique
from chairlift.models.reading.nearest_names import describe_unsupported
from chairlift.models.reading.neutral_fields import NEUTRAL_GGUF, NEUTRAL_HF, is_harmless
from chairlift.models.reading.quantization_fields import read_quantization

ARCHITECTURES: Final[dict[str, Architecture]] = {
    each.name: each
    for each in (
        BERT,
        FALCON_H1,
        LFM2,
        LLAMA,
        GEMMA2,
        GEMMA3,
        GEMMA4,
        GPT_OSS,
        GRANITE,
        MINISTRAL3,
        MIXTRAL,
        MODERNBERT,
        NEMOTRON_H,
        OLMO,
        OLMOE,
        OPT,
        PHI3,
        QWEN3_MOE,
        QWEN35,
        SMOLLM3,
    )
}
"""The supported architectures, by `ModelConfig.architecture`."""

logger = logging.getLogger(__name__)

BARE_MODEL: Final = re.compile(r"(Text)?Model$")
"""The end of the names of models without LM head, which AutoModel writes."""
DTYPES: Final = ("float32", "float16", "bfloat16")
GGUF_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
GGUF_FILE_TYPES: Final = {0: "float32", 1: "float16", 32: "bfloat16"}


def get_architecture(config: ModelConfig) -> Architecture:
    """Return the architecture of a model.

    Raises:
        ModelLoadError: `config.architecture` is not in ARCHITECTURES.
    """
    found = ARCHITECTURES.get(config.architecture)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"architecture must be one of {known}; got {config.architecture!r} ({config.name})")
    return found


def read_hf_config(
    config: Mapping[str, Any], *, source: str, generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read a Hugging Face `config.json`, and the end-of-sequence tokens of `generation_config.json`.

    Args:
        config, generation_config: the parsed files.
        source: the file's name, for error messages.

    Raises:
        ModelLoadError: a key is missing, has a wrong type, is out of range, is not supported, or is not declared by the
            architecture; the message names the file, the key and the value.
    """
    fields = ConfigFields(config, source)
    architecture, reader = _find_hf_reader(fields)
    quantization = read_quantization(fields)
    generation = ConfigFields(generation_config or {}, source.replace("config.json", "generation_config.json"))
    bos = fields.token_ids("bos_token_id")
    dtype_key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    read = reader(fields)
    read = replace(
        read,
        bos_token_id=bos[0] if bos else read.bos_token_id,
        eos_token_ids=unique(
            fields.token_ids("eos_token_id") or read.eos_token_ids, generation.token_ids("eos_token_id")
        ),
        dtype=fields.choice(dtype_key, DTYPES, read.dtype),
        quantization=quantization,
    )
    _check_undeclared(fields, architecture.name, NEUTRAL_HF)
    return read


def _check_undeclared(fields: ConfigFields, architecture: str, neutral: Collection[str]) -> None:
    """Raise if a field may change results and was not read, and warn of other unknown fields."""
    if unknown := fields.reject_undeclared(f"{architecture} architecture", neutral, is_harmless):
        logger.warning(
            f"{fields.source}: ignored, because the {architecture} architecture does not read these fields: "
            f"{', '.join(unknown)}"
        )


def _find_hf_reader(fields: ConfigFields) -> tuple[Architecture, HFReader]:
    names = fields.get("architectures", REQUIRED)
    for name in names if isinstance(names, list) else [names]:
        for form in (name, BARE_MODEL.sub("ForCausalLM", name)) if isinstance(name, str) else ():
            for architecture in ARCHITECTURES.values():
                if form in architecture.hf_readers:
                    return architecture, architecture.hf_readers[form]
    known = [name for architecture in ARCHITECTURES.values() for name in architecture.hf_readers]
    reason = describe_unsupported(_first_text(names), known)
    raise fields.error("architectures", f"is {shortened(names)}, which {reason}")


def _first_text(names: Any) -> str:
    listed = names if isinstance(names, list) else [names]
    return next((name for name in listed if isinstance(name, str)), "")


def find_gguf_reader(metadata: Mapping[str, Any], *, source: str) -> tuple[str, GGUFReader]:
    """Return `general.architecture` of a GGUF file, and the reader of its metadata.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    general = ConfigFields(metadata, source, "general.")
    readers = {name: reader for each in ARCHITECTURES.values() for name, reader in each.gguf_readers.items()}
    value = general.get("architecture", REQUIRED)
    if (name := _first_text(value)) not in readers:
        reason = describe_unsupported(name, readers)
        raise general.error("architecture", f"is {shortened(value)}, which {reason}")
    return name, readers[name]


def read_gguf_config(
    metadata: Mapping[str, Any],
    *,
    source: str,
    tensor_names: Collection[str] = (),
    rope_factors: Mapping[str, Sequence[float]] | None = None,
) -> ModelConfig:
    """Read the metadata of a GGUF file.

    Args:
        metadata: key -> int, float, bool, str or list of them.
        source: the file's name, for error messages.
        tensor_names: names of the file's tensors. They show which biases exist and whether the embeddings are tied
            (no `output.weight`).
        rope_factors: see GGUFHeader.

    Raises:
        ModelLoadError: as `read_hf_config`.
    """
    general = ConfigFields(metadata, source, "general.")
    tokens = ConfigFields(metadata, source, "tokenizer.ggml.")
    name, reader = find_gguf_reader(metadata, source=source)
    header = GGUFHeader(name, ConfigFields(metadata, source, f"{name}."), tokens, tensor_names, rope_factors or {})
    bos = tokens.token_ids("bos_token_id")
    read = replace(
        reader(header),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=unique(*(tokens.token_ids(key) for key in GGUF_END_KEYS)),
        dtype=GGUF_FILE_TYPES.get(general.integer("file_type", 0, low=0), "float16"),
    )
    _check_undeclared(header.fields, name, NEUTRAL_GGUF)
    return read
