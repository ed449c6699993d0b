"""Messages between the front end and an engine process arrive unchanged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.commands import Abort, Add, Stop
from chairlift.engine.process.engine_process import FrontEndLink
from chairlift.engine.process.wire import (
    EngineFailed,
    FrontLink,
    LogLine,
    StepResult,
    open_engine_link,
    unpack_events,
)
from chairlift.events import EVENT_TYPES, Event
from chairlift.outputs import (
    EngineCoreOutput,
    Logprob,
    MissReason,
    PrefixMatch,
    RequestStats,
    RequestTimes,
    TokenLogprobs,
)
from chairlift.request import FinishReason
from chairlift.sampling_params import SamplingParams
from chairlift.structured_outputs import Reasoning, StructuredOutputs
from support.waiting import AMPLE_SECONDS, wait_for

FULL_OUTPUT = EngineCoreOutput(
    "a~1",
    [3, 4],
    "stop",
    4,
    [TokenLogprobs(Logprob(3, -0.5, 1), [Logprob(3, -0.5, 1)])],
    (0, [TokenLogprobs(Logprob(9, -1.5, 2), [])]),
    16,
    1,
    RequestTimes(1.0, 2.0, 3.0, 4.0),
    RequestStats({"seats": 3}, 1, 2, 3.5, 2.5),
    prefix=PrefixMatch(num_disk_tokens=16, reason=MissReason.DIFFERS, position=40, num_repeated_tokens=9),
)
PARAMS = SamplingParams(
    stop=["a", "b"],
    logit_bias={5: -1.0},
    seed=-3,
    stop_token_ids=[7],
    structured_outputs=StructuredOutputs(regex="a+", reasoning=Reasoning("<t>", "</t>")),
    reasoning=Reasoning("<t>", "</t>", answer="<a>", ends=("<b>", "<c>")),
)


def make_event(event_type: type[Event]) -> Event:
    values = {
        "str": "x",
        "float": 1.5,
        "float | None": None,
        "int": 3,
        "bool": True,
        "list[str]": ["a"],
        "list[int]": [1, 2],
        "Mapping[str, float]": {"fixed": 0.5},
    }
    fields = [f for f in dataclasses.fields(event_type) if f.default is f.default_factory is dataclasses.MISSING]
    return event_type(**{f.name: values[str(f.type)] for f in fields})


def test_records_arrive_unchanged(tmp_path: Path) -> None:
    front, engine = FrontLink(tmp_path), open_engine_link(tmp_path)
    request = EngineRequest(
        "a~1", [1, 2], PARAMS, 5, frozenset({2, 7}), seed=2**64 - 1, arrival_time=0.5, leader_id="a~0"
    )
    for message in (LogLine(20, "chairlift", "line"), EngineFailed("why"), StepResult([FULL_OUTPUT], [])):
        engine.send(message)
        assert front.wait(AMPLE_SECONDS)
        assert front.receive() == message
    assert front.has_receiver(AMPLE_SECONDS)
    for command in (Add(request, [("a~1.1", 2**64 - 1)]), Abort(["a~1"], FinishReason.STOP), Stop()):
        front.send(command)
        assert engine.wait(AMPLE_SECONDS)
        assert engine.receive() == command
    assert front.receive() is None
    front.close()
    engine.close()


def test_events_of_all_types_arrive_unchanged(tmp_path: Path) -> None:
    front, engine = FrontLink(tmp_path), open_engine_link(tmp_path)
    front_end = FrontEndLink(engine)
    events = [make_event(kind) for kind in EVENT_TYPES.values()]
    for event in events:
        front_end.emit(event)
    front_end.send_result([FULL_OUTPUT])
    assert front.wait(AMPLE_SECONDS)
    result = front.receive()
    assert isinstance(result, StepResult)
    assert unpack_events(result.events) == events
    assert result.outputs == [FULL_OUTPUT]
    front.close()
    engine.close()


def test_all_messages_have_arrived_when_the_sender_is_gone(tmp_path: Path) -> None:
    front = FrontLink(tmp_path)
    assert not front.has_sender
    engine = open_engine_link(tmp_path)
    messages = [LogLine(20, "chairlift", str(number)) for number in range(20_000)]
    for message in messages:
        engine.send(message)
    wait_for(lambda: front.has_sender)
    engine.close(AMPLE_SECONDS)
    wait_for(lambda: not front.has_sender)
    assert [front.receive() for _ in messages] == messages
    front.close()
