"""Turns of conversations as dictionaries: one system message at the beginning, and one message for each turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

Message = dict[str, Any]

BLANK_LINE = "\n\n"


def leading_system(messages: Sequence[Message]) -> list[Message]:
    """The system messages at the beginning of a conversation."""
    return list(takewhile(lambda message: message["role"] == "system", messages))


def with_one_leading_system(messages: list[Message], separator: str = BLANK_LINE) -> list[Message]:
    """The messages with one system message for all of those at the beginning."""
    first = leading_system(messages)
    return [_joined(first, separator), *messages[len(first) :]] if len(first) > 1 else messages


def adapted_turns(messages: list[Message], separator: str) -> Iterator[list[Message]]:
    """The messages in the forms that strict chat templates accept, in the order in which to try them.

    Consecutive turns of one role are combined. System messages are turns of the user: in the first form only those
    after the beginning, in the second form all.
    """
    merged = with_one_leading_system(messages, separator)
    for keeps_first in (True, False):
        turns = [
            message if message["role"] != "system" or (keeps_first and not index) else {**message, "role": "user"}
            for index, message in enumerate(merged)
        ]
        yield with_combined_turns(turns, separator)


def with_combined_turns(messages: list[Message], separator: str = BLANK_LINE) -> list[Message]:
    """The messages with one message for consecutive ones of the user, or of the assistant.

    Text after a tool call stays in a separate message, because in one message the call would follow it.
    """
    turns: list[list[Message]] = []
    for message in messages:
        if turns and _continues(turns[-1][-1], message):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [turn[0] if len(turn) == 1 else _joined(turn, separator) for turn in turns]


def _continues(last: Message, message: Message) -> bool:
    has_text = bool(message.get("content") or message.get("reasoning_content"))
    return last["role"] == message["role"] in ("user", "assistant") and not (last.get("tool_calls") and has_text)


def _joined(messages: Sequence[Message], separator: str) -> Message:
    joined: Message = {**messages[0]}
    for name in ("content", "reasoning_content"):
        if texts := [text for message in messages if (text := message.get(name))]:
            joined[name] = separator.join(texts)
    if calls := [call for message in messages for call in message.get("tool_calls") or []]:
        joined["tool_calls"] = calls
    return joined


def with_separate_texts(messages: list[Message]) -> list[Message]:
    """The messages with the text before calls in a separate turn."""
    turns: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            turns.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        turns.append(message)
    return turns


def with_single_calls(messages: list[Message]) -> list[Message]:
    """The messages with one call in each turn of the assistant, followed by its results before the user's next turn."""
    groups: list[list[Message]] = []
    groups_of_calls: dict[Any, list[Message]] = {}
    for message in messages:
        if message["role"] == "tool" and (group := groups_of_calls.get(message.get("tool_call_id"))):
            group.append(message)
            continue
        if message["role"] == "user":
            groups_of_calls.clear()
        calls = message.get("tool_calls") or []
        groups.append([{**message, "tool_calls": calls[:1]} if calls else message])
        groups += [[{"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls[1:]]
        groups_of_calls |= zip((call.get("id") for call in calls), groups[len(groups) - len(calls) :], strict=True)
    return [message for group in groups for message in group]
