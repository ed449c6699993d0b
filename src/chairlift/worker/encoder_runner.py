"""EncoderRunner: an executor that computes whole texts with an encoder, and returns a vector or a score for each."""

from __future__ import annotations

import torch

from chairlift.models.encoder import EncoderModel, pool
from chairlift.models.pooling import PoolingConfig
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput


class EncoderRunner:
    """Computes all texts of a step as one packed batch. `submit` returns the result.

    Args:
        sep_token_id: the token between the two texts of a pair; the tokens behind the first one have type 1, if the
            model has several types.
    """

    def __init__(self, model: EncoderModel, pooling: PoolingConfig, sep_token_id: int | None) -> None:
        self._model = model
        self._pooling = pooling
        self._sep_token_id = sep_token_id if model.num_token_types > 1 else None

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the texts of the requests that are new in this step."""
        requests = output.new_requests
        assert len(requests) == len(output.num_scheduled_tokens), "a text is computed in one step"
        if not requests:
            return ModelRunnerOutput(output.step, {})
        lengths = [len(request.token_ids) for request in requests]
        token_ids = torch.tensor([token for request in requests for token in request.token_ids])
        hidden = self._model.forward(token_ids, lengths, self._token_types(token_ids, lengths))
        if self._pooling.task == "score":
            rows = self._model.scores(hidden, lengths)[:, None]
        else:
            rows = normalize(pool(hidden, lengths, self._pooling.pooling), self._pooling.normalize)
        return ModelRunnerOutput(output.step, {}, pooled=pooled_rows([each.request_id for each in requests], rows))

    def result(self, pending: ModelRunnerOutput) -> ModelRunnerOutput:
        return pending

    def _token_types(self, token_ids: torch.Tensor, lengths: list[int]) -> torch.Tensor | None:
        if self._sep_token_id is None or self._pooling.task == "embed":
            return None
        is_sep = token_ids == self._sep_token_id
        parts = torch.split_with_sizes(is_sep.long(), lengths)
        return torch.cat([((part.cumsum(0) - part) > 0).long() for part in parts])


def normalize(rows: torch.Tensor, is_normalized: bool) -> torch.Tensor:
    """Scale rows to length 1."""
    return torch.nn.functional.normalize(rows) if is_normalized else rows


def pooled_rows(request_ids: list[str], rows: torch.Tensor) -> dict[str, bytes]:
    """The rows [N, size] of requests as float32 bytes."""
    return {request_id: row.tobytes() for request_id, row in zip(request_ids, rows.float().cpu().numpy(), strict=True)}
