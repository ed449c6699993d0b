"""The planners of all endpoints of a server."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.engine.served_engine import ServedEngine
from chairlift.server.api.api_options import ApiOptions
from chairlift.server.api.chat import ChatPlanner
from chairlift.server.api.completions import CompletionPlanner
from chairlift.server.api.conversation import ConversationPlanner
from chairlift.server.api.messages import CountTokensPlanner, MessagesPlanner
from chairlift.server.api.responses import ResponsesPlanner
from chairlift.server.api.tokenization import DetokenizePlanner, TokenizePlanner


@dataclass(frozen=True, slots=True)
class EndpointPlanners:
    """One planner for each endpoint that takes a body."""

    conversations: ConversationPlanner
    completions: CompletionPlanner
    chat: ChatPlanner
    responses: ResponsesPlanner
    messages: MessagesPlanner
    count_tokens: CountTokensPlanner
    tokenize: TokenizePlanner
    detokenize: DetokenizePlanner


def make_planners(engine: ServedEngine, options: ApiOptions) -> EndpointPlanners:
    """Create the planners for an engine, or for the description of an engine that a preparation worker has."""
    conversations = ConversationPlanner(engine, options)
    return EndpointPlanners(
        conversations=conversations,
        completions=CompletionPlanner(engine),
        chat=ChatPlanner(conversations),
        responses=ResponsesPlanner(conversations),
        messages=MessagesPlanner(conversations),
        count_tokens=CountTokensPlanner(conversations),
        tokenize=TokenizePlanner(engine, conversations),
        detokenize=DetokenizePlanner(engine),
    )
