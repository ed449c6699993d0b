"""The messages between an ingress and a replica, as records in msgpack.

ingress --RunRequest (one call for each prompt)--------------------> replica
        <--ReplicaHello, then a ReplicaMessage for each step ------
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec

from chairlift.cluster.replica_state import ReplicaLoad
from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.client import EngineState
from chairlift.engine.process.commands import Add
from chairlift.engine.served_engine import EngineFacts
from chairlift.outputs import EngineCoreOutput, RequestTimes

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def machine_id() -> str:
    """The id of this boot of this machine, whose processes share one monotonic clock; "" if the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


class ClockReading(msgspec.Struct, frozen=True, array_like=True):
    """The monotonic clock of a machine at the time of a message."""

    machine: str
    seconds: float

    @classmethod
    def now(cls) -> ClockReading:
        return cls(machine_id(), time.monotonic())

    def offset(self) -> float:
        """What must be added to times of that machine to get times of this one. It is 0 on the same machine; otherwise
        it includes the transfer time of the message."""
        is_same = bool(self.machine) and self.machine == machine_id()
        return 0.0 if is_same else time.monotonic() - self.seconds


class RunRequest(msgspec.Struct, frozen=True, array_like=True):
    """A prompt with its siblings, and the ingress that receives the outputs."""

    ingress_id: str
    clock: ClockReading
    add: Add

    def local_add(self) -> Add:
        """The command with times of this machine's clock."""
        offset = self.clock.offset()
        return Add(_shift_request(self.add.first, offset), self.add.others) if offset else self.add


def model_digest(facts: EngineFacts) -> str:
    """A digest of what the meaning of a request depends on: the model and the numbers of its LoRA adapters.

    During an update from one model to another, an ingress sends requests only to replicas with its own digest.
    """
    parts = (facts.model_name, facts.model_config, facts.pooling, facts.lora_modules)
    return hashlib.sha256(msgspec.msgpack.encode(parts, order="deterministic")).hexdigest()


class ReplicaEngine(msgspec.Struct, frozen=True, array_like=True):
    """The state of the engine of a replica, see `EngineStatus`."""

    state: EngineState
    restarts: int
    last_failure: str | None


class ReplicaHello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a replica to an ingress.

    Attributes:
        model_digest: see `model_digest`.
        block_keys: the contents of the prefix cache.
        events: the start of the engine and the arrivals of its unfinished requests, as in `StepResult`.
    """

    clock: ClockReading
    model_digest: str
    engine: ReplicaEngine
    block_size: int
    num_blocks: int
    block_keys: list[int]
    others: ReplicaLoad
    events: list[tuple[str, msgspec.Raw]]


class ReplicaMessage(msgspec.Struct, array_like=True):
    """What has happened in a replica since the last message, usually in one step.

    Attributes:
        outputs: the outputs of the requests of this ingress.
        lost: ids of its requests that the engine has lost, with the reason.
        events: as in `StepResult`, of the requests of all ingresses.
        num_dropped_events: the number of events that were dropped because the ingress is slow.
        stored, removed: changes of the prefix cache.
        others: the load that other ingresses cause.
    """

    outputs: list[EngineCoreOutput] = []
    lost: list[tuple[list[str], str]] = []
    events: list[tuple[str, msgspec.Raw]] = []
    num_dropped_events: int = 0
    stored: set[int] = set()
    removed: set[int] = set()
    others: ReplicaLoad = ReplicaLoad()
    engine: ReplicaEngine = ReplicaEngine("running", 0, None)


def shift_output(output: EngineCoreOutput, offset: float) -> EngineCoreOutput:
    """The output with its times in seconds of another clock."""
    if output.times is None:
        return output
    arrival, *others = (getattr(output.times, name) for name in RequestTimes.__dataclass_fields__)
    later = (None if seconds is None else seconds + offset for seconds in others)
    return output._replace(times=RequestTimes(arrival + offset, *later))


def _shift_request(request: EngineRequest, offset: float) -> EngineRequest:
    deadline = None if request.deadline is None else request.deadline + offset
    return replace(request, arrival_time=request.arrival_time + offset, deadline=deadline)
