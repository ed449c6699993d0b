"""Our own format: JSON lines, an object a request, in any order.

    {"arrival": 0.25, "prompt_len": 40, "prompt_hashes": ["9f...", "07..."], "output_len": 12, "max_tokens": 64}

| field | |
|---|---|
| arrival | seconds after the start or, with `after`, after the end of that request |
| prompt_len | tokens of the prompt; with `carries_history`, of the new part of it |
| prompt_token_ids | instead of prompt_len: the tokens themselves |
| prompt_hashes | beside prompt_len, optional: a text for each full block; equal texts: equal up to the block's end |
| hash_block_size | tokens for each of prompt_hashes; 16 if missing |
| output_len | tokens that came out, at least 1 |
| e2e_latency | optional, for comparison: seconds it took when it was recorded; not read back |
| request_id, max_tokens, after, carries_history, priority | optional, as `WorkloadRequest` has them |

A field that is null is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import synthetic_tokens
from chairlift.lab.workload.traces.options import TraceOptions
from chairlift.lab.workload.traces.records import TraceRecord, json_records
from chairlift.observability.trace_recorder import HASH_BLOCK_SIZE

REQUIRED: Final = frozenset({"arrival", "output_len"})
PROMPTS: Final = frozenset({"prompt_len", "prompt_token_ids"})
OPTIONAL: Final = frozenset(
    {
        "request_id",
        "prompt_hashes",
        "hash_block_size",
        "e2e_latency",
        "max_tokens",
        "after",
        "carries_history",
        "priority",
    }
)


def read_chairlift(path: Path, options: TraceOptions) -> Iterator[WorkloadRequest | None]:
    """The requests of a file of ours. A prompt that `prompt_hashes` do not reach the end of ends with tokens of its
    own, so prompts share whole blocks only."""
    for index, record in enumerate(json_records(path)):
        _check_fields(record)
        name = record.text("request_id") if "request_id" in record.fields else f"chairlift-{index}"
        arrival, output_len = record.number("arrival"), record.integer("output_len", 1)
        prompt, rest = _prompt(record, name, options.vocab_size), _rest(record)
        try:
            request = WorkloadRequest(name, arrival, prompt, output_len, **rest)
        except ConfigError as error:
            raise ConfigError(f"{record.place}: {error}") from None
        yield request


def _check_fields(record: TraceRecord) -> None:
    names = record.fields.keys()
    if unknown := names - REQUIRED - PROMPTS - OPTIONAL:
        known = ", ".join(sorted(REQUIRED | PROMPTS | OPTIONAL))
        raise record.error(min(unknown), f"is not a field of this format; its fields are {known}")
    if len(names & PROMPTS) != 1:
        raise record.error("prompt_len", "or prompt_token_ids must be there, and not both")
    for name, partner in (("prompt_hashes", "prompt_len"), ("hash_block_size", "prompt_hashes")):
        if name in names and partner not in names:
            raise record.error(name, f"is there without {partner}")


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
        problem = f"must have one for each full block of {size} tokens: {prompt_len // size}, got {len(hashes)}"
        raise record.error("prompt_hashes", problem)
    shared = b"".join(synthetic_tokens(f"block-{text}", size, vocab_size) for text in hashes)
    return shared + synthetic_tokens(f"request-{name}", prompt_len - len(shared), vocab_size)


def _rest(record: TraceRecord) -> dict[str, Any]:
    """What may be missing."""
    rest: dict[str, Any] = {}
    if "max_tokens" in record.fields:
        rest["max_tokens"] = record.integer("max_tokens", 1)
    if "after" in record.fields:
        rest["after"] = record.text("after")
    for name, kind, what in (("carries_history", bool, "true or false"), ("priority", int, "an integer")):
        if name in record.fields:
            rest[name] = record.get(name)
            if type(rest[name]) is not kind:
                raise record.error(name, f"must be {what}, got {rest[name]!r:.80}")
    return rest
