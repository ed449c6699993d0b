"""All planners of a server, by the path of their endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.engine.client import ServedEngine
from chairlift.server.api_options import ApiOptions
from chairlift.server.chat import ChatPlanner
from chairlift.server.completions import CompletionPlanner
from chairlift.server.conversation import Conversations
from chairlift.server.messages_api import CountTokensPlanner, MessagesPlanner
from chairlift.server.responses_api import ResponsesPlanner
from chairlift.server.tokenization import DetokenizePlanner, TokenizePlanner


@dataclass(frozen=True, slots=True)
class Planners:
    """One planner for each endpoint that takes a body."""

    conversations: Conversations
    completions: CompletionPlanner
    chat: ChatPlanner
    responses: ResponsesPlanner
    messages: MessagesPlanner
    count_tokens: CountTokensPlanner
    tokenize: TokenizePlanner
    detokenize: DetokenizePlanner


def make_planners(engine: ServedEngine, options: ApiOptions) -> Planners:
    """The planners for an engine, or for what a preparation worker knows of one."""
    conversations = Conversations(engine, options)
    return Planners(
        conversations=conversations,
        completions=CompletionPlanner(engine),
        chat=ChatPlanner(conversations),
        responses=ResponsesPlanner(conversations),
        messages=MessagesPlanner(conversations),
        count_tokens=CountTokensPlanner(conversations),
        tokenize=TokenizePlanner(engine, conversations),
        detokenize=DetokenizePlanner(engine),
    )
