"""Readers of recorded workloads.

| format | file | one request |
|---|---|---|
| azure | CSV | TIMESTAMP, ContextTokens, GeneratedTokens (Azure public dataset, 2023 and 2024) |
| burstgpt | CSV | Timestamp in seconds, Request tokens, Response tokens (and Model, Total tokens, Log Type) |
| mooncake | JSON lines | timestamp in ms, input_length, output_length, hash_ids: one for each 512 tokens |
| sharegpt | JSON list | {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}, ...]} |
| custom | JSON lines | {"prompt": text, "output_tokens": n}, as vLLM's benchmarks read it |
| chairlift | JSON lines | as `chairlift serve --record-trace` writes it (see `ChairliftLine`) |

Traces without text have synthetic tokens (`synthetic_tokens`), equal where the trace records equal blocks, different
elsewhere.

A reader yields the requests of a file in order, and None for a record that cannot be served. Arrival times may start at
any value. `msgspec` checks the records; an error names the line and the field.
"""

from __future__ import annotations

import csv
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TextIO, TypeVar

import msgspec
from msgspec import Meta, Struct

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest, check_ids
from chairlift.lab.workload.synthetic import synthetic_tokens
from chairlift.observability.trace_recorder import HASH_BLOCK_SIZE
from chairlift.slo import SLO

MOONCAKE_BLOCK_SIZE: Final = 512

USERS: Final = frozenset({"human", "user"})
MODELS: Final = frozenset({"gpt", "chatgpt", "assistant"})
MIN_LEN, MAX_PROMPT_LEN, MAX_TOTAL_LEN = 4, 1024, 2048
"""First turns of ShareGPT outside these limits, in tokens, are skipped, as in vLLM's benchmarks (is_valid_sequence)."""

Length = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The options of a trace reader.

    Attributes:
        limit: maximum number of requests to read; None: all.
        vocab_size: synthetic token ids are less than this and less than 256.
        tokenize: returns the token ids of a text without special tokens; required by sharegpt and custom.
        closed_loop: turns of sessions follow the turn before them (see `follow_turns`).

    Raises:
        ConfigError: a number is less than 1.
    """

    limit: int | None = None
    vocab_size: int = 256
    tokenize: Callable[[str], Sequence[int]] | None = None
    closed_loop: bool = False

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("vocab_size", self.vocab_size)):
            if value is not None and value < 1:
                raise ConfigError(f"trace: {name} must be at least 1, got {value}")

    def tokenizer(self, path: Path) -> Callable[[str], Sequence[int]]:
        """Return `tokenize`; raises ConfigError if it is missing."""
        if self.tokenize is None:
            raise ConfigError(f"{path}: this trace contains text, so a tokenizer is required to know its lengths")
        return self.tokenize


Requests = Iterator[WorkloadRequest | None]


# -- files ---------------------------------------------------------------------------------------------------------


@contextmanager
def open_text_file(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file; raises ConfigError if it cannot be opened or decoded."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as error:
        hint = "" if path.is_absolute() else f"; the path is relative to {Path.cwd()}"
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}){hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error})") from None


@contextmanager
def named_errors(place: str, text: str = "") -> Iterator[None]:
    """Add the place to errors of a record, and the beginning of its text."""
    try:
        yield
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(f"{place}: {error}" + (f", in {text.strip():.80}" if text else "")) from None


def csv_records(path: Path, kind: type[Record]) -> Iterator[tuple[str, Record]]:
    """Yield the place and the record of each row of a CSV file below its header, without blank lines."""
    with open_text_file(path) as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows, [])]
        for row in filter(None, rows):
            place = f"{path}: line {rows.line_num}"
            with named_errors(place, ",".join(row)):
                record = msgspec.convert(dict(zip(header, row, strict=False)), kind, strict=False)
            yield place, record


def json_records(path: Path, kind: type[Record]) -> Iterator[tuple[str, Record]]:
    """Yield the place and the record of each line of a JSON lines file, without blank lines."""
    decoder = msgspec.json.Decoder(kind)
    with open_text_file(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}: line {number}"
                with named_errors(place, line):
                    record = decoder.decode(line)
                yield place, record


# -- traces without text -------------------------------------------------------------------------------------------


class AzureRow(Struct):
    """A row of the Azure LLM inference traces (Patel et al., ISCA'24; Stojkovic et al., HPCA'25)."""

    timestamp: str = msgspec.field(name="TIMESTAMP")
    prompt_len: Length = msgspec.field(name="ContextTokens")
    output_len: Length = msgspec.field(name="GeneratedTokens")

    def arrival(self) -> float:
        """The seconds since 1970 of the date and time, in UTC unless it has a time zone."""
        time = datetime.fromisoformat(self.timestamp)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


class BurstGPTRow(Struct):
    """A row of BurstGPT (Wang et al., 2024, arXiv 2401.17644), whose failed requests have 0 response tokens."""

    timestamp: Seconds = msgspec.field(name="Timestamp")
    prompt_len: Length = msgspec.field(name="Request tokens")
    output_len: Length = msgspec.field(name="Response tokens")

    def arrival(self) -> float:
        """The seconds since the start of the trace."""
        return self.timestamp


def read_lengths(format_name: str, kind: type[AzureRow | BurstGPTRow], path: Path, options: TraceOptions) -> Requests:
    """Read a CSV trace of lengths and arrival times."""
    for index, (place, row) in enumerate(csv_records(path, kind)):
        with named_errors(place):
            name, arrival = f"{format_name}-{index}", row.arrival()
            if row.prompt_len and row.output_len:
                prompt = synthetic_tokens(name, row.prompt_len, options.vocab_size)
                request = WorkloadRequest(name, arrival, prompt, row.output_len)
        yield request if row.prompt_len and row.output_len else None


class MooncakeLine(Struct):
    """A line of the Mooncake traces (Qin et al., FAST'25). Equal hash ids mean equal tokens up to the end of that
    block."""

    timestamp: Seconds
    input_length: Length
    output_length: Length
    hash_ids: list[int]


def read_mooncake(path: Path, options: TraceOptions) -> Requests:
    """Read the Mooncake traces."""
    size, vocab_size = MOONCAKE_BLOCK_SIZE, options.vocab_size
    for index, (place, line) in enumerate(json_records(path, MooncakeLine)):
        prompt_len, ids = line.input_length, line.hash_ids
        if not prompt_len // size <= len(ids) <= -(-prompt_len // size):
            problem = f"hash_ids has {len(ids)} blocks of {size} tokens for an input_length of {prompt_len}"
            raise ConfigError(f"{place}: {problem}")
        if prompt_len == 0 or line.output_length == 0:
            yield None
            continue
        # The last block may be longer than the rest of the prompt.
        blocks = b"".join(synthetic_tokens(f"mooncake-block-{block}", size, vocab_size) for block in ids)
        own = synthetic_tokens(f"mooncake-{index}", max(0, prompt_len - len(blocks)), vocab_size)
        prompt = blocks[:prompt_len] + own
        yield WorkloadRequest(f"mooncake-{index}", line.timestamp / 1000, prompt, line.output_length)


# -- data sets of texts, which all arrive at 0 ---------------------------------------------------------------------


class ShareGPTMessage(Struct):
    """One message of a conversation."""

    role: str = msgspec.field(name="from")
    value: str


class ShareGPTEntry(Struct):
    """One conversation of ShareGPT."""

    conversations: list[ShareGPTMessage]


class CustomLine(Struct):
    """A line of the data sets that vLLM's benchmarks call custom."""

    prompt: str
    output_tokens: Length


def read_sharegpt(path: Path, options: TraceOptions) -> Requests:
    """Read conversations in the format of ShareGPT, and tokenize their texts without a chat template.

    A conversation gives one request: its first message and answer, if their lengths are within the limits.
    """
    tokenize = options.tokenizer(path)
    with open_text_file(path) as file, named_errors(f"{path}"):
        entries = msgspec.json.decode(file.read(), type=list[ShareGPTEntry])
    for index, entry in enumerate(entries):
        yield _first_turn(f"sharegpt-{index}", entry, tokenize)


def _first_turn(name: str, entry: ShareGPTEntry, tokenize: Callable[[str], Sequence[int]]) -> WorkloadRequest | None:
    """The first message of a user that is directly followed by an answer; None if there is none within the limits."""
    for message, answer in pairwise(entry.conversations):
        if message.role in USERS and answer.role in MODELS:
            prompt, output_len = tokenize(message.value), len(tokenize(answer.value))
            fits = MIN_LEN <= len(prompt) <= MAX_PROMPT_LEN and MIN_LEN <= output_len <= MAX_TOTAL_LEN - len(prompt)
            return WorkloadRequest(name, 0.0, prompt, output_len) if fits else None
    return None


def read_custom(path: Path, options: TraceOptions) -> Requests:
    """Read one prompt per line, with its number of `output_tokens`."""
    tokenize = options.tokenizer(path)
    for index, (_, line) in enumerate(json_records(path, CustomLine)):
        prompt = tokenize(line.prompt)
        is_servable = prompt and line.output_tokens
        yield WorkloadRequest(f"custom-{index}", 0.0, prompt, line.output_tokens) if is_servable else None


# -- Chairlift's own format ----------------------------------------------------------------------------------------


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


class ChairliftLine(Struct, forbid_unknown_fields=True):
    """A line of Chairlift's own format, with one request; the lines may be in any order. A null field is missing.

        {"arrival": 0.25, "prompt_len": 40, "prompt_hashes": ["9f...", "07..."], "output_len": 12, "max_tokens": 64}

    Attributes:
        arrival: seconds after the start.
        prompt_len: tokens of the prompt.
        prompt_token_ids: the tokens themselves, instead of prompt_len.
        prompt_hashes: with prompt_len: a string for each full block; equal ones mean equal tokens up to its end.
        hash_block_size: tokens in the block of each of prompt_hashes; HASH_BLOCK_SIZE if missing.
        e2e_latency: the recorded latency in seconds, which only a closed loop uses.
        request_id, max_tokens, priority, tenant, slo, is_streamed: as `WorkloadRequest` has them.
    """

    arrival: Seconds
    output_len: Positive
    prompt_len: Length | None = None
    prompt_token_ids: list[Length] | None = None
    prompt_hashes: list[str] | None = None
    hash_block_size: Positive | None = None
    request_id: str | None = None
    max_tokens: Positive | None = None
    priority: int | None = None
    tenant: str | None = None
    e2e_latency: float | None = None
    slo: SLO | None = None
    is_streamed: bool | None = None

    def __post_init__(self) -> None:
        if (self.prompt_len is None) == (self.prompt_token_ids is None):
            raise ValueError("prompt_len or prompt_token_ids must be given, and not both")
        for name, partner in (("prompt_hashes", "prompt_len"), ("hash_block_size", "prompt_hashes")):
            if getattr(self, name) is not None and getattr(self, partner) is None:
                raise ValueError(f"{name} requires {partner}")

    def prompt(self, name: str, vocab_size: int) -> Sequence[int]:
        """The tokens, which differ between all prompts after the last full block of `prompt_hashes`."""
        if self.prompt_token_ids is not None:
            return self.prompt_token_ids
        prompt_len, size = self.prompt_len or 0, self.hash_block_size or HASH_BLOCK_SIZE
        hashes = self.prompt_hashes or []
        if hashes and len(hashes) != prompt_len // size:
            raise ValueError(
                f"prompt_hashes must have one item for each full block of {size} tokens: {prompt_len // size}, got "
                f"{len(hashes)}"
            )
        shared = b"".join(synthetic_tokens(f"block-{text}", size, vocab_size) for text in hashes)
        return shared + synthetic_tokens(f"request-{name}", prompt_len - len(shared), vocab_size)


def read_chairlift(path: Path, options: TraceOptions) -> Requests:
    """Read a file in Chairlift's format."""
    recorded: list[RecordedRequest] = []
    for index, (place, line) in enumerate(json_records(path, ChairliftLine)):
        name = line.request_id or f"chairlift-{index}"
        with named_errors(place):
            request = WorkloadRequest(
                name,
                line.arrival,
                line.prompt(name, options.vocab_size),
                line.output_len,
                line.max_tokens,
                line.priority or 0,
                line.tenant or "",
                slo=line.slo,
                is_streamed=line.is_streamed is not False,
            )
            if not options.closed_loop:
                yield request
            elif line.e2e_latency is None:
                raise ValueError("closed_loop requires e2e_latency, from which the gap after the request follows")
            else:
                recorded.append(RecordedRequest(request, line.prompt_hashes or (), line.arrival + line.e2e_latency))
    yield from follow_turns(recorded)


logger = logging.getLogger("chairlift")

FORMATS: Final[dict[str, Callable[[Path, TraceOptions], Requests]]] = {
    "azure": partial(read_lengths, "azure", AzureRow),
    "burstgpt": partial(read_lengths, "burstgpt", BurstGPTRow),
    "mooncake": read_mooncake,
    "sharegpt": read_sharegpt,
    "custom": read_custom,
    "chairlift": read_chairlift,
}

COLUMNS: Final = {
    "azure": {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    "burstgpt": {"Timestamp", "Request tokens", "Response tokens"},
}
KEYS: Final = {"mooncake": {"input_length"}, "custom": {"prompt"}, "chairlift": {"arrival", "output_len"}}
"""The columns, or the keys of the first line, by which a format is detected."""


def read_trace(path: Path | str, options: TraceOptions | None = None) -> list[WorkloadRequest]:
    """Returns the requests of a trace file, whose format is detected, by recorded arrival. The first one arrives at 0.

    Requests with equal times keep the order of the file. Requests that cannot be served are skipped, and their number
    is logged: they have no prompt or output tokens (logs write failed requests in this way) or, in sharegpt, lengths
    outside the limits of this module.

    Raises:
        ConfigError: the file cannot be read, its format is unknown or has no sessions for a closed loop, a field is
            wrong, or no request can be served.
    """
    path, options = Path(path), options or TraceOptions()
    name = detect_trace_format(path)
    if options.closed_loop and name != "chairlift":
        needed = "closed_loop requires hashes and latencies, as in a trace of --record-trace"
        raise ConfigError(f"{needed}, got {path} in the format {name}: leave closed_loop out")
    requests: list[WorkloadRequest] = []
    num_skipped = 0
    for request in FORMATS[name](path, options):
        if request is None:
            num_skipped += 1
        else:
            requests.append(request)
            if len(requests) == options.limit:
                break
    if not requests:
        raise ConfigError(f"{path}: no request can be served ({num_skipped} skipped) when read as {name}")
    try:
        check_ids(requests)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if num_skipped:
        logger.warning(
            "%s: skipped %d of %d requests without prompt or output or, in ShareGPT, with lengths outside the limits",
            path,
            num_skipped,
            num_skipped + len(requests),
        )
    start = min(request.arrival for request in requests if request.follows is None)
    times = [request.arrival - (start if request.follows is None else 0.0) for request in requests]
    shifted = [replace(each, arrival=round(time, 6)) for each, time in zip(requests, times, strict=True)]
    return shifted if options.closed_loop else sorted(shifted, key=lambda request: request.arrival)


def detect_trace_format(path: Path) -> str:
    """Returns the format of a trace file, detected from its beginning.

    Raises:
        ConfigError: the file cannot be read, or its format is unknown.
    """
    with open_text_file(path) as file:
        head = file.read(4096).lstrip()
        if head.startswith("["):
            return "sharegpt"
        line = (head + file.readline()).partition("\n")[0].strip()
    candidates = KEYS if line.startswith("{") else COLUMNS
    if candidates is KEYS:
        try:
            fields = set(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}: the first line is not a JSON object ({error})") from None
    else:
        fields = {column.strip() for column in line.split(",")}
    found = [name for name, needed in candidates.items() if needed <= fields]
    if not found:
        needed = "; ".join(f"{name}: {', '.join(sorted(names))}" for name, names in {**COLUMNS, **KEYS}.items())
        raise ConfigError(
            f"{path}: not a trace in a known format; it starts with {line!r:.120}. The first line needs the columns or "
            f"keys of one of these: {needed}; sharegpt is a JSON list"
        )
    return found[0]
