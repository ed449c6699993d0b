"""Readers of data sets of texts: ShareGPT, and the JSON lines that vLLM's benchmarks call custom. All arrive at 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.traces.records import TraceOptions, TraceRecord, json_records, open_text_file

USERS: Final = frozenset({"human", "user"})
MODELS: Final = frozenset({"gpt", "chatgpt", "assistant"})

MIN_LEN: Final = 4
MAX_PROMPT_LEN: Final = 1024
MAX_TOTAL_LEN: Final = 2048
"""First turns outside these limits, in tokens, are skipped, as in vLLM's benchmarks (is_valid_sequence)."""


def read_sharegpt(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads conversations in the format of ShareGPT, and tokenizes their texts without a chat template.

    A conversation gives one request: its first message and answer, if their lengths are within the limits.
    """
    tokenize = options.tokenizer(path)
    for index, record in enumerate(_entries(path)):
        yield _first_turn(f"sharegpt-{index}", record, tokenize)


def read_custom(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads one prompt per line, with its number of `output_tokens`."""
    tokenize = options.tokenizer(path)
    for index, record in enumerate(json_records(path)):
        output_len, prompt = record.integer("output_tokens"), tokenize(record.text("prompt"))
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


def _first_turn(name: str, record: TraceRecord, tokenize: Callable[[str], Sequence[int]]) -> WorkloadRequest | None:
    """Returns the first message of a user that is directly followed by an answer.

    None if there is no such message, or if a length is outside the limits.
    """
    messages = [_message(record, i, item) for i, item in enumerate(record.items("conversations", dict))]
    for (role, text), (next_role, answer) in pairwise(messages):
        if role in USERS and next_role in MODELS:
            prompt, output_len = tokenize(text), len(tokenize(answer))
            fits = MIN_LEN <= len(prompt) <= MAX_PROMPT_LEN and MIN_LEN <= output_len <= MAX_TOTAL_LEN - len(prompt)
            return WorkloadRequest(name, 0.0, prompt, output_len) if fits else None
    return None


def _message(record: TraceRecord, index: int, item: dict[str, Any]) -> tuple[str, str]:
    message = TraceRecord(f"{record.place}: conversations[{index}]", item)
    return message.text("from"), message.text("value")
