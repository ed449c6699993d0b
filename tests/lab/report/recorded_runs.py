"""Random runs of the engine, with the blocks and slots of each request after each schedule as the expected result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from chairlift.config import KV_ARENAS
from chairlift.core.kv.block_tables import held_blocks
from chairlift.core.kv.kv_groups import FULL
from chairlift.errors import RequestError
from chairlift.events import EngineStarted, Event, Step
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from support.fakes import PartlyRightProposals, expected_tokens, make_engine, make_request


@dataclass(slots=True)
class Holder:
    """A request with memory: its tables, its computed tokens, and whether only its static batch keeps it."""

    tables: list[list[int]]
    num_written: int
    has_ended: bool

    @property
    def block_ids(self) -> list[int]:
        return held_blocks(self.tables)


@dataclass(slots=True)
class GeneratedRun:
    """The events of a run; for each step, by request, the holders after its schedule; and slots ever written."""

    events: list[Event]
    holders: list[dict[str, Holder]] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)


class Recorder:
    """Replaces the `submit` method of the executor, which is called after each schedule."""

    def __init__(self, core: Any, manager: Any, executor: Any, events: list[Event], tick: float) -> None:
        self.run = GeneratedRun(events)
        self._core, self._manager, self._tick = core, manager, tick
        self._submit = executor.submit
        executor.submit = self.submit

    def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
        holders = {}
        for request in self._core.scheduler._batch.running:
            written = request.num_computed_tokens
            tables = [list(table) for table in self._manager.block_tables(request)]
            holders[request.request_id] = Holder(tables, written, request.finish_reason is not None)
            self.run.written[request.request_id] = max(written, self.run.written.get(request.request_id, 0))
        self.run.holders.append(holders)
        result: ModelRunnerOutput = self._submit(output)
        for request_id in output.draft_token_ids:
            accepted = len(result.token_ids[request_id]) - 1
            self.run.written[request_id] = max(holders[request_id].num_written + accepted, self.run.written[request_id])
        self._core._clock.advance(self._tick)
        return result


def engine_started(**changes: Any) -> EngineStarted:
    """The first event of a small run."""
    values: dict[str, Any] = {
        "time": 0.0,
        "model": "tiny",
        "block_size": 4,
        "num_blocks": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "scheduling_policy": "fcfs",
        "kv": "paged",
        "enable_prefix_caching": False,
        "weight_bytes": 1000,
    }
    return EngineStarted(**{**values, **changes})


@st.composite
def recorded_runs(draw: st.DrawFn, *, forced: bool = False) -> GeneratedRun:
    """A run to its end.

    Args:
        forced: every request gets exactly `max_tokens` and none is aborted.
    """
    kv = draw(st.sampled_from(["paged", "paged", "exact", "max", "pow2", "oracle"]))
    batching = draw(st.sampled_from(["continuous", "static"]))
    steps_ahead = draw(st.integers(0, 2))
    block_size, num_blocks = draw(st.sampled_from([1, 2, 4])), draw(st.integers(6, 20))
    windows = draw(st.sampled_from([FULL, FULL, (3,), (None, 4, 4)])) if kv == "paged" else FULL
    num_blocks *= len(windows)
    limits: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": draw(st.integers(4, 12)),
        "max_model_len": max(2, block_size * num_blocks // 4) if kv == "max" else 64,
    }
    arena = draw(st.sampled_from(KV_ARENAS))
    core, manager, executor, log = make_engine(
        **limits,
        kv=kv,
        arena=arena,
        batching=batching,
        enable_prefix_caching=draw(st.booleans()),
        steps_ahead=steps_ahead,
        windows=windows,
        propose=draw(st.sampled_from([None, PartlyRightProposals(4, 0.7)])),
    )
    static_batch_size = min(4, limits["max_num_seqs"]) if batching == "static" else None
    log.events.append(
        engine_started(
            **limits,
            kv=kv,
            batching=batching,
            static_batch_size=static_batch_size,
            kv_arena=None if kv == "paged" else arena,
            kv_windows=list(windows),
        )
    )
    # Without a moving clock it is unknown which ends preceded the schedule of a step.
    recorder = Recorder(core, manager, executor, log.events, 1.0 if steps_ahead else draw(st.sampled_from([0.0, 1.0])))
    for name in range(draw(st.integers(1, 8))):
        _add(draw, core, f"r{name}", must_be_forced=forced or kv in ("pow2", "oracle"), exactly=forced)
        for _ in range(draw(st.integers(0, 4))):
            core.step()
        if not forced and (unfinished := list(core.scheduler.unfinished)) and draw(st.integers(0, 5)) == 0:
            core.abort(draw(st.sampled_from(unfinished)))
    while core.has_work:
        core.step()
    return recorder.run


def _add(draw: st.DrawFn, core: Any, name: str, *, must_be_forced: bool, exactly: bool) -> None:
    prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
    max_tokens = draw(st.integers(1, 10))
    output_len = draw(st.integers(1, max_tokens)) if must_be_forced or draw(st.booleans()) else None
    if exactly:
        output_len = max_tokens
    stops = [] if output_len else expected_tokens(prompt, 10)[draw(st.integers(0, 9)) :][:1]
    try:
        core.add(make_request(name, prompt, max_tokens, stop_token_ids=stops, output_len=output_len))
    except RequestError:
        assert name not in core.scheduler.unfinished


def started_of(run: GeneratedRun) -> EngineStarted:
    first = run.events[0]
    assert isinstance(first, EngineStarted)
    return first


def steps_of(run: GeneratedRun) -> list[Step]:
    steps = [event for event in run.events if isinstance(event, Step)]
    assume(steps)
    return steps
