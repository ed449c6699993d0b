"""Finds the turns of sessions in a recorded trace by the hashes of their prompts, for a replay in a closed loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from chairlift.lab.workload.request import WorkloadRequest


class RecordedRequest(NamedTuple):
    """A request of a trace, the hashes of its prompt, each of which includes all tokens before it, and its end."""

    request: WorkloadRequest
    prompt_hashes: Sequence[str]
    end: float


def follow_turns(recorded: Sequence[RecordedRequest]) -> list[WorkloadRequest]:
    """The requests in the order of arrival, each of which follows the turn before it, if there is one, after the
    recorded gap.

    The turn before a request is one of the same tenant that had ended when the request arrived, whose prompt is
    shorter, and whose full blocks are the beginning of its prompt: of several the one with the most blocks, and among
    these the last one to end.
    """
    turns: defaultdict[tuple[str, str], list[RecordedRequest]] = defaultdict(list)
    requests: list[WorkloadRequest] = []
    for each in sorted(recorded, key=lambda each: each.request.arrival):
        request = each.request
        if (before := _turn_before(each, turns)) is not None:
            request = replace(request, arrival=request.arrival - before.end, follows=before.request.request_id)
        requests.append(request)
        for block in each.prompt_hashes[-1:]:
            turns[request.tenant, block].append(each)
    return requests


def _turn_before(
    each: RecordedRequest, turns: Mapping[tuple[str, str], Sequence[RecordedRequest]]
) -> RecordedRequest | None:
    arrival, num_tokens = each.request.arrival, len(each.request.prompt_token_ids)
    for block in reversed(each.prompt_hashes):
        known = turns.get((each.request.tenant, block), ())
        ended = [turn for turn in known if turn.end <= arrival and len(turn.request.prompt_token_ids) < num_tokens]
        if ended:
            return max(ended, key=lambda turn: turn.end)
    return None
