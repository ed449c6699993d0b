"""What is sent for a prompt of given token ids: the ids themselves, or a text of about as many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from chairlift.lab.workload.request import WorkloadRequest

_NOUNS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl moment air teacher force education"
)
WORDS: Final = tuple(_NOUNS.split())
"""Common nouns, which most vocabularies hold whole."""


class Prompts(Protocol):
    """How the requests of a load are put into words."""

    def fields(self, request: WorkloadRequest) -> dict[str, Any]:
        """The field of the body that holds the prompt of a request that is due."""
        ...

    def answered(self, request_id: str, text: str) -> None:
        """A request ended with this answer; later ones may carry it on."""
        ...


class TokenIdPrompts:
    """Completions from token ids. Answers come as text, so in a history stand-ins take their tokens' place."""

    def fields(self, request: WorkloadRequest) -> dict[str, Any]:
        return {"prompt": list(request.prompt_token_ids)}

    def answered(self, request_id: str, text: str) -> None:
        pass


class TextPrompts:
    """Completions from text, for servers that take no token ids; histories as `TokenIdPrompts`."""

    def fields(self, request: WorkloadRequest) -> dict[str, Any]:
        return {"prompt": prompt_text(request.prompt_token_ids)}

    def answered(self, request_id: str, text: str) -> None:
        pass


class ChatPrompts:
    """Conversations: a request that carries a history brings the messages and answers before it, word for word.

    Args:
        workload: the requests as they were before they fell due, which say what carries on what.
    """

    def __init__(self, workload: Sequence[WorkloadRequest]) -> None:
        self._requests = {request.request_id: request for request in workload}
        self._carried = {request.after for request in workload if request.carries_history}
        self._messages: dict[str, list[dict[str, str]]] = {}

    def fields(self, request: WorkloadRequest) -> dict[str, Any]:
        own = self._requests[request.request_id]
        history = self._messages[own.after] if own.carries_history and own.after is not None else []
        messages = [*history, {"role": "user", "content": prompt_text(own.prompt_token_ids)}]
        if request.request_id in self._carried:
            self._messages[request.request_id] = messages
        return {"messages": messages}

    def answered(self, request_id: str, text: str) -> None:
        if request_id in self._carried:
            answer = {"role": "assistant", "content": text}
            self._messages[request_id] = [*self._messages[request_id], answer]


def prompt_text(token_ids: Sequence[int]) -> str:
    """A word for each id: equal prefixes stay equal, and mostly one token a word."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)
