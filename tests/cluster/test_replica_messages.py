"""The messages between an ingress and a replica: clocks of other machines, and digests of models."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import AsyncLLM, SamplingParams
from chairlift.cluster.cluster_app import OffsetClock
from chairlift.cluster.cluster_client import ClusterClient
from chairlift.cluster.replica_messages import ClockReading, RunRequest, model_digest, shift_output
from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.commands import Add
from chairlift.lora import LoRARequest
from chairlift.outputs import EngineCoreOutput, RequestTimes

HOURS = 3600.0


def elsewhere(seconds_behind: float) -> ClockReading:
    """The clock of another machine, which is this many seconds behind that of this one."""
    return ClockReading("another machine", time.monotonic() - seconds_behind)


def test_the_offset_is_the_difference_of_the_clocks_of_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClockReading.now().offset() == 0.0
    assert elsewhere(5 * HOURS).offset() == pytest.approx(5 * HOURS, abs=60.0)
    assert elsewhere(-2 * HOURS).offset() == pytest.approx(-2 * HOURS, abs=60.0)
    monkeypatch.setattr("chairlift.cluster.replica_messages.machine_id", lambda: "")
    assert ClockReading("", time.monotonic() - HOURS).offset() == pytest.approx(HOURS, abs=60.0)


@pytest.mark.parametrize("deadline", [None, 12.0])
def test_the_times_of_a_request_are_converted_to_the_clock_of_the_replica(deadline: float | None) -> None:
    request = EngineRequest("a", [1], SamplingParams(), 4, frozenset(), 0, arrival_time=10.0, deadline=deadline)
    [local] = RunRequest("ingress", elsewhere(HOURS), Add(request)).local_add().requests()
    assert local.arrival_time == pytest.approx(10.0 + HOURS, abs=60.0)
    assert local.deadline == (None if deadline is None else pytest.approx(12.0 + HOURS, abs=60.0))
    assert dataclasses.replace(local, arrival_time=10.0, deadline=deadline) == request
    assert RunRequest("ingress", ClockReading.now(), Add(request)).local_add().requests() == [request]


def test_the_times_of_an_output_are_converted_to_the_clock_of_the_ingress() -> None:
    output = EngineCoreOutput("a", [1], times=RequestTimes(10.0, 11.0, 12.0))
    assert shift_output(output, -3.0) == output._replace(times=RequestTimes(7.0, 8.0, 9.0))
    assert shift_output(EngineCoreOutput("a", [1]), -3.0) == EngineCoreOutput("a", [1])


def test_the_clock_of_a_replica_runs_with_that_of_the_ingress(tiny_model_dir: Callable[..., Path]) -> None:
    engine = AsyncLLM(model=str(tiny_model_dir("llama")), num_threads=1, num_kv_blocks=16, skip_tokenizer_init=True)
    client: Any = ClusterClient
    clock = OffsetClock(engine._client, 100.0)  # type: ignore[arg-type]
    assert clock.now() == pytest.approx(client.now(engine._client) - 100.0, abs=60.0)
    engine.close()


def test_a_digest_depends_on_the_model_and_the_numbers_of_adapters(tiny_model_dir: Callable[..., Path]) -> None:
    def make(arch: str, num_kv_blocks: int, **overrides: Any) -> AsyncLLM:
        folder = tiny_model_dir(arch, **overrides)
        return AsyncLLM(model=str(folder), num_threads=1, num_kv_blocks=num_kv_blocks, skip_tokenizer_init=True)

    engines = [make("llama", 16), make("llama", 32), make("llama", 16, rms_norm_eps=1e-3)]
    first, larger, other = (engine.engine.facts for engine in engines)
    adapters = tuple(LoRARequest(name, index, name) for index, name in enumerate("ab", 1))
    swapped = tuple(LoRARequest(name, index, name) for index, name in enumerate("ba", 1))
    assert model_digest(first) == model_digest(larger)
    digests = [first, other, dataclasses.replace(first, lora_modules=adapters),
               dataclasses.replace(first, lora_modules=swapped)]  # fmt: skip
    assert len(set(map(model_digest, digests))) == 4
    for engine in engines:
        engine.close()
