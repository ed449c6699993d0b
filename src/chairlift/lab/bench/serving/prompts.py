"""The formats of a prompt in a request to a server: token ids, a text of about as many tokens, or chat messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

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
"""Common nouns, which are single tokens in most vocabularies."""


class CompletionPrompts:
    """Prompts of completions: token ids or text. The API returns answers as text, so a history has placeholder tokens.

    Args:
        encode: converts the token ids of a prompt to the value of the field `prompt`.
    """

    def __init__(self, encode: Callable[[Sequence[int]], object]) -> None:
        self._encode = encode

    def fields(self, request: WorkloadRequest) -> dict[str, Any]:
        """The field of the body with the prompt of a request that is due."""
        return {"prompt": self._encode(request.prompt_token_ids)}

    def record_answer(self, request_id: str, text: str) -> None:
        """Do nothing: no request continues the text of an answer."""


class ChatPrompts:
    """Messages of conversations: a request with a history contains the previous messages and answers as text.

    Args:
        workload: all requests, with the conversations that they continue.
    """

    def __init__(self, workload: Sequence[WorkloadRequest]) -> None:
        self._requests = {request.request_id: request for request in workload}
        self._continued = {request.after for request in workload if request.carries_history}
        self._messages: dict[str, list[dict[str, str]]] = {}

    def fields(self, request: WorkloadRequest) -> dict[str, Any]:
        """The field of the body with the messages of a request that is due."""
        own = self._requests[request.request_id]
        history = self._messages[own.after] if own.carries_history and own.after is not None else []
        messages = [*history, {"role": "user", "content": prompt_text(own.prompt_token_ids)}]
        if request.request_id in self._continued:
            self._messages[request.request_id] = messages
        return {"messages": messages}

    def record_answer(self, request_id: str, text: str) -> None:
        """Keep the answer to a request for the requests that continue the conversation."""
        if request_id in self._continued:
            answer = {"role": "assistant", "content": text}
            self._messages[request_id] = [*self._messages[request_id], answer]


PromptFormat = CompletionPrompts | ChatPrompts
"""Writes the prompts of a workload into request bodies."""


def prompt_text(token_ids: Sequence[int]) -> str:
    """One word for each token id. Equal prefixes stay equal, and most words are one token."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)
