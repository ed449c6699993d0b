"""Sessions of agents, and recorded sessions in a closed loop, as workloads of engines and of the simulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import build_engine
from chairlift.errors import ConfigError
from chairlift.events import EventList, RequestFinished
from chairlift.lab.bench.bench_options import CompareOptions
from chairlift.lab.bench.compare import run_compare
from chairlift.lab.bench.driver import drive
from chairlift.lab.bench.simulation import SimulationOptions, run_simulations
from chairlift.lab.bench.throughput import ThroughputOptions, run_throughput
from chairlift.lab.bench.workload_options import WorkloadOptions, format_arrivals, format_lengths
from chairlift.lab.workload.agent_sessions import AgentSessions
from chairlift.option_sources import read_options

TinyModel = Callable[..., Path]
SESSIONS = AgentSessions(3, 3, scale=1 / 400, turns=3)
SEED = 101
"""With it all gaps of these sessions are less than half a second together."""


def config(tiny_model_dir: TinyModel, **changes: Any) -> EngineConfig:
    limits: dict[str, Any] = {"num_kv_blocks": 200, "block_size": 4, "max_model_len": 256, "num_threads": 1}
    return EngineConfig(model=str(tiny_model_dir("llama")), **{**limits, **changes})


def test_sessions_run_within_the_limits_of_engines_and_simulations(tiny_model_dir: TinyModel) -> None:
    options = read_options(
        ThroughputOptions,
        {"agent-sessions": "3,0.0025,3", "max-concurrency": 2, "repeats": 1, "num-warmups": 2, "workload-seed": SEED},
        environment=False,
    )
    assert options.agent_sessions == SESSIONS
    assert (format_arrivals(options), format_lengths(options)) == (
        "as turns of sessions, at most 2 concurrent",
        "3 agent sessions of 3 turns, lengths times 0.0025, seed 101",
    )
    ((run,),) = run_throughput(config(tiny_model_dir), options).runs.values()
    load = WorkloadOptions(agent_sessions=SESSIONS, max_concurrency=2, seed=SEED)
    simulated = run_simulations(config(tiny_model_dir), load, SimulationOptions())[""]
    assert not simulated.result.rejected
    for values in (run, simulated.run.values()):
        assert values["peak_batch_size"] == 2
        assert values["cached_tokens"] > 0.4 * values["prompt_tokens"]
    counts = ("num_requests", "output_tokens")
    assert [run[name] for name in counts] == [simulated.run.values()[name] for name in counts]


def test_rounds_of_sessions_have_different_tokens() -> None:
    load = WorkloadOptions(agent_sessions=SESSIONS)
    first, second = (load.workload(256, token_round, max_model_len=256) for token_round in (0, 1))
    assert [replace(item, prompt_token_ids=[0]) for item in first] == [
        replace(item, prompt_token_ids=[0]) for item in second
    ]
    assert first[0].prompt_token_ids[:4] != second[0].prompt_token_ids[:4]


def test_policies_serve_the_same_sessions(tiny_model_dir: TinyModel) -> None:
    options = CompareOptions(agent_sessions=SESSIONS, seed=SEED, policies="paged,exact", repeats=1, num_warmups=0)  # type: ignore[arg-type]
    result, tokens = run_compare(config(tiny_model_dir), options)
    assert tokens.is_sound
    assert len(result.runs) == 2


def test_a_closed_loop_waits_for_the_turn_before_on_an_engine(tiny_model_dir: TinyModel, tmp_path: Path) -> None:
    """The turns were recorded on an engine that was so fast that all of them have times in 2 ms."""
    lines = [
        {"arrival": 0.001 * index, "prompt_len": 16 * (index + 1), "prompt_hashes": ["a", "b", "c"][: index + 1]}
        | {"output_len": 8, "e2e_latency": 0.0005, "request_id": str(index)}
        for index in range(3)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(each) + "\n" for each in lines))
    options = WorkloadOptions(trace=trace, closed_loop=True)
    assert format_arrivals(options) == "after the gaps of the trace"
    log = EventList()
    engine = build_engine(config(tiny_model_dir, skip_tokenizer_init=True), events=log)
    drive(engine, options.workload(256, 0))
    finished = {each.request_id: each for each in log.events if isinstance(each, RequestFinished)}
    for before, turn in (("0", "1"), ("1", "2")):
        gap = finished[turn].arrival_time - finished[before].time
        assert gap >= 0.0005 - 1e-9
        assert finished[turn].num_cached_tokens >= 16 * int(turn)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"agent_sessions": "3", "num_prompts": 3}, "num_prompts=3 cannot be combined with agent_sessions"),
        ({"agent_sessions": "3", "request_rate": 1.0}, r"request_rate=1.0 cannot be combined with agent_sessions"),
        ({"agent_sessions": "3,x"}, r"agent_sessions must be NUMBER\[,SCALE\[,TURNS\]\], .* got '3,x'"),
        ({"agent_sessions": "3,1,2,4"}, "agent_sessions must be NUMBER"),
        ({"agent_sessions": "0"}, "num_sessions must be at least 1, got 0"),
        ({"closed_loop": True}, "closed_loop requires trace"),
        ({"closed_loop": True, "trace": Path("t"), "request_rate": 2.0}, "request_rate=2.0 cannot be combined with"),
        ({"trace": Path("t"), "input_len": "fixed:3"}, "input_len=fixed:3 cannot be combined with trace, which determ"),
    ],
)
def test_options_without_an_effect_are_rejected(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        WorkloadOptions(**options)
