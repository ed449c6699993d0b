"""What a front end tells the engine core. The same records in one process and between two."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from chairlift.engine.input_processor import EngineRequest
from chairlift.request import FinishReason


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Queue these siblings. They share a prompt, which only the first one carries."""

    requests: list[EngineRequest]

    @classmethod
    def of(cls, requests: list[EngineRequest]) -> Add:
        """The command for siblings that all have their prompt."""
        first, *others = requests
        return cls([first, *(replace(request, prompt_token_ids=[]) for request in others)])

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.requests[0].prompt_token_ids)

    def siblings(self) -> list[EngineRequest]:
        """The siblings, each with the prompt."""
        first, *others = self.requests
        return [first, *(replace(request, prompt_token_ids=first.prompt_token_ids) for request in others)]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End these requests."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End the loop; unfinished requests get no more."""


Command = Add | Abort | Stop
