"""The inputs of each token for each layer, for models with a branch that reads them (Gemma 3n and Gemma 4)."""

from __future__ import annotations

import torch

from chairlift.kernels.row_buffers import RowBuffers
from chairlift.models.declaration.model_config import PerLayerInputsSpec
from chairlift.models.layers import LayerBuilder


class PerLayerInputs:
    """multiplier * (norm(projection(embedding)) + table_multiplier * table[token]) for each layer.

    Args:
        num_layers: the number of layers of the model.
    """

    def __init__(self, builder: LayerBuilder, spec: PerLayerInputsSpec, num_layers: int) -> None:
        self._table = builder.embedding(spec.table)
        self._projection = builder.linear(spec.projection)
        self._norm = builder.norm_of_rows(spec.norm)
        self._spec = spec
        self._num_layers = num_layers
        shape = next(iter(builder.backends))
        self._buffers = RowBuffers(shape.dtype, shape.device)

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Compute the inputs of the tokens of a step.

        Args:
            token_ids: int64 [T].
            embedded: [T, hidden_size], the input of the first layer.

        Returns:
            `StepContext.per_layer_inputs`, valid until the next call. With the same number of tokens as in the call
            before it is in the same memory.
        """
        spec, num_tokens = self._spec, len(token_ids)
        rows = self._buffers.rows(("per-layer inputs", (self._num_layers + 1) * spec.size), num_tokens)
        inputs = rows.view(num_tokens, -1, spec.size)
        projected = self._norm(self._projection(embedded).view(-1, spec.size), None)
        looked_up = self._table(token_ids).view(num_tokens, -1, spec.size)
        found = projected.view_as(looked_up).add_(looked_up, alpha=spec.table_multiplier)
        torch.mul(found, spec.multiplier, out=inputs[:, 1:])
        return inputs
