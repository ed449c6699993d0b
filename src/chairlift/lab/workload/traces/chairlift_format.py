"""Reader of Chairlift's own trace format: JSON lines with one object for each request, in any order.

    {"arrival": 0.25, "prompt_len": 40, "prompt_hashes": ["9f...", "07..."], "output_len": 12, "max_tokens": 64}

| field | meaning |
|---|---|
| arrival | seconds after the start or, with `after`, after the end of that request |
| prompt_len | tokens of the prompt; with `carries_history`, without the history |
| prompt_token_ids | the tokens themselves, instead of prompt_len |
| prompt_hashes | optional, with prompt_len: a string for each full block; equal ones mean equal tokens up to its end |
| hash_block_size | tokens in the block of each of prompt_hashes; 16 if missing |
| output_len | number of output tokens, at least 1 |
| e2e_latency | optional: the recorded latency in seconds; not read |
| request_id, max_tokens, after, carries_history, priority | optional, as `WorkloadRequest` has them |

A null field counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import synthetic_tokens
from chairlift.lab.workload.traces.records import TraceOptions, TraceRecord, json_records
from chairlift.observability.trace_recorder import HASH_BLOCK_SIZE

REQUIRED: Final = frozenset({"arrival", "output_len"})
PROMPTS: Final = frozenset({"prompt_len", "prompt_token_ids"})
READERS: Final[dict[str, Callable[[TraceRecord, str], Any]]] = {
    "max_tokens": lambda record, name: record.integer(name, 1),
    "after": TraceRecord.text,
    "carries_history": lambda record, name: record.typed(name, bool, "true or false"),
    "priority": lambda record, name: record.typed(name, int, "an integer"),
}
"""The optional fields of `WorkloadRequest`, and how they are read."""

OPTIONAL: Final = frozenset({"request_id", "prompt_hashes", "hash_block_size", "e2e_latency", *READERS})


def read_chairlift(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """Reads a file in Chairlift's format.

    Tokens after the last full block of `prompt_hashes` differ between all prompts, so prompts share full blocks only.
    """
    for index, record in enumerate(json_records(path)):
        _check_fields(record)
        name = record.text("request_id") if "request_id" in record.fields else f"chairlift-{index}"
        arrival, output_len = record.number("arrival"), record.integer("output_len", 1)
        prompt = _prompt(record, name, options.vocab_size)
        optional = {field: read(record, field) for field, read in READERS.items() if field in record.fields}
        try:
            request = WorkloadRequest(name, arrival, prompt, output_len, **optional)
        except ConfigError as error:
            raise ConfigError(f"{record.place}: {error}") from None
        yield request


def _check_fields(record: TraceRecord) -> None:
    names = record.fields.keys()
    if unknown := names - REQUIRED - PROMPTS - OPTIONAL:
        known = ", ".join(sorted(REQUIRED | PROMPTS | OPTIONAL))
        raise record.error(min(unknown), f"is not a field of this format; its fields are {known}")
    if len(names & PROMPTS) != 1:
        raise record.error("prompt_len", "or prompt_token_ids must be given, and not both")
    for name, partner in (("prompt_hashes", "prompt_len"), ("hash_block_size", "prompt_hashes")):
        if name in names and partner not in names:
            raise record.error(name, f"requires {partner}")


def _prompt(record: TraceRecord, name: str, vocab_size: int) -> Sequence[int]:
    if "prompt_token_ids" in record.fields:
        token_ids: list[int] = record.items("prompt_token_ids", int)
        if token_ids and min(token_ids) < 0:
            raise record.error("prompt_token_ids", f"must not be negative, got {min(token_ids)}")
        return token_ids
    prompt_len = record.integer("prompt_len")
    size = record.integer("hash_block_size", 1) if "hash_block_size" in record.fields else HASH_BLOCK_SIZE
    hashes = record.items("prompt_hashes", str) if "prompt_hashes" in record.fields else []
    if hashes and len(hashes) != prompt_len // size:
        problem = f"must have one item for each full block of {size} tokens: {prompt_len // size}, got {len(hashes)}"
        raise record.error("prompt_hashes", problem)
    shared = b"".join(synthetic_tokens(f"block-{text}", size, vocab_size) for text in hashes)
    return shared + synthetic_tokens(f"request-{name}", prompt_len - len(shared), vocab_size)
