"""Readers of traces without text: Azure, BurstGPT, and Mooncake, which also records equal blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import synthetic_tokens
from chairlift.lab.workload.traces.records import TraceOptions, TraceRecord, csv_records, json_records

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS: Final = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE_BLOCK_SIZE: Final = 512


def read_azure(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads the Azure LLM inference traces (Patel et al., ISCA'24; Stojkovic et al., HPCA'25)."""
    return _read_lengths("azure", path, AZURE_COLUMNS, _seconds, options)


def read_burstgpt(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads BurstGPT (Wang et al., 2024, arXiv 2401.17644), whose failed requests have 0 response tokens."""
    return _read_lengths("burstgpt", path, BURSTGPT_COLUMNS, TraceRecord.number, options)


def _read_lengths(
    format_name: str,
    path: Path,
    columns: tuple[str, str, str],
    seconds: Callable[[TraceRecord, str], float],
    options: TraceOptions,
) -> Iterator[WorkloadRequest | None]:
    """Reads a CSV file with a time, which `seconds` returns, a prompt length and an output length in each row."""
    for index, record in enumerate(csv_records(path)):
        name, arrival = f"{format_name}-{index}", seconds(record, columns[0])
        prompt_len, output_len = record.integer(columns[1]), record.integer(columns[2])
        if prompt_len == 0 or output_len == 0:
            yield None
        else:
            yield WorkloadRequest(name, arrival, synthetic_tokens(name, prompt_len, options.vocab_size), output_len)


def read_mooncake(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads the Mooncake traces (Qin et al., FAST'25). Equal hash ids mean equal tokens up to the end of that block."""
    for index, record in enumerate(json_records(path)):
        prompt_len, output_len = record.integer("input_length"), record.integer("output_length")
        seconds = record.number("timestamp") / 1000
        blocks = _blocks(record, prompt_len, options.vocab_size)
        if prompt_len == 0 or output_len == 0:
            yield None
            continue
        own = synthetic_tokens(f"mooncake-{index}", max(0, prompt_len - len(blocks)), options.vocab_size)
        yield WorkloadRequest(f"mooncake-{index}", seconds, blocks[:prompt_len] + own, output_len)


def _blocks(record: TraceRecord, prompt_len: int, vocab_size: int) -> bytes:
    """Returns the tokens of the hashed blocks; the last block may be longer than the rest of the prompt."""
    size, ids = MOONCAKE_BLOCK_SIZE, record.items("hash_ids", int)
    if not prompt_len // size <= len(ids) <= -(-prompt_len // size):
        raise record.error("hash_ids", f"has {len(ids)} blocks of {size} tokens for an input_length of {prompt_len}")
    return b"".join(synthetic_tokens(f"mooncake-block-{block}", size, vocab_size) for block in ids)


def _seconds(record: TraceRecord, name: str) -> float:
    """Returns the seconds since 1970 of a date and time, in UTC unless it has a time zone."""
    text = record.get(name)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise record.error(name, f"must be a date and time such as 2023-11-16 18:15:46.68, got {text!r}") from None
    seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if seconds < 0:
        raise record.error(name, f"must not be before 1970, got {text!r}")
    return seconds
