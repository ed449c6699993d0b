"""Predictor: the layer of a model that predicts the token after the next one, for draft tokens."""

from __future__ import annotations

import torch

from chairlift.kernels.attention import StepContext
from chairlift.kernels.interface import LinearKernel
from chairlift.models.declaration.model_config import PredictorSpec
from chairlift.models.layers import DecoderLayer, LayerBuilder


class Predictor:
    """norm(layer(projection([embedding_norm(embedding), hidden_norm(hidden)]))), see `PredictorSpec`.

    Args:
        head: the product with the matrix of the model's head, without a norm.
        index: the index of the layer.
    """

    def __init__(self, builder: LayerBuilder, spec: PredictorSpec, head: LinearKernel, index: int) -> None:
        self._embedding_norm = builder.norm_of_rows(spec.embedding_norm)
        self._hidden_norm = builder.norm_of_rows(spec.hidden_norm)
        self._projection = builder.linear(spec.projection)
        self.layer = DecoderLayer(builder, spec.layer, index)
        self._norm = builder.norm_of_rows(spec.norm)
        self.head = head

    def __call__(self, embedding: torch.Tensor, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Compute the hidden states of predicted tokens, [T, hidden_size], and write K and V of the layer.

        The next call may overwrite the result. The values of the arguments are lost.
        """
        rows = self._embedding_norm(embedding, None), self._hidden_norm(hidden, None)
        return self._norm(self.layer(self._projection(torch.cat(rows, dim=1)), step), None)
