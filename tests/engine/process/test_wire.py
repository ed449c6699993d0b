"""Messages between the front end and an engine process arrive unchanged, large answers in several parts."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift import AsyncLLM
from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.output_processor import AnswerBuilder
from chairlift.engine.process import divided_outputs
from chairlift.engine.process.commands import Abort, Add, Stop
from chairlift.engine.process.divided_outputs import (
    MAX_LOGPROBS_PER_MESSAGE,
    OutputJoiner,
    divide_outputs,
    num_logprobs,
)
from chairlift.engine.process.engine_process import FrontEndLink
from chairlift.engine.process.wire import EngineFailed, FrontLink, LogLine, StepResult, open_engine_link, unpack_events
from chairlift.events import EVENT_TYPES, Event
from chairlift.outputs import (
    EngineCoreOutput,
    Logprob,
    MissReason,
    PrefixMatch,
    RequestOutput,
    RequestStats,
    RequestTimes,
    TokenLogprobs,
)
from chairlift.request import FinishReason
from chairlift.sampling_params import SamplingParams
from chairlift.structured_outputs import Reasoning, StructuredOutputs
from support.process_engines import forced, started, tiny_config
from support.waiting import AMPLE_SECONDS, until, wait_for

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


ModelDir = Callable[..., Path]


def make_entries(count: int, num_top: int) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(Logprob(token, -0.5, 1), [Logprob(token + rank, -rank, rank) for rank in range(1, num_top + 1)])
        for token in range(count)
    ]


def make_output(
    name: str, num_tokens: int, num_top: int | None, num_prompt: int | None, *, is_last: bool
) -> EngineCoreOutput:
    return EngineCoreOutput(
        name,
        list(range(num_tokens)),
        "stop" if is_last else None,
        num_tokens if is_last else None,
        None if num_top is None or not num_tokens else make_entries(num_tokens, num_top),
        None if num_prompt is None else (3, make_entries(num_prompt, num_top or 0)),
        16,
        2,
        RequestTimes(1.0, 2.0, 3.0, 4.0) if is_last else None,
        RequestStats({"seats": 3}, 1, 2, 3.5, 2.5) if is_last else None,
    )


OUTPUTS = st.lists(
    st.builds(
        make_output,
        st.just("a"),
        st.integers(0, 12),
        st.one_of(st.none(), st.integers(0, 4)),
        st.one_of(st.none(), st.integers(0, 9)),
        is_last=st.booleans(),
    ),
    max_size=6,
)


@given(outputs=OUTPUTS, limit=st.integers(5, 40))
@settings(max_examples=300, deadline=None)
def test_joined_messages_are_the_outputs(outputs: list[EngineCoreOutput], limit: int) -> None:
    outputs = [output._replace(request_id=f"r{index}") for index, output in enumerate(outputs)]
    joiner, joined, last = OutputJoiner(), [], None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divided_outputs, "MAX_LOGPROBS_PER_MESSAGE", limit)
        for message, is_continued in divide_outputs(outputs):
            assert last is not False, "no message follows the last one"
            assert sum(map(num_logprobs, message)) <= limit
            assert all(output.finish_reason is None and output.stats is None for output in message[-1:] * is_continued)
            joined += joiner.add(message, is_continued)
            last = is_continued
    assert last is False
    assert joined == outputs


def test_a_long_answer_has_as_many_messages_as_its_logprobs_need(tmp_path: Path) -> None:
    front, engine = FrontLink(tmp_path), open_engine_link(tmp_path)
    outputs = [make_output(f"r{index}", 300, 20, 100, is_last=True) for index in range(3)]
    FrontEndLink(engine).send_result(outputs)
    joiner, joined, sizes = OutputJoiner(), [], []
    while len(joined) < 3:
        assert front.wait(AMPLE_SECONDS)
        message = front.receive()
        assert isinstance(message, StepResult)
        sizes.append(sum(map(num_logprobs, message.outputs)))
        joined += joiner.add(message.outputs, message.is_continued)
    assert joined == outputs
    assert max(sizes) <= MAX_LOGPROBS_PER_MESSAGE
    assert min(sizes[:-1]) > MAX_LOGPROBS_PER_MESSAGE - 21
    front.close()
    engine.close()


BEAMS = SamplingParams(n=8, use_beam_search=True, max_tokens=10, logprobs=20, ignore_eos=True)
CASES: dict[str, list[SamplingParams]] = {
    "continuous": [forced(3, n=2, prompt_logprobs=20), BEAMS],
    "static": [forced(40, n=3, logprobs=20)],
}
"""Large answers by the batching of the engine."""


@pytest.mark.parametrize("batching", CASES)
def test_a_process_sends_large_answers_in_parts_and_the_event_loop_runs_between_them(
    batching: str, tiny_model_dir: ModelDir
) -> None:
    config = tiny_config(tiny_model_dir("llama"), num_kv_blocks=600, batching=batching)
    prompt = list(range(5, 75))

    async def answers(llm: AsyncLLM, steps: list[str]) -> list[list[RequestOutput]]:
        """The deltas of each answer."""
        llm.open()
        found = []
        for params in CASES[batching]:
            first = len(steps)
            found.append([delta async for delta in llm.start(None, prompt, params)])
            assert not steps or "part" in steps[first:]
        return found

    async def answers_of_process() -> list[list[RequestOutput]]:
        client = started(config)
        llm, steps = AsyncLLM(client=client), list[str]()
        handle = client._handle
        is_open = True

        def record(message: Any) -> None:
            if isinstance(message, StepResult):
                assert sum(map(num_logprobs, message.outputs)) <= MAX_LOGPROBS_PER_MESSAGE
                steps.append("part" if message.is_continued else "last")
            handle(message)

        async def tick() -> None:
            while is_open:
                steps.append("tick")
                await asyncio.sleep(0)

        client._handle = record  # type: ignore[method-assign]
        ticks = asyncio.create_task(tick())
        await until(lambda: "tick" in steps)
        result = await answers(llm, steps)
        is_open = False
        await ticks
        llm.close()
        assert {after for before, after in itertools.pairwise(steps) if before == "part"} == {"tick"}
        return result

    thread = AsyncLLM(config)
    expected = asyncio.run(answers(thread, []))
    thread.close()
    found = asyncio.run(answers_of_process())
    assert list(map(whole, found)) == list(map(whole, expected))
    if batching == "continuous":  # All beams end in the same step, so that they are one delta.
        assert len(found[-1]) == len(expected[-1]) == 1


def whole(deltas: list[RequestOutput]) -> RequestOutput:
    """The answer of these deltas, without what differs from run to run."""
    answer = AnswerBuilder()
    for delta in deltas:
        answer.add(delta)
    return replace(answer.build(), request_id="", times=None, stats=None)
