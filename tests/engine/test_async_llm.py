from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import AsyncLLM, SamplingParams
from chairlift.clock import VirtualClock
from chairlift.engine.output_processor import AnswerBuilder
from chairlift.engine.process.client import EngineClient
from chairlift.errors import EngineDeadError, RequestError
from chairlift.events import Event, Step
from chairlift.outputs import RequestOutput
from support.step_gate import StepGate
from support.tiny_engine import tiny_options
from support.waiting import AMPLE_SECONDS, until

Make = Callable[..., AsyncLLM]


@pytest.fixture
def make_llm(tiny_model_dir: Callable[..., Path]) -> Make:
    def make(**options: Any) -> AsyncLLM:
        defaults = {"num_kv_blocks": 60, "block_size": 4, "skip_tokenizer_init": True, "num_threads": 1}
        return AsyncLLM(model=str(tiny_model_dir("llama")), **{**defaults, **options})

    return make


def forced(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **fields)


async def answer(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    total = AnswerBuilder()
    async for delta in llm.generate(prompt, params):
        total.add(delta)
    return total.build()


def slow_down(llm: AsyncLLM, seconds: float) -> None:
    """Make every step take longer, so that a test can act while requests are running."""
    submit = llm.engine.core._executor.submit

    def slow(output: Any) -> Any:
        time.sleep(seconds)
        return submit(output)

    llm.engine.core._executor.submit = slow  # type: ignore[method-assign]


async def until_idle(llm: AsyncLLM) -> None:
    await until(lambda: llm.num_unfinished == 0 and not llm.engine.core.has_work)


async def test_special_tokens_in_messages_are_text_unless_allowed(tmp_path: Path) -> None:
    llm = AsyncLLM(**tiny_options(tmp_path, num_kv_blocks=20))
    begin = llm.engine.tokenizer.token_to_id("<s>")

    async def prompt(**options: Any) -> list[int]:
        messages = [{"role": "user", "content": "a<s>"}]
        outputs = [output async for output in llm.chat(messages, forced(1), **options)]
        return outputs[0].prompt_token_ids

    assert begin not in await prompt()
    assert begin in await prompt(allow_special_tokens_in_content=True)
    await llm.aclose()


def test_concurrent_streams_return_the_same_answers_as_single_ones(make_llm: Make) -> None:
    rng = random.Random(3)
    work = [([rng.randrange(3, 256) for _ in range(rng.randint(1, 30))], rng.randint(1, 20)) for _ in range(12)]

    async def run(together: bool) -> list[list[int]]:
        llm = make_llm()
        jobs = [answer(llm, prompt, forced(count)) for prompt, count in work]
        outputs = await asyncio.gather(*jobs) if together else [await job for job in jobs]
        await until_idle(llm)
        llm.close()
        return [output.outputs[0].token_ids for output in outputs]

    assert asyncio.run(run(together=True)) == asyncio.run(run(together=False))


async def test_closing_a_stream_aborts_it_and_frees_its_blocks(make_llm: Make) -> None:
    llm = make_llm()
    stream = llm.generate([5, 6, 7], forced(150))
    async for _ in stream:
        break
    await stream.aclose()
    await until_idle(llm)
    assert llm.engine.core.scheduler.is_idle
    llm.close()


async def test_a_cancelled_waiting_request_is_removed_from_the_queue(make_llm: Make) -> None:
    llm = make_llm(max_num_seqs=1)
    with StepGate(llm.engine.core):
        first = asyncio.create_task(answer(llm, [5], forced(60)))
        waiting = asyncio.create_task(answer(llm, [6], forced(60)))
        await until(lambda: llm.num_unfinished == 2)
        waiting.cancel()
        await until(lambda: llm.num_unfinished == 1)
    output = await first
    assert len(output.outputs[0].token_ids) == 60
    await until_idle(llm)
    llm.close()


async def test_a_slow_reader_gets_merged_deltas_and_delays_no_other_stream(make_llm: Make) -> None:
    llm = make_llm()
    slow = llm.start(None, [5, 6], forced(40))
    fast = await answer(llm, [7, 8], forced(40))
    assert len(fast.outputs[0].token_ids) == 40
    await until(lambda: not llm.engine.core.has_work)
    await answer(llm, [9], forced(1))  # Its output is delivered after those of the other requests.
    deltas = [delta async for delta in slow]
    assert len(deltas) == 1
    assert len(deltas[0].outputs[0].token_ids) == 40
    slow.abort()
    llm.close()


async def test_numbers_outside_the_range_of_the_records_are_rejected(make_llm: Make) -> None:
    """A request with such a number could not be sent to an engine in another process, and would never end."""

    llm = make_llm(scheduling_policy="priority")
    for priority in (1 << 63, -(1 << 63)):
        with pytest.raises(RequestError, match="priority must be between"):
            llm.start(None, [5], forced(3), priority=priority)
    assert llm.num_unfinished == 0
    llm.close()
    for name in ("top_k", "truncate_prompt_tokens"):
        with pytest.raises(RequestError, match=f"{name} must be between"):
            SamplingParams(**{name: 1 << 63})


async def test_an_answer_that_is_complete_is_not_lost_with_the_engine(make_llm: Make) -> None:
    """On a busy event loop, the last output and the failure may arrive before the answer is read."""

    llm = make_llm()
    unread = llm.start(None, [5], forced(3))
    await until(lambda: not llm._processor.num_unfinished)
    running = llm.start(None, [6], forced(200))
    llm.stop()
    assert len((await unread.collect()).outputs[0].token_ids) == 3
    with pytest.raises(EngineDeadError, match="shut down"):
        await running.collect()
    llm.close()


async def test_a_failing_listener_ends_every_stream(make_llm: Make) -> None:
    class Failing:
        def emit(self, event: Event) -> None:
            if isinstance(event, Step) and event.finished:
                raise OSError("no space")

    llm = make_llm()
    llm.engine.core.scheduler._observer._events = Failing()
    jobs = [asyncio.create_task(answer(llm, [n], forced(n))) for n in range(3, 6)]
    results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), AMPLE_SECONDS)
    assert all(isinstance(result, EngineDeadError) for result in results)
    llm.close()


async def test_a_request_id_can_be_reused_at_once(make_llm: Make) -> None:
    llm = make_llm()
    expected = (await answer(llm, [9, 8], forced(6))).outputs[0].token_ids
    for _ in range(30):
        first = llm.start(None, [5, 6], forced(50), request_id="y")
        await anext(first)
        first.abort()
        second = llm.start(None, [9, 8], forced(6), request_id="y")
        first.abort()
        assert (await second.collect()).outputs[0].token_ids == expected
        assert [delta async for delta in first] == []
    llm.close()


async def test_request_ids_that_look_like_siblings_do_not_collide(make_llm: Make) -> None:
    llm = make_llm()
    group = llm.start(None, [5, 6], forced(8, n=2), request_id="x")
    others = [llm.start(None, [7], forced(8), request_id=name) for name in ("x-0", "x~1", "x~1.1", "x.1")]
    answers = await asyncio.gather(group.collect(), *(other.collect() for other in others))
    assert [len(a.outputs) for a in answers] == [2, 1, 1, 1, 1]
    llm.close()


async def test_calls_after_close_return_at_once(make_llm: Make) -> None:
    llm = make_llm()
    await answer(llm, [5], forced(2))
    llm.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        await answer(llm, [5], forced(2))
    llm.close()


async def test_the_arrival_time_is_that_of_the_call(make_llm: Make) -> None:
    llm = make_llm()
    with StepGate(llm.engine.core):
        busy = asyncio.create_task(answer(llm, [5], forced(6)))
        await until(lambda: llm.num_unfinished == 1)
        before = llm.engine.core.now()
        waiting = asyncio.create_task(answer(llm, [6], forced(2)))
        await until(lambda: llm.num_unfinished == 2)
        after = llm.engine.core.now()
    late = await waiting
    await busy
    assert late.times is not None
    assert before <= late.times.arrival <= after
    assert late.times.first_token is not None
    assert late.times.first_token > after
    llm.close()


async def test_close_ends_running_streams(make_llm: Make) -> None:
    llm = make_llm()
    slow_down(llm, 0.05)
    job = asyncio.create_task(answer(llm, [5], forced(200)))
    await until(lambda: llm.num_unfinished == 1)
    llm.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        await job


def test_an_answer_has_the_stats_of_its_request(make_llm: Make) -> None:
    async def run() -> list[RequestOutput]:
        llm = make_llm(max_num_seqs=1)
        with StepGate(llm.engine.core):  # The second one arrives before the first one has ended.
            calls = asyncio.gather(answer(llm, [5, 6, 7], forced(8)), answer(llm, [8, 9], forced(4, n=2)))
            await until(lambda: llm.num_unfinished == 2)
        outputs = await calls
        llm.close()
        return outputs

    first, second = asyncio.run(run())
    assert first.stats is not None
    assert second.stats is not None
    assert first.stats.steps_waited == {}
    assert second.stats.steps_waited["seats"] > 0
    assert "sibling_prefill" in second.stats.steps_waited
    assert 0 < first.stats.kv_slot_seconds_used < first.stats.kv_slot_seconds_held


async def test_the_stalled_time_does_not_depend_on_status_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(EngineClient, "now", lambda _: clock.now())

    llm = AsyncLLM(**tiny_options(tmp_path, num_kv_blocks=20))
    unread = llm.start(None, [5], forced(2))
    clock.advance(0.1)
    await until(lambda: not llm._processor.num_unfinished)
    clock.advance(5)
    assert llm.num_unfinished == 1, "an unread answer does not stall the engine"
    assert llm.status().seconds_stalled == 0
    with StepGate(llm.engine.core):
        llm.start(None, [6], forced(1))
        clock.advance(0.2)
        assert llm.status().seconds_stalled == pytest.approx(0.2)
    unread.abort()
    await llm.aclose()
    assert llm.status().seconds_stalled == 0
