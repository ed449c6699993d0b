"""The classes that answer the calls of the endpoints with a request body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from chairlift.engine.async_llm import AsyncLLM
from chairlift.server.api.chat import ChatServing
from chairlift.server.api.completions import CompletionServing
from chairlift.server.api.messages import MessagesServing
from chairlift.server.api.pooling import EmbeddingServing, RerankServing, ScoreServing
from chairlift.server.api.responses import ResponsesServing
from chairlift.server.api.serving import Endpoint, UtilityServing
from chairlift.server.preparation.planners import Planners
from chairlift.server.preparation.preparation import Preparation

Endpoints = Mapping[str, Endpoint[Any, Any]]
"""Path -> endpoint."""

SERVINGS: Final[dict[str, type[Endpoint[Any, Any]]]] = {
    "/v1/completions": CompletionServing,
    "/v1/chat/completions": ChatServing,
    "/v1/messages": MessagesServing,
    "/v1/messages/count_tokens": UtilityServing,
    "/v1/responses": ResponsesServing,
    "/v1/embeddings": EmbeddingServing,
    "/v1/score": ScoreServing,
    "/score": ScoreServing,
    "/v1/rerank": RerankServing,
    "/rerank": RerankServing,
    "/tokenize": UtilityServing,
    "/detokenize": UtilityServing,
}
"""Path -> the class that answers its calls."""


def make_endpoints(llm: AsyncLLM, model_name: str, planners: Planners, preparation: Preparation) -> Endpoints:
    """Create the endpoints with a request body."""
    return {path: serving(llm, model_name, planners[path], preparation) for path, serving in SERVINGS.items()}
