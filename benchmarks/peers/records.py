"""What crosses between the comparing process and the process of one engine. Standard library only."""

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

BURST: Final = "burst"
SINGLE: Final = "single"
WORKLOADS: Final = (BURST, SINGLE)


@dataclass(frozen=True, slots=True)
class Request:
    """One greedy request whose answer has exactly `output_len` tokens."""

    request_id: str
    prompt_token_ids: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine is asked to do.

    Attributes:
        options: of the engine, as its worker reads them.
        warm_up: a burst that is not measured.
        burst: sent at once; empty: left out.
        single: sent one after another, each alone.
    """

    options: dict[str, Any]
    warm_up: list[Request]
    burst: list[Request]
    single: list[Request]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        record = json.loads(path.read_text(encoding="utf-8"))
        phases = {name: [Request(**item) for item in record[name]] for name in ("warm_up", "burst", "single")}
        return cls(record["options"], **phases)


@dataclass(slots=True)
class Timing:
    """One request as it went; seconds on one clock.

    Attributes:
        sent: when the engine got it.
        token_times: when each output token was known outside the engine.
        is_streamed: False: the tokens came all at once, at the end.
    """

    sent: float
    token_times: list[float] = field(default_factory=list)
    is_streamed: bool = True


Timings = dict[str, Timing]
Drive = Callable[[list[Request]], Timings]


@dataclass(frozen=True, slots=True)
class Run:
    """One engine through one job.

    Attributes:
        burst, single: request id -> how it went.
        peak_rss_bytes: of the engine's process or processes, loading included.
        engine: versions and settings that the engine itself reports.
    """

    burst: Timings
    single: Timings
    peak_rss_bytes: int
    engine: dict[str, Any]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Run:
        record = json.loads(path.read_text(encoding="utf-8"))
        phases = {name: {key: Timing(**item) for key, item in record[name].items()} for name in WORKLOADS}
        return cls(**phases, peak_rss_bytes=record["peak_rss_bytes"], engine=record["engine"])


def clock() -> float:
    return time.perf_counter()


def peak_rss_bytes(*, with_children: bool = False) -> int:
    """The most memory that this process has held, and the largest of its finished children."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if with_children:
        peak += resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak * unit


def run_job(job: Job, drive: Drive) -> tuple[Timings, Timings]:
    """Warm up, then the burst, then the single requests, each by a call of its own; (burst, single)."""
    drive(job.warm_up)
    burst = drive(job.burst) if job.burst else {}
    single: Timings = {}
    for request in job.single:
        single |= drive([request])
    return burst, single


def worker_arguments() -> tuple[Job, Path]:
    """The job that the command line names, and where its run goes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    return Job.read(arguments.job), arguments.out
