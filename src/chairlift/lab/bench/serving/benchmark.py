"""Latency, throughput and goodput of a server under load, over HTTP: ours, or any other OpenAI-compatible one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from chairlift.clock import MonotonicClock
from chairlift.errors import ConfigError
from chairlift.lab.bench.load import LoadOptions, Tokenize, at_least, first_requests, text_tokenizer
from chairlift.lab.bench.machine import HostFacts, host_facts
from chairlift.lab.bench.prompts import ChatPrompts, IdPrompts, Prompts, TextPrompts
from chairlift.lab.bench.serving.goodput import Objectives
from chairlift.lab.bench.serving.http_client import PATHS, ApiClient, Call, open_http, served_models
from chairlift.lab.bench.serving.load import send_load
from chairlift.lab.bench.serving.metrics import LATENCIES, ServeMetrics
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.lab.workload.traces.trace_loader import detect_trace_format
from chairlift.server.batch.progress import progress_bar

WARM_UP_ROUND, MEASURED_ROUND = 0, 1
PROBE_TOKENS = 8
UNTAKEN_PROMPT = ("http 400", "http 422")
"""How servers refuse a prompt of token ids."""

TEXT_FORMATS = ("sharegpt", "custom")
"""Traces whose lengths depend on a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(LoadOptions):
    """A server and the load for it. Decoding is greedy.

    Attributes:
        base_url: with or without /v1 at its end.
        endpoint_type: "openai" sends completions from token ids, or from text if the server refuses ids; "openai-chat"
            sends conversations.
        model: None asks the server.
        vocab_size: prompt tokens are below it.
        tokenizer: the model (see `EngineConfig.model`) whose tokenizer says how long the texts of a trace are.
        ignore_eos: forces the output lengths; an extension to OpenAI's API that vLLM has too. Without it a length is
            only the `max_tokens` of its request.
        num_warmups: requests before the load, not measured; one more always comes first, to see whether the server
            answers.
        goodput: as `Objectives.parse` reads them.
        percentile_metrics: latencies to report, names of LATENCIES; metric_percentiles: of each.
        timeout: seconds of silence after which a call has failed.

    Raises:
        ConfigError: naming the option, the value and the limit.
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint_type: str = "openai"
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
        LoadOptions.__post_init__(self)
        if self.endpoint_type not in PATHS:
            raise ConfigError(f"endpoint_type must be one of {', '.join(PATHS)}, got {self.endpoint_type!r}")
        at_least("vocab_size", self.vocab_size, 1)
        at_least("num_warmups", self.num_warmups, 0)
        if self.tokenizer is not None and self.trace is None:
            raise ConfigError(f"tokenizer={self.tokenizer} is for the texts of a trace: give a trace, or leave it out")
        if self.ignore_eos and self.max_tokens is not None:
            raise ConfigError(
                f"max_tokens={self.max_tokens} needs ignore_eos=False: with it an answer is as long as max_tokens allow"
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
    """What `run_serve` measured.

    Attributes:
        client: where the load came from, which need not be where the server runs.
        prompt_format: what the prompts were sent as: ids, text or messages.
        calls: all of them, in the order in which they were due; times since the start of the load.
    """

    client: HostFacts
    options: ServeOptions
    model: str
    prompt_format: str
    metrics: ServeMetrics
    calls: list[Call]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
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
        """The same, and every call."""
        return {**self.to_dict(), "requests": [_call_record(call) for call in self.calls]}


def run_serve(options: ServeOptions, api_key: str | None = None) -> ServeResult:
    """Load the server and see what it does. Calls that fail are counted, and stop nothing.

    Raises:
        ConfigError: the server cannot be reached or refuses the very first request; says what it said.
    """
    return asyncio.run(_run(options, api_key))


async def _run(options: ServeOptions, api_key: str | None) -> ServeResult:
    tokenize = _tokenize(options)
    warm_up = options.workload(options.vocab_size, WARM_UP_ROUND, tokenize)
    workload = options.workload(options.vocab_size, MEASURED_ROUND, tokenize)
    async with open_http(options.base_url, api_key, options.timeout) as http:
        session = _Session(options, http, options.model or await _only_model(http))
        prompt_format = await session.probe(warm_up[0])
        if options.num_warmups:
            early = [replace(item, arrival=0.0) for item in first_requests(warm_up, options.num_warmups)]
            await session.send(early, prompt_format)
        with progress_bar("requests", len(workload)) as advance:
            calls = await session.send(workload, prompt_format, advance)
    metrics = ServeMetrics.of(calls, Objectives.parse(options.goodput), options.metric_percentiles)
    return ServeResult(host_facts(), options, session.model, prompt_format, metrics, calls)


class _Session:
    """A server that is being loaded."""

    def __init__(self, options: ServeOptions, http: httpx.AsyncClient, model: str) -> None:
        self._options = options
        self._http = http
        self.model = model

    async def probe(self, request: WorkloadRequest) -> str:
        """Send one short request, and find the prompt format that the server takes.

        Raises:
            ConfigError: none; says what the server said.
        """
        output_len = min(request.output_len, PROBE_TOKENS)
        short = replace(request, arrival=0.0, output_len=output_len, max_tokens=None)
        formats = ("messages",) if self._options.endpoint_type == "openai-chat" else ("ids", "text")
        said = []
        for prompt_format in formats:
            (call,) = await self.send([short], prompt_format)
            if call.failure is None:
                return prompt_format
            said.append(f"{prompt_format}: {call.failure.kind}: {call.failure.message}")
            if call.failure.kind not in UNTAKEN_PROMPT:
                break
        way_out = (
            " If it does not know ignore_eos, leave that out: --no-ignore-eos." if self._options.ignore_eos else ""
        )
        raise ConfigError(
            f"base_url={self._options.base_url}: the first request, model {self.model!r}, got no answer. "
            f"With a prompt as {'; as '.join(said)}.{way_out}"
        )

    async def send(
        self, workload: Sequence[WorkloadRequest], prompt_format: str, on_end: Callable[[], None] = lambda: None
    ) -> list[Call]:
        feed = RequestFeed(workload, self._options.max_concurrency)
        prompts = _prompts(prompt_format, workload)
        clock = MonotonicClock()
        start = clock.now()
        api = ApiClient(self._http, PATHS[self._options.endpoint_type], lambda: clock.now() - start)
        return await send_load(api, feed, prompts, self._body, on_end)

    def _body(self, request: WorkloadRequest) -> dict[str, Any]:
        """All but the prompt. An extension is only sent where it is used."""
        options = self._options
        limit = "max_completion_tokens" if options.endpoint_type == "openai-chat" else "max_tokens"
        return {
            "model": self.model,
            limit: request.output_len if options.ignore_eos else request.max_output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if options.ignore_eos else {}),
            **({"priority": request.priority} if request.priority else {}),
        }


def _tokenize(options: ServeOptions) -> Tokenize | None:
    if options.tokenizer is None or options.trace is None:
        return None
    if (found := detect_trace_format(options.trace)) not in TEXT_FORMATS:
        raise ConfigError(
            f"tokenizer={options.tokenizer}: {options.trace} is a {found} trace, without texts: leave it out"
        )
    return text_tokenizer(options.tokenizer)


def _prompts(prompt_format: str, workload: Sequence[WorkloadRequest]) -> Prompts:
    if prompt_format == "messages":
        return ChatPrompts(workload)
    return IdPrompts() if prompt_format == "ids" else TextPrompts()


async def _only_model(http: httpx.AsyncClient) -> str:
    names = await served_models(http)
    if len(names) != 1:
        raise ConfigError(f"the server has {len(names)} models: name one as `model`. It has: {', '.join(names)}")
    return names[0]


def _call_record(call: Call) -> dict[str, Any]:
    """Times in seconds since the start of the load."""
    return {
        "request_id": call.request_id,
        "due": call.due,
        "sent": call.sent,
        "ended": call.ended,
        "ttft": call.ttft,
        "itls": call.itls,
        "requested_input_tokens": call.prompt_len,
        "requested_output_tokens": call.output_len,
        "output_tokens": call.num_output_tokens,
        "usage": call.usage and asdict(call.usage),
        "finish_reason": call.finish_reason,
        "failure": call.failure and asdict(call.failure),
    }
