"""Vectors and scores: what a request of a model that generates no text returns."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from operator import mul
from typing import TYPE_CHECKING, Final

from chairlift.errors import RequestError
from chairlift.models.pooling import PoolingConfig, PoolingTask, Similarity
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
    """The vector of a text; or of a pair the number that the model computes, and its score."""
    assert output.pooled is not None, "the model computes vectors or scores"
    values = array("f")
    values.frombytes(output.pooled)
    return values.tolist()


def truncate_vector(pooled: bytes, dimensions: int | None, pooling: PoolingConfig) -> bytes:
    """The first values of a vector (float32). If the model normalizes its vectors, they are scaled to length 1 again,
    as Matryoshka models need (Kusupati et al., 2022)."""
    if dimensions is None:
        return pooled
    values = array("f", pooled)[:dimensions]
    if not pooling.is_normalized:
        return values.tobytes()
    length = max(math.hypot(*values), 1e-12)
    return array("f", [value / length for value in values]).tobytes()


def converted_vector(vector: bytes, dtype: str, is_big: bool) -> bytes:
    """A vector of float32 as float32, float16 or bfloat16, with the lowest byte of each value first or last."""
    if dtype == "float32" and not is_big:
        return vector
    import numpy as np  # Otherwise the front end of a server starts without it.

    values = np.frombuffer(vector, np.uint32)
    if dtype == "bfloat16":  # rounded to the nearest value, and to an even one in the middle
        values = ((values + 0x7FFF + (values >> 16 & 1)) >> 16).astype(np.uint16)
    elif dtype == "float16":
        with np.errstate(over="ignore"):
            values = values.view(np.float32).astype(np.float16).view(np.uint16)
    return (values.byteswap() if is_big else values).tobytes()


def similarity(first: Sequence[float], second: Sequence[float], kind: Similarity) -> float:
    """Compare two vectors as sentence-transformers does: a larger number is more similar."""
    if kind == "euclidean":
        return -math.dist(first, second)
    if kind == "manhattan":
        return -sum(abs(one - other) for one, other in zip(first, second, strict=True))
    product: float = sum(map(mul, first, second))
    if kind == "dot":
        return product
    return product / (max(math.hypot(*first), 1e-12) * max(math.hypot(*second), 1e-12))
