"""Runs Chairlift's engine in this process."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from benchmarks.peers.engine_options import parse_engine_options
from benchmarks.peers.records import (
    EngineRun,
    PeerRequest,
    RequestTiming,
    RequestTimings,
    peak_rss_bytes,
    run_job,
    worker_arguments,
)

from chairlift import __version__
from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.events import EngineStarted, Event, EventList
from chairlift.lab.bench.driver import drive_all_at_once
from chairlift.lab.metrics.requests import RequestMetrics, RequestTally
from chairlift.lab.workload.request import WorkloadRequest


def engine_config(flags: list[str], has_prefix_cache: bool = False) -> EngineConfig:
    """The configuration of the command line without tokenizer."""
    config = parse_engine_options(flags)
    return replace(config, enable_prefix_caching=has_prefix_cache, skip_tokenizer_init=True)


def drive(engine: Engine, log: EventList, requests: list[PeerRequest]) -> RequestTimings:
    """Run the requests as one burst; the times are those of the events."""
    del log.events[1:]
    drive_all_at_once(engine, [WorkloadRequest(r.request_id, 0.0, r.prompt_token_ids, r.output_len) for r in requests])
    return request_timings(log.events)


def request_timings(events: list[Event]) -> RequestTimings:
    timings: RequestTimings = {}

    def add(_: int, metrics: RequestMetrics) -> None:
        timings[metrics.request_id] = RequestTiming(metrics.arrival, metrics.token_times, metrics.is_streamed)

    tally = RequestTally(add)
    for event in events:
        tally.emit(event)
    return timings


def main() -> None:
    job, out = worker_arguments()
    log = EventList()
    engine = build_engine(engine_config(job.options["flags"], job.options["has_prefix_cache"]), events=log)
    started = log.events[0]
    assert isinstance(started, EngineStarted)
    try:
        timings = run_job(job, lambda requests: drive(engine, log, requests))
    finally:
        engine.close()
    facts = {"chairlift": __version__, "torch": torch.__version__}
    EngineRun(*timings, peak_rss_bytes(), {**facts, **asdict(started)}).write(out)


if __name__ == "__main__":
    main()
