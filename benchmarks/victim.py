"""A stream and a caller of /health in a process of their own, whose delays show what other calls cost them."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

import httpx

REPORT_SECONDS: Final = 60.0
"""Seconds until a stream or /health that makes no progress is reported as it is."""

CALL_SECONDS: Final = 300.0
HEALTH_PAUSE_SECONDS: Final = 0.01
RETRY_SECONDS: Final = 0.2
"""Pause after a stream that has failed or was rejected."""

NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Without it each client reads all certificates of the machine."""


@dataclass(slots=True)
class VictimReport:
    """The delays since a victim was reset, in seconds.

    Attributes:
        gaps: between two tokens of a stream, also from the last token of a stream to its failure.
        health: of each call of /health.
        failures: why streams have ended without their last token.
        open_gap, open_health: how long the present gap and the present call of /health last already.
    """

    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    open_gap: float = 0.0
    open_health: float = 0.0

    @property
    def largest_gap(self) -> float:
        return max([*self.gaps, self.open_gap])

    @property
    def largest_health(self) -> float:
        return max([*self.health, self.open_health])


class Victim:
    """The stream and the caller of /health. It runs in a process of its own: the measuring process makes large bodies,
    which would delay the threads that read the stream.

    Args:
        secret: an API key; None for a server without keys.
        stream_tokens: the length of a stream. The next one follows at once.
    """

    def __init__(self, url: str, secret: str | None, stream_tokens: int) -> None:
        self._url = url
        self._headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        self._stream_tokens = stream_tokens
        self._report = VictimReport()
        self._last_token: float | None = None
        self._health_since: float | None = None

    def run(self, requests: Connection) -> None:
        """Answer requests of the measuring process: "reset", or "report" with a report."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The measuring process ends this one.
        for target in (self._stream_forever, self._watch_health):
            threading.Thread(target=target, daemon=True).start()
        while True:
            if requests.recv() == "reset":
                self._report = VictimReport()
            else:
                requests.send(self._with_open_delays())

    def _with_open_delays(self) -> VictimReport:
        report, now, last, since = self._report, time.perf_counter(), self._last_token, self._health_since
        return VictimReport(
            list(report.gaps),
            list(report.health),
            list(report.failures),
            0.0 if last is None else now - last,
            0.0 if since is None else now - since,
        )

    def _stream_forever(self) -> None:
        while True:
            try:
                failure = self._stream()
            except httpx.HTTPError as error:
                failure = repr(error)
            if failure is not None:
                self._report.failures.append(failure)
                if self._last_token is not None:
                    self._report.gaps.append(time.perf_counter() - self._last_token)
                time.sleep(RETRY_SECONDS)
            self._last_token = None

    def _stream(self) -> str | None:
        """Read one stream, and return why it has failed."""
        body = {"prompt": "Once upon a time", "max_tokens": self._stream_tokens, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(headers=self._headers, timeout=CALL_SECONDS, verify=NO_TLS) as client,
            client.stream("POST", f"{self._url}/v1/completions", json=body) as response,
        ):
            if response.status_code != 200:
                return f"status {response.status_code}"
            for line in response.iter_lines():
                if line.startswith('data: {"error"'):
                    return line
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if self._last_token is not None:
                        self._report.gaps.append(now - self._last_token)
                    self._last_token = now
        return None

    def _watch_health(self) -> None:
        with httpx.Client(verify=NO_TLS, timeout=CALL_SECONDS) as client:
            while True:
                started = self._health_since = time.perf_counter()
                with contextlib.suppress(httpx.HTTPError):
                    client.get(f"{self._url}/health")
                self._report.health.append(time.perf_counter() - started)
                self._health_since = None
                time.sleep(HEALTH_PAUSE_SECONDS)


class VictimProcess:
    """The connection to a victim."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def reset(self) -> None:
        self._connection.send("reset")

    def report(self) -> VictimReport:
        """The delays since the reset."""
        self._connection.send("report")
        report: VictimReport = self._connection.recv()
        return report

    def report_after(self, num_gaps: int, num_health: int = 1, seconds: float = REPORT_SECONDS) -> VictimReport:
        """The report once it has this number of gaps and calls of /health more than now, or after some seconds."""
        now, deadline = self.report(), time.monotonic() + seconds
        report = now
        while len(report.gaps) < len(now.gaps) + num_gaps or len(report.health) < len(now.health) + num_health:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
            report = self.report()
        return report


@contextlib.contextmanager
def victim_beside(url: str, secret: str | None = None, stream_tokens: int = 2000) -> Iterator[VictimProcess]:
    """Run a victim for the duration of a block.

    Args:
        stream_tokens: the gaps of a longer context are longer by themselves.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=Victim(url, secret, stream_tokens).run, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield VictimProcess(ours)
    finally:
        process.kill()
        process.join()
