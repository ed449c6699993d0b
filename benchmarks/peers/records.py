"""The records that the comparison and the process of an engine exchange. Standard library only."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

PROMPT: Final = "prompt"
BURST: Final = "burst"
SINGLE: Final = "single"
WORKLOADS: Final = (PROMPT, BURST, SINGLE)


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """One greedy request whose answer has exactly `output_len` tokens."""

    request_id: str
    prompt_token_ids: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Job:
    """The requests of one run, and the options of the engine.

    Attributes:
        options: options of the engine, which its worker reads.
        warm_up: requests of a burst that is not measured.
        prompt: requests with one output token, which are sent one after the other.
        burst: requests that are sent at once.
        single: requests that are sent one after the other.
    """

    options: dict[str, Any]
    warm_up: list[PeerRequest]
    prompt: list[PeerRequest]
    burst: list[PeerRequest]
    single: list[PeerRequest]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        record = json.loads(path.read_text(encoding="utf-8"))
        phases = {name: [PeerRequest(**item) for item in record[name]] for name in ("warm_up", *WORKLOADS)}
        return cls(record["options"], **phases)


@dataclass(slots=True)
class RequestTiming:
    """The times of one request in seconds, on one clock.

    Attributes:
        sent: time at which the engine received the request.
        token_times: time at which each output token left the engine.
        is_streamed: False if all tokens left the engine at the end.
    """

    sent: float
    token_times: list[float] = field(default_factory=list)
    is_streamed: bool = True


RequestTimings = dict[str, RequestTiming]
Drive = Callable[[list[PeerRequest]], RequestTimings]


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The result of one job on one engine.

    Attributes:
        prompt, burst, single: the times of each request by its id.
        peak_rss_bytes: maximum memory of the processes of the engine, including loading.
        engine: versions and settings that the engine reports.
    """

    prompt: RequestTimings
    burst: RequestTimings
    single: RequestTimings
    peak_rss_bytes: int
    engine: dict[str, Any]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> EngineRun:
        record = json.loads(path.read_text(encoding="utf-8"))
        phases = {name: {key: RequestTiming(**item) for key, item in record[name].items()} for name in WORKLOADS}
        return cls(**phases, peak_rss_bytes=record["peak_rss_bytes"], engine=record["engine"])


def clock() -> float:
    return time.perf_counter()


def peak_rss_bytes(*, with_children: bool = False) -> int:
    """The maximum memory of this process in bytes; with_children adds that of its largest finished child."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if with_children:
        peak += resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak * unit


def run_job(job: Job, drive: Drive) -> tuple[RequestTimings, RequestTimings, RequestTimings]:
    """Run the warm-up, each prompt, the burst, and each single request; returns (prompt, burst, single)."""
    drive(job.warm_up)
    prompt = _drive_each(job.prompt, drive)
    burst = drive(job.burst) if job.burst else {}
    return prompt, burst, _drive_each(job.single, drive)


def _drive_each(requests: list[PeerRequest], drive: Drive) -> RequestTimings:
    timings: RequestTimings = {}
    for request in requests:
        timings |= drive([request])
    return timings


def worker_arguments() -> tuple[Job, Path]:
    """Parse the command line of a worker: the job, and the path for its run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    return Job.read(arguments.job), arguments.out
