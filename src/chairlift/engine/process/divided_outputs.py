"""Divides the outputs of a step into messages of limited size, and joins them again.

    outputs     [ a: 30 tokens ][ b: 90 tokens with 20 logprobs each                        ][ c ]
    messages    [ a             | b: 18 tokens ] [ b: 48 tokens ] [ b: 24 tokens             | c ]

A beam search and a static batch return whole answers at once. As one message, the logprobs of long answers would stop
the event loop of the front end for seconds while it decodes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from chairlift.outputs import EngineCoreOutput, TokenLogprobs, join_outputs

MAX_LOGPROBS_PER_MESSAGE: Final = 1024
"""The logprobs of a message, at most. Those of one token, which are never divided, are at most 21."""


def divide_outputs(outputs: list[EngineCoreOutput]) -> Iterator[tuple[list[EngineCoreOutput], bool]]:
    """The outputs of each message, and whether its last output continues as the first one of the next message.

    All fields that an output has once are in its last part.
    """
    message: list[EngineCoreOutput] = []
    room = MAX_LOGPROBS_PER_MESSAGE
    for output in outputs:
        if output.logprobs is None and output.prompt_logprobs is None:
            message.append(output)
            continue
        rest = output
        while (part := _first_part(rest, room)) is not None:
            message.append(part)
            yield message, True
            message, room = [], MAX_LOGPROBS_PER_MESSAGE
            rest = _without(rest, part)
        message.append(rest)
        room -= num_logprobs(rest)
    yield message, False


def _first_part(output: EngineCoreOutput, room: int) -> EngineCoreOutput | None:
    """The part of an output that has at most `room` logprobs, prompt logprobs first; None if that is all of it."""
    part = EngineCoreOutput(output.request_id, [])
    if output.prompt_logprobs is not None:
        first, entries = output.prompt_logprobs
        num_entries, room = _fitting(entries, room)
        part = part._replace(prompt_logprobs=(first, entries[:num_entries]))
        if num_entries < len(entries):
            return part
    if output.logprobs is None:
        return None
    num_tokens, _room = _fitting(output.logprobs, room)
    if num_tokens == len(output.logprobs):
        return None
    return part._replace(new_token_ids=output.new_token_ids[:num_tokens], logprobs=output.logprobs[:num_tokens])


def _without(output: EngineCoreOutput, part: EngineCoreOutput) -> EngineCoreOutput:
    num_tokens = len(part.new_token_ids)
    if output.prompt_logprobs is not None and part.prompt_logprobs is not None:
        (first, entries), num_entries = output.prompt_logprobs, len(part.prompt_logprobs[1])
        rest = (first + num_entries, entries[num_entries:]) if num_entries < len(entries) else None
        output = output._replace(prompt_logprobs=rest)
    if output.logprobs is not None:
        output = output._replace(new_token_ids=output.new_token_ids[num_tokens:], logprobs=output.logprobs[num_tokens:])
    return output


def _fitting(entries: Sequence[TokenLogprobs], room: int) -> tuple[int, int]:
    """The number of entries that have together at most `room` logprobs, and the room that they leave."""
    for index, entry in enumerate(entries):
        if len(entry.top) >= room:
            return index, 0
        room -= 1 + len(entry.top)
    return len(entries), room


def num_logprobs(output: EngineCoreOutput) -> int:
    """The number of logprobs of an output and of its prompt."""
    prompt = [] if output.prompt_logprobs is None else output.prompt_logprobs[1]
    return sum(1 + len(entry.top) for entries in (output.logprobs or [], prompt) for entry in entries)


class OutputJoiner:
    """Joins the outputs of the messages of `divide_outputs`."""

    def __init__(self) -> None:
        self._parts: list[EngineCoreOutput] = []

    def add(self, outputs: list[EngineCoreOutput], is_continued: bool) -> list[EngineCoreOutput]:
        """Add the outputs of a message; returns all outputs of the step after its last message, and none before it, so
        that the answers to one prompt continue to arrive together."""
        if not is_continued and not self._parts:
            return outputs
        self._parts += outputs
        if is_continued:
            return []
        parts, self._parts = self._parts, []
        return [_join(list(same)) for _request_id, same in groupby(parts, key=lambda part: part.request_id)]


def _join(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The output that was divided into these parts."""
    if len(parts) == 1:
        return parts[0]
    whole = join_outputs(parts[0].request_id, parts)
    return parts[-1]._replace(
        new_token_ids=whole.new_token_ids, logprobs=whole.logprobs, prompt_logprobs=whole.prompt_logprobs
    )
