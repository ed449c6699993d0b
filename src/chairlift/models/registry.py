"""The table of architectures, and the readers that turn model files into a ModelConfig.

Keys of `config.json` follow transformers 4 and 5; keys of GGUF metadata follow the GGUF specification
(ggml, docs/gguf.md).
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.models import architectures
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture, HFReader
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields, shortened, unique
from chairlift.models.reading.gguf_header import GGUFHeader
from chairlift.models.reading.nearest_names import describe_unsupported
from chairlift.models.reading.neutral_fields import NEUTRAL_GGUF, NEUTRAL_HF, is_harmless
from chairlift.models.reading.quantization_fields import read_quantization
from chairlift.models.reading.wrappers import WRAPPERS, find_wrapper

ARCHITECTURES: Final[dict[str, Architecture]] = {
    found.name: found
    for module in pkgutil.iter_modules(architectures.__path__, f"{architectures.__name__}.")
    for found in vars(importlib.import_module(module.name)).values()
    if isinstance(found, Architecture)
}
"""The supported architectures, which the modules of `models.architectures` define, by `ModelConfig.architecture`."""

logger = logging.getLogger(__name__)

BARE_MODEL: Final = re.compile(r"(Text)?Model$")
"""The end of the names of models without LM head, which AutoModel writes."""
DTYPES: Final = ("float32", "float16", "bfloat16")
GGUF_END_KEYS: Final = tuple(f"{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
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
    wrapper = find_wrapper(config.get("architectures"))
    fields = ConfigFields(config, source) if wrapper is None else WRAPPERS[wrapper].text_fields(config, source)
    architecture, reader = _find_hf_reader(fields) if wrapper is None else _find_text_reader(fields)
    quantization = read_quantization(fields)
    generation = ConfigFields(generation_config or {}, source.replace("config.json", "generation_config.json"))
    bos = fields.token_ids("bos_token_id")
    dtype_key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    read = _with_both_directions(fields, replace(reader(fields), wrapper=wrapper))
    read = replace(
        read,
        architecture=architecture.name,
        bos_token_id=bos[0] if bos else read.bos_token_id,
        eos_token_ids=unique(
            fields.token_ids("eos_token_id") or read.eos_token_ids, generation.token_ids("eos_token_id")
        ),
        dtype=fields.choice(dtype_key, DTYPES, read.dtype),
        quantization=quantization,
    )
    _check_undeclared(fields, architecture.name, NEUTRAL_HF)
    return read


def _with_both_directions(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    """The declaration of a decoder whose tokens attend to later ones as well, as an encoder."""
    keys = {"is_causal": False, "use_bidirectional_attention": True}
    key = next((key for key, value in keys.items() if fields.get(key) is value), None)
    if key is None or config.encoder is not None:
        return config
    if config.wrapper is not None:
        raise fields.error(key, f"is {keys[key]}, which is not supported: attention must be causal")
    if key == "use_bidirectional_attention" and config.name != "gemma3":
        raise fields.error(key, "is true, which transformers has for Gemma 3 only: set is_causal to false")
    try:
        # With is_causal a token sees the tokens at a distance of the window, and with the other key those up to half.
        return config.as_encoder(lambda window: window + 1 if key == "is_causal" else window // 2 + 1)
    except ValueError as error:
        raise fields.error(key, f"is {keys[key]}, which is not supported for models with {error}") from None


def _check_undeclared(fields: ConfigFields, architecture: str, neutral: Collection[str]) -> None:
    """Raise if a field may change results and was not read, and warn of other unknown fields."""
    harmless = fields.reject_undeclared(f"{architecture} architecture", neutral, is_harmless)
    if unknown := [name for name, value in harmless.items() if value not in (False, True)]:
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
    reason = describe_unsupported(_first_text(names), [*known, *WRAPPERS])
    raise fields.error("architectures", f"is {shortened(names)}, which {reason}")


def _find_text_reader(fields: ConfigFields) -> tuple[Architecture, HFReader]:
    """Find the reader of a text model in a wrapper by its `model_type`, such as qwen3_5_text of Qwen3_5ForCausalLM."""
    kind = str(fields.get("model_type"))
    letters = f"{kind.removesuffix('_text').replace('_', '')}forcausallm"
    for architecture in ARCHITECTURES.values():
        for name, reader in architecture.hf_readers.items():
            if name.replace("_", "").lower() == letters:
                return architecture, reader
    known = [name for architecture in ARCHITECTURES.values() for name in architecture.hf_readers]
    raise fields.error("model_type", f"is {shortened(kind)}, which {describe_unsupported(kind, known)}")


def _first_text(names: Any) -> str:
    listed = names if isinstance(names, list) else [names]
    return next((name for name in listed if isinstance(name, str)), "")


def find_gguf_architecture(metadata: Mapping[str, Any], *, source: str) -> tuple[str, Architecture]:
    """Return `general.architecture` of a GGUF file, and the architecture that reads its metadata.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    general = ConfigFields(metadata, source, "general.")
    known = {name: each for each in ARCHITECTURES.values() for name in each.gguf_readers}
    value = general.get("architecture", REQUIRED)
    if (name := _first_text(value)) not in known:
        reason = describe_unsupported(name, known)
        raise general.error("architecture", f"is {shortened(value)}, which {reason}")
    return name, known[name]


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
        tensor_names: see GGUFHeader. They show which biases exist and whether the embeddings are tied
            (no `output.weight`).
        rope_factors: see GGUFHeader.

    Raises:
        ModelLoadError: as `read_hf_config`.
    """
    general = ConfigFields(metadata, source, "general.")
    tokens = ConfigFields(metadata, source, "tokenizer.ggml.")
    name, architecture = find_gguf_architecture(metadata, source=source)
    header = GGUFHeader(metadata, source, name, tensor_names, rope_factors or {})
    bos = tokens.token_ids("bos_token_id")
    read = replace(
        architecture.gguf_readers[name](header),
        name=name,
        architecture=architecture.name,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=unique(*(tokens.token_ids(key) for key in GGUF_END_KEYS)),
        dtype=GGUF_FILE_TYPES.get(general.integer("file_type", 0, low=0), "float16"),
    )
    _check_undeclared(header, name, NEUTRAL_GGUF)
    return read
