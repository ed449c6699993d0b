"""GGUF metadata -> ModelConfig. Keys are those of the GGUF specification (ggml, docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chairlift.models.architecture import GGUFHeader
from chairlift.models.architectures import ARCHITECTURES
from chairlift.models.config import ModelConfig
from chairlift.models.config_fields import Fields, unique
from chairlift.models.neutral_fields import NEUTRAL_GGUF

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
FILE_TYPE_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}


def read_gguf_config(
    metadata: Mapping[str, Any],
    *,
    source: str,
    tensor_names: Collection[str] = (),
    rope_freqs: Sequence[float] | None = None,
) -> ModelConfig:
    """Read the metadata of a GGUF file.

    Args:
        metadata: key -> int, float, bool, str or list of them.
        source: the file's name, for error messages.
        tensor_names: names of the file's tensors. They show which biases exist and whether the embeddings are tied
            (no `output.weight`).
        rope_freqs: the tensor `rope_freqs.weight`, if there is one.

    Raises:
        ModelLoadError: as `read_hf_config`.
    """
    general, tokens = Fields(metadata, source, "general."), Fields(metadata, source, "tokenizer.ggml.")
    readers = {name: reader for each in ARCHITECTURES.values() for name, reader in each.gguf_readers.items()}
    name = general.choice("architecture", readers)
    header = GGUFHeader(name, Fields(metadata, source, f"{name}."), general, tokens, tensor_names, rope_freqs)
    bos = tokens.token_ids("bos_token_id")
    read = replace(
        readers[name](header),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=unique(*(tokens.token_ids(key) for key in END_KEYS)),
        dtype=FILE_TYPE_DTYPES.get(general.integer("file_type", 0, low=0), "float16"),
    )
    header.fields.refuse_undeclared(name, NEUTRAL_GGUF)
    return read
