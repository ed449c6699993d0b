"""`chairlift top`: shows status, KV memory, unfinished requests and explanations of a running server in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import httpx
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chairlift.clock import format_duration
from chairlift.counts import counted
from chairlift.errors import ConfigError

TIMEOUT_SECONDS: Final = 5.0
OUTPUT_TOKENS: Final = "vllm:generation_tokens_total"

KINDS: Final = {
    "token_states": ("█", "green"),
    "reserved": ("▓", "yellow"),
    "internal": ("▒", "red"),
    "external": ("░", "magenta"),
    "free": ("·", "bright_black"),
}
"""Kind of KV slots -> character and colour."""

COLUMNS: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "request": lambda request: request["id"],
    "state": lambda request: request["state"],
    "waits for": lambda request: request["wait_reason"] or "",
    "prompt": lambda request: str(request["num_prompt_tokens"]),
    "cached": lambda request: str(request["num_cached_tokens"]),
    "output": lambda request: f"{request['num_output_tokens']}/{request['max_tokens']}",
    "blocks": lambda request: str(request["num_blocks"]),
    "preempted": lambda request: str(request["num_preemptions"]),
    "queue s": lambda request: "" if (time := request["timings"]["queue_time"]) is None else f"{time:.2f}",
    "age s": lambda request: f"{request['timings']['age']:.1f}",
}
"""Column -> its cell for a request."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The response bodies of /v1/engine and /v1/requests, and the number of output tokens since the server started."""

    engine: dict[str, Any]
    requests: list[dict[str, Any]]
    num_output_tokens: float = 0.0


def client_settings(url: str, api_key: str | None) -> dict[str, Any]:
    """The `base_url` and the `headers` of an httpx client for a URL with or without /v1. Raises ConfigError."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"url must begin with http:// or https://, got {url!r:.100}")
    headers = {} if api_key is None else {b"Authorization": f"Bearer {api_key}".encode()}
    try:
        return {"base_url": httpx.URL(base), "headers": headers}
    except httpx.InvalidURL as error:
        raise ConfigError(f"url is invalid ({error}), got {url!r:.100}") from None


def error_message(response: httpx.Response) -> str:
    """The message of a response whose status is an error, or its status if it has none."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {response.status_code}"


class SourceError(Exception):
    """The server could not be reached or returned an error."""


class HttpSource:
    """Reads snapshots from a server through its API.

    Args:
        url: the URL of the server, with or without /v1.

    Raises:
        ConfigError: the URL does not begin with http:// or https://, or is invalid.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._client = httpx.Client(**client_settings(url, api_key), timeout=TIMEOUT_SECONDS)

    def snapshot(self) -> Snapshot:
        engine = _json_object(self._get("/v1/engine"), "configuration")
        requests = _json_object(self._get("/v1/requests"), "data")["data"]
        return Snapshot(engine, requests, count_of(OUTPUT_TOKENS, self._get("/metrics").text))

    def explain(self, request_id: str) -> list[str]:
        """The explanation of a sequence or of all sequences of a call, with one line for each span of their waits."""
        call_id = request_id.rpartition("~")[0] or request_id
        response = self._get(f"/v1/requests/{call_id}/explain", accepted=(200, 404))
        sequences = () if response.status_code == 404 else _json_object(response, "sequences")["sequences"]
        found = [each for each in sequences if request_id in (each["id"], call_id)]
        lines = [line for each in found for line in (each["id"], *explained_lines(each))]
        return lines or [f"The server has no request {request_id}."]

    def close(self) -> None:
        self._client.close()

    def _get(self, path: str, accepted: tuple[int, ...] = (200,)) -> httpx.Response:
        try:
            response = self._client.get(path)
        except httpx.HTTPError as error:
            raise SourceError(f"{self._client.base_url}: {type(error).__name__} {error}".strip()) from None
        if response.status_code == 403:
            raise SourceError(f"{path} needs an admin key: set --api-key")
        if response.status_code not in accepted:
            raise SourceError(f"{path}: {error_message(response)}")
        return response


def _json_object(response: httpx.Response, field: str) -> dict[str, Any]:
    """The body of a response. Raises SourceError if it is not a JSON object with the field."""
    with suppress(ValueError):
        if isinstance(body := response.json(), dict) and field in body:
            return body
    path = response.url.path
    raise SourceError(f"{path}: the response is not JSON with {field!r}: is this a server of Chairlift?")


def count_of(name: str, metrics: str) -> float:
    """The value of a counter in the text format of Prometheus; 0 if it is missing."""
    values = (line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(map(float, values))


class CounterRate:
    """The increase per second of a counter between snapshots."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def update(self, now: float, value: float) -> float | None:
        """Add a snapshot; returns the rate since the last one. None before the second one, and after a restart of the
        server, whose counters begin at 0."""
        last, self._last = self._last, (now, value)
        if last is None or now <= last[0] or value < last[1]:
            return None
        return (value - last[1]) / (now - last[0])


def explained_lines(sequence: dict[str, Any]) -> list[str]:
    """The lines that show an explanation."""
    lines = [
        f"{span['end'] - span['start']:8.3f} s  {span['num_steps']:5d} steps  {span['reason']}: {span['text']}"
        for wait in sequence["waits"]
        for span in wait["spans"]
    ]
    if (slo := sequence.get("slo")) is not None:  # earlier versions of the server have none
        lines.append(f"SLO: {slo['text']}")
    if sequence["position"] is not None:
        expected = sequence["expected_wait"]
        wait = "unknown" if expected is None else format_duration(expected)
        lines.append(f"requests ahead: {sequence['position']}; estimated wait: {wait}")
    return lines + [change["text"] for change in sequence["would_admit"]]


class TopView:
    """Reads snapshots of a server, and draws each of them.

    Args:
        request_id: the request whose wait is explained; None is the head of the queue while it is blocked.
    """

    def __init__(self, source: HttpSource, request_id: str | None = None) -> None:
        self._source = source
        self._request_id = request_id
        self._step_rate, self._token_rate = CounterRate(), CounterRate()

    def read(self, width: int) -> RenderableType:
        """Read one snapshot, and draw it `width` characters wide. An error of the server is drawn in its place."""
        try:
            snapshot = self._source.snapshot()
            explained = self._request_id or _blocked_head(snapshot.engine)
            lines = [] if explained is None else ["", *self._source.explain(explained)]
        except SourceError as error:
            return Text(str(error), "bold")
        engine, now = snapshot.engine, time.monotonic()
        tokens_per_s = self._token_rate.update(now, snapshot.num_output_tokens)
        steps_per_s = None if engine["batch"] is None else self._step_rate.update(now, engine["batch"]["step"])
        return Group(
            Text(status_line(engine, steps_per_s, tokens_per_s), "bold"),
            memory_bar(engine, width),
            *map(Text, lines),
            requests_table(snapshot.requests),
        )


def run_top(view: TopView, interval: float) -> None:
    """Show a snapshot every `interval` seconds, on the whole terminal, until Ctrl-C."""
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(view.read(live.console.width), refresh=True)
            time.sleep(interval)


def requests_table(requests: list[dict[str, Any]]) -> Table:
    """A table with a row for each request; the terminal cuts off those that have no place."""
    table = Table(*COLUMNS, box=None)
    for request in requests:
        table.add_row(*(Text(cell(request)) for cell in COLUMNS.values()))
    return table


def _blocked_head(engine: dict[str, Any]) -> str | None:
    batch = engine["batch"]
    is_blocked = batch is not None and batch["wait_reason"] is not None and not _is_idle(engine)
    return batch["head"] if is_blocked else None


def status_line(engine: dict[str, Any], steps_per_s: float | None, tokens_per_s: float | None) -> str:
    """One line with the state of the engine and its batch."""
    configuration, status, batch = engine["configuration"], engine["status"], engine["batch"]
    restarts = f", {status['restarts']} restarts" if status["restarts"] else ""
    parts = [
        f"{configuration.get('model', '?')}: {status['state']}{restarts}",
        f"{configuration.get('batching', '?')}/{configuration.get('kv', '?')}",
    ]
    if batch is not None and _is_idle(engine):
        parts.append(f"idle after step {batch['step']}")
    elif batch is not None:
        parts.append(f"{batch['num_running']} running, {batch['num_waiting']} waiting")
        parts.append(f"step {batch['step']} of {counted(batch['num_tokens'], 'token')}")
        if batch["wait_reason"] is not None:
            parts.append(f"{batch['head']} waits for {batch['wait_reason']}")
    if steps_per_s is not None:
        parts.append(f"{steps_per_s:.1f} steps/s")
    if tokens_per_s is not None:
        parts.append(f"{tokens_per_s:.1f} output tokens/s")
    return "   ".join(parts)


def _is_idle(engine: dict[str, Any]) -> bool:
    """Whether the engine has no unfinished requests, so that pool and batch are empty since the last step."""
    return bool(engine["status"]["num_unfinished"] == 0)


def memory_bar(engine: dict[str, Any], width: int) -> Text:
    """The slots of the pool by kind, as a bar of `width` characters and a legend."""
    pool = engine["pool"]
    if pool is None:
        return Text("no step yet")
    slots: dict[str, int] = pool["slots"]
    total = sum(slots.values())
    if _is_idle(engine):
        slots = {**dict.fromkeys(KINDS, 0), "free": total}
    text = Text()
    for kind, count in shares(slots, width).items():
        sign, colour = KINDS[kind]
        text.append(sign * count, colour)
    text.append("\n")
    for kind, (sign, colour) in KINDS.items():
        text.append(f"{sign} ", colour)
        text.append(f"{kind} {slots[kind]} ({slots[kind] / total:.0%})  ")
    return text


def shares(slots: dict[str, int], width: int) -> dict[str, int]:
    """The number of characters for each kind, `width` in total."""
    ends = [round(end * width / sum(slots.values())) for end in accumulate(slots[kind] for kind in KINDS)]
    return {kind: end - start for kind, start, end in zip(KINDS, [0, *ends], ends, strict=False)}
