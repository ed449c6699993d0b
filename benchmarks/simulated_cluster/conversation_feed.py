"""Conversations of simulated clients: each turn arrives some time after the end of the turn before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed


class ConversationFeed(RequestFeed):
    """Releases the first turn of each conversation at its arrival, and each other one `arrival` seconds after the end
    of the turn before it.

    Prompts begin with the prompts and outputs of the earlier turns. These are known in advance, because every output
    token of the simulator is 0.

    Args:
        conversations: their turns in order, with the own tokens of each as its prompt.
    """

    def __init__(self, conversations: Sequence[Sequence[WorkloadRequest]]) -> None:
        turns = [with_histories(each) for each in conversations]
        super().__init__([each[0] for each in turns])
        self._next = {before.request_id: turn for each in turns for before, turn in pairwise(each)}

    def finish(self, request_id: str, now: float) -> None:
        super().finish(request_id, now)
        if (turn := self._next.pop(request_id, None)) is not None:
            self.add(replace(turn, arrival=now + turn.arrival))

    @property
    def is_exhausted(self) -> bool:
        return super().is_exhausted and not self._next


def with_histories(turns: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """The turns of a conversation with the prompts and outputs of the turns before them."""
    history, found = b"", []
    for turn in turns:
        prompt = history + bytes(turn.prompt_token_ids)
        found.append(replace(turn, prompt_token_ids=prompt))
        history = prompt + bytes(turn.output_len)
    return found
