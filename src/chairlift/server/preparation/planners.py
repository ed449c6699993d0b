"""The planners of all endpoints of a server that take a body."""

from __future__ import annotations

from functools import partial
from typing import Any

from chairlift.engine.served_engine import ServedEngine
from chairlift.server.api.completions import plan_completion
from chairlift.server.api.pooling import plan_embeddings, plan_rerank, plan_score
from chairlift.server.api.tokenization import count_tokens, detokenize, tokenize
from chairlift.server.preparation.conversation import ConversationPlanner
from chairlift.server.preparation.request_plan import RequestPlanner
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.completions import CompletionRequest
from chairlift.server.protocol.messages import CountTokensRequest, MessagesRequest
from chairlift.server.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from chairlift.server.protocol.responses import ResponsesRequest
from chairlift.server.protocol.tokenization import DetokenizeRequest, TokenizeRequest

Planners = dict[str, RequestPlanner[Any, Any]]
"""Path of an endpoint -> its planner."""


def make_planners(engine: ServedEngine, conversations: ConversationPlanner) -> Planners:
    """Create the planners for an engine, or for the description of an engine that a preparation worker has."""
    return {
        "/v1/completions": RequestPlanner(CompletionRequest, partial(plan_completion, engine)),
        "/v1/chat/completions": RequestPlanner(ChatCompletionRequest, conversations.plan),
        "/v1/responses": RequestPlanner(ResponsesRequest, conversations.plan),
        "/v1/messages": RequestPlanner(MessagesRequest, conversations.plan),
        "/v1/messages/count_tokens": RequestPlanner(CountTokensRequest, partial(count_tokens, conversations)),
        "/v1/embeddings": RequestPlanner(EmbeddingRequest, partial(plan_embeddings, engine)),
        **{path: RequestPlanner(ScoreRequest, partial(plan_score, engine)) for path in ("/v1/score", "/score")},
        **{path: RequestPlanner(RerankRequest, partial(plan_rerank, engine)) for path in ("/v1/rerank", "/rerank")},
        "/tokenize": RequestPlanner(TokenizeRequest, partial(tokenize, engine, conversations)),
        "/detokenize": RequestPlanner(DetokenizeRequest, partial(detokenize, engine)),
    }
