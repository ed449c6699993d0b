"""The endpoints with a request body. A new endpoint is a module with an `Endpoint` and one line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from chairlift.server.api import chat, completions, messages, pooling, responses, tokenization
from chairlift.server.api.endpoint import Endpoint
from chairlift.server.preparation.planners import Planners

ENDPOINTS: Final[list[Endpoint[Any, Any]]] = [
    completions.COMPLETIONS,
    chat.CHAT_COMPLETIONS,
    responses.RESPONSES,
    messages.MESSAGES,
    messages.COUNT_TOKENS,
    pooling.EMBEDDINGS,
    pooling.SCORE,
    pooling.RERANK,
    tokenization.TOKENIZE,
    tokenization.DETOKENIZE,
]


def make_planners(endpoints: Sequence[Endpoint[Any, Any]] = ENDPOINTS) -> Planners:
    """The planners of endpoints, by their paths."""
    return {endpoint.path: endpoint.planner for endpoint in endpoints}
