"""PoolingConfig: how a model turns a text into a vector or a score."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from chairlift.models.declaration.model_config import ModelConfig

PoolingType = Literal["cls", "mean", "last"]
PoolingTask = Literal["embed", "score"]


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a model turns a text into a vector or a score.

    Attributes:
        task: "embed" for vectors, "score" for the scores of pairs of texts.
        pooling: the hidden state of a text is the state of its first or last token, or the mean of all.
        normalize: whether vectors are scaled to length 1.
        max_seq_length: maximum number of tokens of a text; None is the context of the model.
        classifier_tokens: two tokens, whose difference of logits after the last token is the score (second - first);
            None for models that have a classifier.
    """

    task: PoolingTask
    pooling: PoolingType = "mean"
    normalize: bool = False
    max_seq_length: int | None = None
    classifier_tokens: tuple[int, int] | None = None

    @property
    def is_reranker(self) -> bool:
        """Whether a decoder scores pairs by `classifier_tokens`, after the prompt of a reranker."""
        return self.classifier_tokens is not None

    def without_unused_head(self, config: ModelConfig) -> ModelConfig:
        """Return the declaration without a separate LM head, which a decoder needs for scores only."""
        if self.task == "score" or config.encoder is not None:
            return config
        return replace(config, tie_word_embeddings=True, unneeded_modules=(*config.unneeded_modules, "lm_head"))
