"""The planners of all endpoints of a server."""

from __future__ import annotations

from chairlift.engine.served_engine import ServedEngine
from chairlift.server.api.api_options import ApiOptions
from chairlift.server.api.chat import ChatPlanner
from chairlift.server.api.completions import CompletionPlanner
from chairlift.server.api.conversation import ConversationPlanner
from chairlift.server.api.messages import CountTokensPlanner, MessagesPlanner
from chairlift.server.api.responses import ResponsesPlanner
from chairlift.server.api.tokenization import DetokenizePlanner, TokenizePlanner


class EndpointPlanners:
    """One planner for each endpoint that takes a body.

    Args:
        engine: An engine, or the description of an engine that a preparation worker has.
    """

    def __init__(self, engine: ServedEngine, options: ApiOptions) -> None:
        self.conversations = ConversationPlanner(engine, options)
        self.completions = CompletionPlanner(engine)
        self.chat = ChatPlanner(self.conversations)
        self.responses = ResponsesPlanner(self.conversations)
        self.messages = MessagesPlanner(self.conversations)
        self.count_tokens = CountTokensPlanner(self.conversations)
        self.tokenize = TokenizePlanner(engine, self.conversations)
        self.detokenize = DetokenizePlanner(engine)
