"""Engines that are killed at random times: every request ends exactly once, with the right answer or an error."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import AsyncLLM
from chairlift.engine.process import in_flight, process_client, restart_policy
from chairlift.engine.process.engine_child import EngineChild
from chairlift.errors import EngineDeadError
from support.fakes import expected_tokens
from support.process_engines import FAKE_ENGINE, forced, started, tiny_config
from support.shown_lines import OF_FAILURES, lines_not_printed
from support.waiting import AMPLE_SECONDS, until

NUM_REQUESTS, NUM_SEATS, NUM_KILLS = 120, 6, 4


async def test_engines_that_are_killed_at_random_times(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(in_flight, "MAX_RUNS", NUM_KILLS + 2)  # on a slow machine requests wait longer
    rng = random.Random(0)
    outcomes: list[str] = []

    async def generate(llm: AsyncLLM, is_aborted: bool) -> None:
        await asyncio.sleep(rng.uniform(0, 2))
        prompt = [rng.randrange(3, 250) for _ in range(rng.randint(1, 20))]
        num_tokens, n = rng.randint(1, 40), rng.choice((1, 1, 1, 2))
        generation = llm.start(None, prompt, forced(num_tokens, n=n))
        try:
            if is_aborted:
                await asyncio.wait_for(anext(generation), rng.uniform(0, 0.5))
                generation.abort()
                outcomes.append("aborted")
                return
            answer = await generation.collect()
        except EngineDeadError:
            outcomes.append("lost")
        except TimeoutError:
            outcomes.append("aborted")
        else:
            assert [a.token_ids for a in answer.outputs] == [expected_tokens(prompt, num_tokens)] * n
            outcomes.append("answered")
        finally:
            generation.abort()

    async def kill(client: process_client.ProcessClient, llm: AsyncLLM) -> None:
        for restarts in range(NUM_KILLS):
            await until(lambda r=restarts: llm.status().state == "running" and llm.status().restarts == r)
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            os.kill(client.engine_pid, signal.SIGKILL)

    client = started(tiny_config(tiny_model_dir("llama"), max_num_seqs=NUM_SEATS), FAKE_ENGINE)
    llm = AsyncLLM(client=client)
    llm.open()
    jobs = [generate(llm, rng.random() < 0.2) for _ in range(NUM_REQUESTS)]
    await asyncio.wait_for(asyncio.gather(*jobs, kill(client, llm)), AMPLE_SECONDS)
    await until(lambda: llm.status().state == "running")
    assert llm.status().restarts == NUM_KILLS
    assert llm.num_unfinished == len(client._in_flight) == 0
    answer = await llm.start(None, [5], forced(4)).collect()
    assert answer.outputs[0].token_ids == expected_tokens([5], 4)
    llm.close()
    assert len(outcomes) == NUM_REQUESTS
    assert 0 < outcomes.count("lost") <= NUM_KILLS * NUM_SEATS


async def test_an_engine_that_connects_late_gets_every_command(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_BACKOFF", 0.001)
    late = (sys.executable, str(Path(FAKE_ENGINE[1]).with_name("late_engine_process.py")))

    client = started(tiny_config(tiny_model_dir("llama"), max_num_seqs=NUM_SEATS), late)
    llm = AsyncLLM(client=client)
    llm.open()
    first = await asyncio.wait_for(llm.start(None, [5], forced(4)).collect(), AMPLE_SECONDS)
    os.kill(client.engine_pid, signal.SIGKILL)
    await until(lambda: llm.status().state == "restarting")
    second = await asyncio.wait_for(llm.start(None, [5], forced(4)).collect(), AMPLE_SECONDS)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == expected_tokens([5], 4)
    llm.close()


async def test_a_restart_that_is_stuck_is_killed(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(process_client, "START_FACTOR", 0.0)
    monkeypatch.setattr(process_client, "STACK_DUMP_SECONDS", 0.05)

    client = started(tiny_config(tiny_model_dir("llama"), max_num_seqs=NUM_SEATS), FAKE_ENGINE, watchdog_timeout=0.4)
    client._watchdog.timeout = AMPLE_SECONDS  # Only the start is stuck.
    llm = AsyncLLM(client=client)
    llm.open()
    await llm.start(None, [5], forced(4)).collect()
    assert llm.status().last_failure is None
    make_child = client._make_child

    def make_stuck_child(*arguments: Any) -> EngineChild:
        client._command = ("sleep", "60") if client.restarts == 1 else FAKE_ENGINE
        return make_child(*arguments)

    monkeypatch.setattr(client, "_make_child", make_stuck_child)
    os.kill(client.engine_pid, signal.SIGKILL)
    await until(lambda: "not ready 0.4 s after" in (llm.status().last_failure or ""))
    assert llm.status().state == "restarting"
    client._start_watchdog.timeout = AMPLE_SECONDS
    answer = await llm.start(None, [5], forced(4)).collect()
    assert answer.outputs[0].token_ids == expected_tokens([5], 4), "the request waits for the next restart"
    assert llm.status().state == "running"
    llm.close()


async def test_the_log_lines_of_failures_are_as_documented(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(process_client, "STACK_DUMP_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "chairlift")

    client = started(tiny_config(tiny_model_dir("llama"), max_num_seqs=NUM_SEATS), FAKE_ENGINE, watchdog_timeout=0.4)
    client._start_watchdog.timeout = AMPLE_SECONDS
    llm = AsyncLLM(client=client)
    llm.open()
    for restarts, number in enumerate((signal.SIGSTOP, signal.SIGKILL)):
        client._watchdog.timeout = 0.4 if number == signal.SIGSTOP else AMPLE_SECONDS
        os.kill(client.engine_pid, number)
        generation = llm.start(None, [5], forced(4))
        await until(lambda r=restarts: llm.status().state == "running" and llm.status().restarts == r + 1)
        generation.abort()
    llm.close()
    assert lines_not_printed(OF_FAILURES, (f"{line.levelname} {line.message}" for line in caplog.records)) == []


async def test_the_event_loop_is_not_blocked_while_an_engine_does_not_stop(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_client, "STOP_SECONDS", 1.0)

    client = started(tiny_config(tiny_model_dir("llama"), max_num_seqs=NUM_SEATS), FAKE_ENGINE)
    llm = AsyncLLM(client=client)
    waiting = llm.start(None, [5], forced(100))
    os.kill(client.engine_pid, signal.SIGSTOP)
    closing = asyncio.create_task(llm.aclose())
    with pytest.raises(EngineDeadError, match="shut down"):
        await waiting.collect()
    assert not closing.done()
    await closing
    assert client._child.has_exited
