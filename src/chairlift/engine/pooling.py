"""Vectors and scores: what a request of a model that generates no text returns."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Final

from chairlift.errors import RequestError
from chairlift.models.pooling import PoolingTask
from chairlift.outputs import RequestOutput
from chairlift.sampling_params import SamplingParams

if TYPE_CHECKING:
    from chairlift.engine.served_engine import EngineFacts

POOLING_PARAMS: Final = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
"""The parameters of requests for vectors and scores, which sample nothing."""

TASKS: Final[dict[PoolingTask | None, str]] = {
    None: "generates text: use /v1/chat/completions, /v1/completions or /v1/responses (LLM.generate, LLM.chat)",
    "embed": "computes vectors of texts: use /v1/embeddings (LLM.embed)",
    "score": "computes scores of pairs of texts: use /v1/rerank or /v1/score (LLM.score)",
}


def check_task(facts: EngineFacts, task: PoolingTask | None) -> None:
    """Raise RequestError if the model does something else.

    Args:
        task: None for text.
    """
    own = None if facts.pooling is None else facts.pooling.task
    if own != task:
        raise RequestError(f"the model {TASKS[own]}", "model")


def pooled_values(output: RequestOutput) -> list[float]:
    """The vector of a text, or the score of a pair as a list of one number."""
    assert output.pooled is not None, "the model computes vectors or scores"
    values = array("f")
    values.frombytes(output.pooled)
    return values.tolist()


def truncate_vector(pooled: bytes, dimensions: int | None) -> bytes:
    """The first values of a vector (float32), scaled to length 1, as Matryoshka models need (Kusupati et al., 2022)."""
    if dimensions is None:
        return pooled
    values = array("f", pooled)[:dimensions]
    length = max(math.hypot(*values), 1e-12)
    return array("f", [value / length for value in values]).tobytes()


def sigmoid(value: float) -> float:
    """1 / (1 + e^-x), by which a cross-encoder's number becomes a score from 0 to 1."""
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))
