"""EncoderRunner: an executor that computes whole texts with an encoder, and returns a vector or a score for each."""

from __future__ import annotations

import torch

from chairlift.models.encoder import EncoderModel
from chairlift.models.text_pooling import RowFunctions, pool_texts
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from chairlift.worker.pooling import pooled_rows


class EncoderRunner:
    """Computes all texts of a step as one packed batch. `submit` returns the result."""

    def __init__(self, model: EncoderModel, functions: RowFunctions) -> None:
        self._model = model
        self._functions = functions

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the texts of the requests that are new in this step."""
        requests, functions = output.new_requests, self._functions
        assert len(requests) == len(output.num_scheduled_tokens), "a text is computed in one step"
        if not requests:
            return ModelRunnerOutput(output.step, {})
        lengths = [len(request.token_ids) for request in requests]
        token_ids = torch.tensor([token for request in requests for token in request.token_ids])
        hidden = self._model.forward(token_ids, lengths)
        if functions.pooling.needs_head:
            pooled = self._model.scores(hidden, lengths)[:, None]
        else:
            pooled = pool_texts(torch.split_with_sizes(functions.of_tokens(hidden), lengths), functions.pooling)
        rows = functions.result(pooled)
        return ModelRunnerOutput(output.step, {}, pooled=pooled_rows([each.request_id for each in requests], rows))

    def result(self, pending: ModelRunnerOutput) -> ModelRunnerOutput:
        return pending
