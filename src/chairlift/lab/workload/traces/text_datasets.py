"""Readers of data sets of texts: ShareGPT, and the JSON lines that vLLM's benchmarks call custom. All arrive at 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.traces.options import TraceOptions
from chairlift.lab.workload.traces.records import TraceRecord, json_records, open_text_file

USERS: Final = frozenset({"human", "user"})
MODELS: Final = frozenset({"gpt", "chatgpt", "assistant"})

MIN_LEN: Final = 4
MAX_PROMPT_LEN: Final = 1024
MAX_TOTAL_LEN: Final = 2048
"""First turns outside these limits, in tokens, are skipped, as in vLLM's benchmarks (is_valid_sequence)."""

Turn = tuple[Sequence[int], int]
"""The tokens of a message, and the number of tokens of its answer."""


def read_sharegpt(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads conversations in the format of ShareGPT, and tokenizes their texts without a chat template.

    By default a conversation gives one request: its first message and answer, if their lengths are within the limits.
    With `multi_turn` it gives a request for each message and answer of any length, which starts directly after the one
    before and carries its history. A pair with an empty text ends the conversation.
    """
    tokenize = options.tokenizer(path)
    for index, record in enumerate(_entries(path)):
        name = f"sharegpt-{index}"
        turns = _turns(record, tokenize)
        if options.multi_turn:
            yield from _conversation(name, turns)
        else:
            yield _first_turn(name, next(turns, None))


def read_custom(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads one prompt per line; the output length is `output_tokens` of the line or, by default, `output_len`."""
    tokenize = options.tokenizer(path)
    for index, record in enumerate(json_records(path)):
        if "output_tokens" not in record.fields and options.output_len is None:
            raise record.error("output_tokens", "is missing: add it, or set output_len for all requests")
        output_len = options.output_len if "output_tokens" not in record.fields else record.integer("output_tokens")
        prompt = tokenize(record.text("prompt"))
        yield WorkloadRequest(f"custom-{index}", 0.0, prompt, output_len) if prompt and output_len else None


def _entries(path: Path) -> Iterator[TraceRecord]:
    with open_text_file(path) as file:
        try:
            entries = json.load(file)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: line {error.lineno}: not valid JSON ({error.msg})") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: must be a JSON list of conversations, got {type(entries).__name__}")
    for index, fields in enumerate(entries):
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: entry {index}: must be an object with `conversations`, got {fields!r:.80}")
        yield TraceRecord(f"{path}: entry {index}", fields)


def _turns(record: TraceRecord, tokenize: Callable[[str], Sequence[int]]) -> Iterator[Turn]:
    """Yields each message of a user that is directly followed by an answer of the model."""
    messages = [_message(record, i, item) for i, item in enumerate(record.items("conversations", dict))]
    for (role, text), (next_role, answer) in pairwise(messages):
        if role in USERS and next_role in MODELS:
            yield tokenize(text), len(tokenize(answer))


def _message(record: TraceRecord, index: int, item: dict[str, Any]) -> tuple[str, str]:
    message = TraceRecord(f"{record.place}: conversations[{index}]", item)
    return message.text("from"), message.text("value")


def _first_turn(name: str, turn: Turn | None) -> WorkloadRequest | None:
    if turn is None:
        return None
    prompt, output_len = turn
    fits = MIN_LEN <= len(prompt) <= MAX_PROMPT_LEN and MIN_LEN <= output_len <= MAX_TOTAL_LEN - len(prompt)
    return WorkloadRequest(name, 0.0, prompt, output_len) if fits else None


def _conversation(name: str, turns: Iterator[Turn]) -> Iterator[WorkloadRequest | None]:
    """Yields the turns up to the first empty one, or None once if there are none."""
    before: str | None = None
    for number, (prompt, output_len) in enumerate(turns):
        if not prompt or not output_len:
            break
        request_id = f"{name}-t{number}"
        yield WorkloadRequest(request_id, 0.0, prompt, output_len, after=before, carries_history=before is not None)
        before = request_id
    if before is None:
        yield None
