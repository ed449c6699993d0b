"""StaticEmbedding (sentence-transformers, model2vec): the vector of a text is the mean of its tokens' vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.models.declaration.matrix_spec import EMBEDDING, LM_HEAD, MatrixSpec
from chairlift.models.declaration.model_config import EncoderSpec, ModelConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields

CONTEXT: Final = 8192
"""The maximum number of tokens of a text, which has no positions."""


def static_config(header: Mapping[str, tuple[str, list[int]]], source: str) -> dict[str, Any]:
    """The configuration of a table of vectors, which has no config.json.

    Args:
        header: the type and the shape of each tensor in its file.
    """
    if [*header] not in (["embedding.weight"], ["embeddings"]):
        raise ModelLoadError(
            f"{source}: has the tensors {', '.join(header)}, but one table of vectors is required: save the model with "
            "StaticEmbedding of sentence-transformers, which joins mapping and weights with it"
        )
    rows, size = next(iter(header.values()))[1]
    return {"architectures": ["StaticEmbedding"], "vocab_size": rows, "hidden_size": size}


def _read(fields: ConfigFields) -> ModelConfig:
    words, hidden = (("embedding", fields.integer("vocab_size")),), fields.integer("hidden_size")
    return ModelConfig(
        name="static",
        hidden_size=hidden,
        max_position_embeddings=CONTEXT,
        embedding=MatrixSpec(EMBEDDING, EMBEDDING, words, hidden),
        layers=(),
        head=MatrixSpec(LM_HEAD, LM_HEAD, words, hidden),
        final_norm=None,
        tie_word_embeddings=True,
        encoder=EncoderSpec(),
    )


STATIC_EMBEDDING: Final = Architecture(
    name="static", hf_readers={"StaticEmbedding": _read}, other_prefixes=(("embedding.weight", "embeddings"),)
)
