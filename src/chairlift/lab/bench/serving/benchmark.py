"""`chairlift bench serve`: latency, throughput and goodput of an OpenAI-compatible server under a workload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from chairlift.clock import MonotonicClock
from chairlift.engine.progress import progress_bar
from chairlift.errors import ConfigError
from chairlift.lab.bench.machine import HostFacts, host_facts
from chairlift.lab.bench.serving.http_client import PATHS, ApiClient, RequestRecord, open_client, served_models
from chairlift.lab.bench.serving.metrics import LATENCIES, Objectives, ServeMetrics
from chairlift.lab.bench.serving.prompts import ChatPrompts, CompletionPrompts, PromptFormat, prompt_text
from chairlift.lab.bench.workload_options import (
    Tokenize,
    WorkloadOptions,
    check_minimums,
    first_requests,
    text_tokenizer,
)
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.lab.workload.traces.trace_loader import detect_trace_format

WARM_UP_ROUND, MEASURED_ROUND = 0, 1
PROBE_TOKENS = 8
"""Maximum number of output tokens of the first request."""

PROMPT_REJECTED = ("http 400", "http 422")
"""The failures of servers that do not accept token ids as a prompt."""

TEXT_FORMATS = ("sharegpt", "custom")
"""Trace formats whose lengths depend on a tokenizer."""

TOKEN_IDS, TEXT, MESSAGES = "ids", "text", "messages"
"""Prompt formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(WorkloadOptions):
    """The workload and the server that it is sent to. Decoding is greedy.

    `chairlift bench serve --help` describes the fields that are not listed here.

    Attributes:
        base_url: URL of the server, with or without /v1.
        backend: "openai" sends completions with token ids, or with text if the server rejects them; "openai-chat" sends
            conversations.
        tokenizer: model (see `EngineConfig.model`) whose tokenizer measures the texts of a trace.
        ignore_eos: forces the output lengths, with an extension of OpenAI's API that vLLM has too. Otherwise a length
            is the `max_tokens` of its request.
        num_warmups: number of unmeasured requests before the workload, after a first one that tests the server.
        goodput: objectives (see `Objectives.parse`).
        percentile_metrics: latencies to report, names of LATENCIES.

    Raises:
        ConfigError: a value is out of range. The message names the option, the value and the limit.
    """

    base_url: str = "http://127.0.0.1:8000"
    backend: str = "openai"
    model: str | None = None
    vocab_size: int = 32000
    tokenizer: str | None = None
    ignore_eos: bool = True
    num_warmups: int = 0
    goodput: tuple[str, ...] = ()
    percentile_metrics: tuple[str, ...] = tuple(LATENCIES)
    metric_percentiles: tuple[float, ...] = (90.0, 99.0)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        WorkloadOptions.__post_init__(self)
        if self.backend not in PATHS:
            raise ConfigError(f"backend must be one of {', '.join(PATHS)}, got {self.backend!r}")
        check_minimums(self, vocab_size=1, num_warmups=0)
        if self.tokenizer is not None and self.trace is None:
            raise ConfigError(f"tokenizer={self.tokenizer} needs a trace: give trace, or leave it out")
        if self.ignore_eos and self.max_tokens is not None:
            raise ConfigError(
                f"max_tokens={self.max_tokens} needs ignore_eos=False: ignore_eos makes every answer max_tokens long"
            )
        if unknown := set(self.percentile_metrics) - set(LATENCIES):
            raise ConfigError(f"percentile_metrics must be among {', '.join(LATENCIES)}, got {', '.join(unknown)}")
        for percent in self.metric_percentiles:
            if not 0 <= percent <= 100:
                raise ConfigError(f"metric_percentiles must be in 0..100, got {percent:g}")
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, got {self.timeout:g}")
        Objectives.parse(self.goodput)


@dataclass(frozen=True, slots=True)
class ServeResult:
    """The metrics and the records of a workload.

    Attributes:
        client: the machine that sent the requests, which may be another one than that of the server.
        prompt_format: TOKEN_IDS, TEXT or MESSAGES.
        records: one for each request, in the order in which they were due. Times are since the start of the workload.
    """

    client: HostFacts
    options: ServeOptions
    model: str
    prompt_format: str
    metrics: ServeMetrics
    records: list[RequestRecord]

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {
            "benchmark": "serve",
            "client": self.client.to_dict(),
            "httpx": httpx.__version__,
            "model_id": self.model,
            "prompt_format": self.prompt_format,
            "workload": asdict(self.options),
            "results": self.metrics.to_dict(self.options.percentile_metrics),
        }

    def to_detailed_dict(self) -> dict[str, Any]:
        """The result for JSON with the record of every request."""
        return {**self.to_dict(), "requests": [_record_to_dict(record) for record in self.records]}


def run_serve(options: ServeOptions, api_key: str | None = None) -> ServeResult:
    """Send the workload to the server. Failed requests are counted.

    Raises:
        ConfigError: the server cannot be reached or rejects the first request. The message has its answer.
    """
    return asyncio.run(_run(options, api_key))


async def _run(options: ServeOptions, api_key: str | None) -> ServeResult:
    tokenize = _tokenize(options)
    warm_up = options.workload(options.vocab_size, WARM_UP_ROUND, tokenize)
    workload = options.workload(options.vocab_size, MEASURED_ROUND, tokenize)
    async with open_client(options.base_url, api_key, options.timeout) as http:
        sender = _WorkloadSender(options, http, options.model or await _only_model(http))
        prompt_format = await sender.find_prompt_format(warm_up[0])
        if options.num_warmups:
            early = [replace(item, arrival=0.0) for item in first_requests(warm_up, options.num_warmups)]
            await sender.send(early, prompt_format)
        with progress_bar("requests", len(workload)) as advance:
            records = await sender.send(workload, prompt_format, advance)
    metrics = ServeMetrics.from_records(records, Objectives.parse(options.goodput), options.metric_percentiles)
    return ServeResult(host_facts(), options, sender.model, prompt_format, metrics, records)


class _WorkloadSender:
    """Sends workloads to one server."""

    def __init__(self, options: ServeOptions, http: httpx.AsyncClient, model: str) -> None:
        self._options = options
        self._http = http
        self.model = model

    async def find_prompt_format(self, request: WorkloadRequest) -> str:
        """Send one short request in each format until the server accepts one, and return that format.

        Raises:
            ConfigError: the server accepts none. The message has its answers.
        """
        output_len = min(request.output_len, PROBE_TOKENS)
        short = replace(request, arrival=0.0, output_len=output_len, max_tokens=None)
        answers = []
        for prompt_format in (MESSAGES,) if self._options.backend == "openai-chat" else (TOKEN_IDS, TEXT):
            (record,) = await self.send([short], prompt_format)
            if record.failure is None:
                return prompt_format
            answers.append(f"{prompt_format}: {record.failure.kind}: {record.failure.message}")
            if record.failure.kind not in PROMPT_REJECTED:
                break
        hint = " If the server does not support ignore_eos, use --no-ignore-eos." if self._options.ignore_eos else ""
        raise ConfigError(
            f"base_url={self._options.base_url}: the first request, for model {self.model!r}, failed. "
            f"With a prompt as {'; as '.join(answers)}.{hint}"
        )

    async def send(
        self, workload: Sequence[WorkloadRequest], prompt_format: str, on_end: Callable[[], None] = lambda: None
    ) -> list[RequestRecord]:
        """Send each request when it is due, and return the records in that order.

        Args:
            on_end: called after each request.
        """
        feed = RequestFeed(workload, self._options.max_concurrency)
        prompts = _make_prompts(prompt_format, workload)
        clock = MonotonicClock()
        start = clock.now()
        api = ApiClient(self._http, PATHS[self._options.backend], lambda: clock.now() - start)
        records: list[RequestRecord] = []
        ended = asyncio.Event()

        async def send_request(request: WorkloadRequest, record: RequestRecord) -> None:
            await api.stream(self._body(request) | prompts.fields(request), record)
            prompts.record_answer(request.request_id, record.text)
            # The API returns no token ids: placeholders extend the history.
            answer = [request.prompt_token_ids[0]] * record.num_output_tokens
            feed.finish(request.request_id, answer, api.now())
            ended.set()
            on_end()

        async with asyncio.TaskGroup() as group:
            while not feed.is_exhausted:
                for request in feed.pop_due(api.now()):
                    num_prompt = len(request.prompt_token_ids)
                    record = RequestRecord(request.request_id, num_prompt, request.output_len, due=request.arrival)
                    records.append(record)
                    group.create_task(send_request(request, record))
                await _wait(ended, feed.next_time(), api)
        return records

    def _body(self, request: WorkloadRequest) -> dict[str, Any]:
        """The body without the prompt. Extensions are sent only if they are used."""
        options = self._options
        limit = "max_completion_tokens" if options.backend == "openai-chat" else "max_tokens"
        return {
            "model": self.model,
            limit: request.output_len if options.ignore_eos else request.max_output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if options.ignore_eos else {}),
            **({"priority": request.priority} if request.priority else {}),
        }


async def _wait(event: asyncio.Event, time: float | None, api: ApiClient) -> None:
    """Wait for the event or until a time on the clock of the client."""
    with suppress(TimeoutError):
        async with asyncio.timeout(None if time is None else max(0.0, time - api.now())):
            await event.wait()
    event.clear()


def _tokenize(options: ServeOptions) -> Tokenize | None:
    if options.tokenizer is None or options.trace is None:
        return None
    if (found := detect_trace_format(options.trace)) not in TEXT_FORMATS:
        raise ConfigError(
            f"tokenizer={options.tokenizer}: {options.trace} is a {found} trace, which has no texts: leave it out"
        )
    return text_tokenizer(options.tokenizer)


def _make_prompts(prompt_format: str, workload: Sequence[WorkloadRequest]) -> PromptFormat:
    if prompt_format == MESSAGES:
        return ChatPrompts(workload)
    return CompletionPrompts(list if prompt_format == TOKEN_IDS else prompt_text)


async def _only_model(http: httpx.AsyncClient) -> str:
    names = await served_models(http)
    if len(names) != 1:
        raise ConfigError(f"the server has {len(names)} models ({', '.join(names)}): choose one with --model")
    return names[0]


def _record_to_dict(record: RequestRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "due": record.due,
        "sent": record.sent,
        "ended": record.ended,
        "ttft": record.ttft,
        "itls": record.itls,
        "requested_input_tokens": record.input_len,
        "requested_output_tokens": record.output_len,
        "output_tokens": record.num_output_tokens,
        "usage": record.usage and asdict(record.usage),
        "finish_reason": record.finish_reason,
        "failure": record.failure and asdict(record.failure),
    }
