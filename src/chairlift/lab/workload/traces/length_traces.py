"""Readers of traces without text: Azure, BurstGPT, and Mooncake, which also records equal blocks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import synthetic_tokens
from chairlift.lab.workload.traces.options import TraceOptions
from chairlift.lab.workload.traces.records import TraceRecord, csv_records, json_records

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS: Final = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE_BLOCK_SIZE: Final = 512


def read_azure(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads the Azure LLM inference traces (Patel et al., ISCA'24; Stojkovic et al., HPCA'25)."""
    for index, record in enumerate(csv_records(path, AZURE_COLUMNS)):
        seconds = _seconds(record, "TIMESTAMP")
        lens = record.integer("ContextTokens"), record.integer("GeneratedTokens")
        yield _request(f"azure-{index}", seconds, *lens, options)


def read_burstgpt(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads BurstGPT (Wang et al., 2024, arXiv 2401.17644), whose failed requests have 0 response tokens."""
    for index, record in enumerate(csv_records(path, BURSTGPT_COLUMNS)):
        lens = record.integer("Request tokens"), record.integer("Response tokens")
        yield _request(f"burstgpt-{index}", record.number("Timestamp"), *lens, options)


def read_mooncake(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads the Mooncake traces (Qin et al., FAST'25), in which equal hash_ids mean equal tokens so far."""
    for index, record in enumerate(json_records(path)):
        prompt_len, output_len = record.integer("input_length"), record.integer("output_length")
        seconds = record.number("timestamp") / 1000
        blocks = _blocks(record, prompt_len, options)
        if prompt_len == 0 or output_len == 0:
            yield None
            continue
        own = synthetic_tokens(f"mooncake-{index}", max(0, prompt_len - len(blocks)), options.vocab_size)
        yield WorkloadRequest(f"mooncake-{index}", seconds, blocks[:prompt_len] + own, output_len)


def _blocks(record: TraceRecord, prompt_len: int, options: TraceOptions) -> bytes:
    """Returns the tokens of the hashed blocks; the last block may be longer than the rest of the prompt."""
    size = options.hash_block_size or MOONCAKE_BLOCK_SIZE
    ids = record.items("hash_ids", int)
    if not prompt_len // size <= len(ids) <= -(-prompt_len // size):
        raise record.error(
            "hash_ids",
            f"has {len(ids)} blocks of {size} tokens for an input_length of {prompt_len}: set hash_block_size to the "
            f"block size of the trace",
        )
    return b"".join(synthetic_tokens(f"mooncake-block-{block}", size, options.vocab_size) for block in ids)


def _request(
    name: str, seconds: float, prompt_len: int, output_len: int, options: TraceOptions
) -> WorkloadRequest | None:
    if prompt_len == 0 or output_len == 0:
        return None
    return WorkloadRequest(name, seconds, synthetic_tokens(name, prompt_len, options.vocab_size), output_len)


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
