"""An engine in a process of its own gives what one in a thread gives, and comes back when it dies."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from chairlift import AsyncLLM, SamplingParams
from chairlift.engine.process import process_client, restart_policy, watchdog, wire
from chairlift.errors import ConfigError, EngineDeadError, EngineUnavailableError, ModelLoadError, RequestError
from chairlift.events import EngineStarted, Event, EventList, RequestFinished, Step
from chairlift.kernels import choice
from chairlift.outputs import RequestOutput
from process_engines import FAKE_ENGINE, faulty, forced, outcome, started, tiny_config, until

ModelDir = Callable[..., Path]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_BACKOFF", 0.01)


def tokens(answer: RequestOutput | Exception) -> list[int]:
    assert isinstance(answer, RequestOutput), answer
    return answer.outputs[0].token_ids


async def answers_and_events(llm: AsyncLLM) -> tuple[list[RequestOutput | Exception], list[Event]]:
    heard = EventList()
    llm.events.add(heard)
    llm.open()
    params = [forced(5, n=2), forced(9, logprobs=2, prompt_logprobs=1), SamplingParams(seed=4, logit_bias={7: 3.0})]
    outcomes = await asyncio.gather(*(outcome(llm, [5, 6, 7 + n], p) for n, p in enumerate(params)))
    await until(lambda: sum(isinstance(event, RequestFinished) for event in heard.events) == 4)
    return outcomes, heard.events


def test_a_process_gives_what_a_thread_gives(
    tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over an authenticated socket on the loopback interface, too, which others may reach."""

    async def run(llm: AsyncLLM) -> list[list[list[int]]]:
        outcomes, events = await answers_and_events(llm)
        assert [e.type for e in events[:2]] == ["engine_started", "request_arrived"]
        llm.start(None, [5], forced(200), request_id="x")
        with pytest.raises(RequestError, match="in use"):
            llm.start(None, [5], forced(200), request_id="x")
        llm.close()
        assert llm.status().state == "dead"
        return [[a.token_ids for a in answer.outputs] for answer in outcomes if isinstance(answer, RequestOutput)]

    config = tiny_config(tiny_model_dir("llama"), max_num_batched_tokens=64)
    caplog.set_level(logging.INFO, "chairlift")
    choice._warn_once.cache_clear()  # that there are no native kernels is said once in each process
    expected = asyncio.run(run(AsyncLLM(config)))
    said = [record.message for record in caplog.records]
    caplog.clear()
    assert asyncio.run(run(AsyncLLM(client=started(config)))) == expected
    assert [record.message for record in caplog.records] == said, "what an engine says is said once, in the same words"
    monkeypatch.setattr(wire, "MAX_IPC_PATH", 0)
    assert asyncio.run(run(AsyncLLM(client=started(config)))) == expected


def test_when_it_is_killed_what_had_begun_is_lost_and_the_rest_is_run(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    async def run() -> None:
        config = tiny_config(tiny_model_dir("llama"), max_num_seqs=4, event_log=tmp_path / "log.jsonl")
        client = started(config, faulty("none", 0, tmp_path))
        llm, heard = AsyncLLM(client=client), EventList()
        llm.events.add(heard)
        begun = [asyncio.create_task(outcome(llm, [5, n], forced(100))) for n in range(4)]
        await until(lambda: any(isinstance(event, Step) and event.num_running == 4 for event in heard.events))
        waiting = [asyncio.create_task(outcome(llm, [6, n], forced(n + 1))) for n in range(4)]
        await asyncio.sleep(0.05)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.engine_pid, number)
        await asyncio.sleep(0.05)
        assert llm.status().state == "running", "a signal to the whole group is the front end's business"
        os.kill(client.engine_pid, signal.SIGKILL)
        await until(lambda: llm.status().state == "restarting")
        late = asyncio.create_task(outcome(llm, [7], forced(3)))
        for lost in await asyncio.gather(*begun):
            assert isinstance(lost, EngineDeadError)
            assert "SIGKILL" in str(lost)
        assert [len(tokens(answer)) for answer in await asyncio.gather(*waiting)] == [1, 2, 3, 4]
        assert len(tokens(await late)) == 3
        status = llm.status()
        assert (status.state, status.restarts, status.num_unfinished) == ("running", 1, 0)
        assert sum(isinstance(event, EngineStarted) for event in heard.events) == 2
        llm.close()
        assert {path.name for path in tmp_path.glob("log*")} == {"log.jsonl", "log.1.jsonl"}

    asyncio.run(run())


def test_when_a_step_raises_the_error_reaches_those_who_were_in_it(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    async def run() -> None:
        client = started(tiny_config(tiny_model_dir("llama"), max_num_seqs=1), faulty("once-raise", 3, tmp_path))
        llm = AsyncLLM(client=client)
        broken, waiting = await asyncio.gather(outcome(llm, [5], forced(50)), outcome(llm, [6], forced(2)))
        assert isinstance(broken, EngineDeadError)
        assert "device lost" in str(broken)
        assert len(tokens(waiting)) == 2
        llm.close()

    asyncio.run(run())


def test_one_that_hangs_is_written_down_and_started_again(
    tiny_model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog.tempfile, "tempdir", str(tmp_path))

    async def run() -> None:
        config = tiny_config(tiny_model_dir("llama"), max_num_seqs=1)
        client = started(config, faulty("once-hang", 2, tmp_path), watchdog_timeout=0.4)
        llm = AsyncLLM(client=client)
        stuck, waiting = await asyncio.gather(outcome(llm, [5], forced(50)), outcome(llm, [6, 6], forced(2)))
        assert isinstance(stuck, EngineDeadError)
        assert "hung" in str(stuck)
        assert len(tokens(waiting)) == 2
        await asyncio.sleep(0.6)
        assert llm.status().restarts == 1, "an engine with nothing to do may be silent"
        llm.close()

    asyncio.run(run())
    (dump,) = tmp_path.glob("chairlift-state-*.json")
    state = json.loads(dump.read_text())
    assert [request["num_prompt_tokens"] for request in state["running"]] == [1]
    assert [request["num_prompt_tokens"] for request in state["waiting"]] == [2]
    assert state["last_step"]["step"] == 1
    assert state["engine"]["num_blocks"] == 60
    assert state["last_events"][0]["type"] == "engine_started"
    assert any("faulty_engine.py" in line for line in state["stacks"])


def test_who_leaves_gives_his_blocks_back_within_two_steps(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    async def run() -> None:
        client = started(tiny_config(tiny_model_dir("llama")), faulty("none", 0, tmp_path))
        llm, heard = AsyncLLM(client=client), EventList()
        llm.events.add(heard)
        stays = asyncio.create_task(outcome(llm, [5], forced(60)))
        leaves = llm.start(None, [6] * 40, forced(100))
        await until(lambda: any(isinstance(event, Step) and event.step == 20 for event in heard.events))
        leaves.abort()
        num_steps = sum(isinstance(event, Step) for event in heard.events)
        assert len(tokens(await stays)) == 60
        steps = [event for event in heard.events if isinstance(event, Step)][num_steps:]
        assert all(len(step.request_ids) == 1 for step in steps[2:])
        assert steps[2].free_blocks > steps[0].free_blocks
        llm.close()

    asyncio.run(run())


def test_an_engine_that_cannot_be_started_again_ends_what_waits_and_heals(
    tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "MAX_FAILURES", 2)
    monkeypatch.setattr(restart_policy, "LONGEST_BACKOFF", 0.05)

    async def run() -> None:
        client = started(tiny_config(tiny_model_dir("llama"), max_num_seqs=8), FAKE_ENGINE)
        llm = AsyncLLM(client=client)
        llm.open()
        client._command = (sys.executable, "-c", "raise SystemExit(5)")
        os.kill(client.engine_pid, signal.SIGKILL)
        await until(lambda: llm.status().state == "restarting")
        assert llm.is_healthy
        waited = await asyncio.wait_for(outcome(llm, [5], forced(3)), 20)
        assert isinstance(waited, EngineUnavailableError)
        assert re.search("cannot be started again: exit status 5.*restart the server", str(waited))
        assert llm.status().state == "cannot_restart"
        assert not llm.is_healthy
        assert llm.num_unfinished == len(client._in_flight) == 0
        with pytest.raises(EngineUnavailableError, match="exit status 5") as refused:
            llm.start(None, [5], forced(3))
        assert 0 <= refused.value.retry_after <= 0.05
        tries = llm.status().restarts
        await until(lambda: llm.status().restarts >= tries + 4)
        client._command = FAKE_ENGINE
        await until(lambda: llm.status().state == "running")
        assert len(tokens(await outcome(llm, [5], forced(3)))) == 3
        assert llm.is_healthy
        llm.close()

    asyncio.run(run())


def test_another_model_in_the_place_of_the_first_is_not_served(
    tiny_model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end's tokenizer and limits are the first one's."""
    monkeypatch.setattr(restart_policy, "MAX_FAILURES", 1)
    monkeypatch.setattr(restart_policy, "LONGEST_BACKOFF", 0.05)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir("llama"), folder)
    config = folder / "config.json"
    first = config.read_text()

    async def run() -> None:
        client = started(tiny_config(folder, max_num_seqs=8), FAKE_ENGINE)
        llm = AsyncLLM(client=client)
        llm.open()
        config.write_text(json.dumps({**json.loads(first), "vocab_size": json.loads(first)["vocab_size"] + 1}))
        os.kill(client.engine_pid, signal.SIGKILL)
        await until(lambda: llm.status().state == "cannot_restart")
        assert "is another one than when the server was started" in (llm.status().last_failure or "")
        config.write_text(first)
        await until(lambda: llm.status().state == "running")
        llm.close()

    asyncio.run(run())


def test_a_machine_without_room_for_a_process_is_asked_again(
    tiny_model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of descriptors, out of processes: nothing is left behind, and the request that waits is run in the end."""
    errors = [zmq.ZMQError(errno.EMFILE), OSError(errno.EAGAIN, "no process"), None]
    create, start = wire.zmq.Context.socket, subprocess.Popen
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def scarce_socket(context: zmq.Context[Any], *options: Any) -> Any:
        if isinstance(errors[0], zmq.ZMQError):
            raise errors.pop(0)  # type: ignore[misc]
        return create(context, *options)

    def scarce_process(*arguments: Any, **options: Any) -> Any:
        if isinstance(errors[0], OSError):
            raise errors.pop(0)  # type: ignore[misc]
        return start(*arguments, **options)

    async def run() -> None:
        client = started(tiny_config(tiny_model_dir("llama")))
        llm = AsyncLLM(client=client)
        llm.open()
        monkeypatch.setattr(wire.zmq.Context, "socket", scarce_socket)
        monkeypatch.setattr(subprocess, "Popen", scarce_process)
        os.kill(client.engine_pid, signal.SIGRTMIN + 3)  # without a name
        await until(lambda: llm.status().state == "restarting")
        assert len(tokens(await outcome(llm, [5], forced(3)))) == 3
        assert llm.status().restarts == 3
        assert len(list(tmp_path.iterdir())) == 1, "of the engine that runs"
        llm.close()

    asyncio.run(run())


def test_what_keeps_it_from_starting_is_raised_as_it_was(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len=99 exceeds the 4 slots"):
        started(tiny_config(tiny_model_dir("llama"), num_kv_blocks=1, max_model_len=99))
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        started(tiny_config(tmp_path / "nothing"))
    with pytest.raises(EngineDeadError, match="exit status 3"):
        started(tiny_config(tiny_model_dir("llama")), (sys.executable, "-c", "raise SystemExit(3)"))


def test_a_first_start_that_hangs_ends_with_an_error_that_says_where(
    tiny_model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process_client, "FIRST_START_SECONDS", 2.0)
    code = """
import threading
from chairlift.engine.process import engine_process
threading.Thread(target=threading.Event().wait, daemon=True).start()
engine_process._build = lambda *_: threading.Event().wait()
engine_process.main()
"""
    with pytest.raises(EngineDeadError, match=r"not ready 2 s .* it was in run \(engine_process.py:\d+\)") as raised:
        started(tiny_config(tiny_model_dir("llama")), (sys.executable, "-c", code), watchdog_timeout=1.0)
    assert "--watchdog-timeout" in str(raised.value)
    (dump,) = tmp_path.iterdir()
    assert str(dump) in str(raised.value)
    state = json.loads(dump.read_text())
    assert state["engine"] is None
    assert sum("most recent call first" in line for line in state["stacks"]) >= 2


def test_a_start_has_no_limit_where_the_watchdog_has_none(
    tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_client, "FIRST_START_SECONDS", 0.1)
    with pytest.raises(EngineDeadError, match=r"hangs: not ready 0\.1 s"):
        started(tiny_config(tiny_model_dir("llama")), watchdog_timeout=0.05)
    started(tiny_config(tiny_model_dir("llama")), watchdog_timeout=0.0).close()


def test_a_front_end_that_is_killed_takes_its_engine_along(tiny_model_dir: ModelDir) -> None:
    code = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from process_engines import started, tiny_config
print(started(tiny_config(Path(sys.argv[1]))).engine_pid, flush=True)
time.sleep(60)
"""
    arguments = [sys.executable, "-c", code, str(tiny_model_dir("llama")), str(Path(__file__).parents[2])]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        engine = psutil.Process(int(front.stdout.readline()))
        assert engine.is_running()
        front.kill()
        engine.wait(timeout=10)


def test_the_front_end_loads_no_torch() -> None:
    modules = (
        "chairlift.engine.async_llm, chairlift.engine.process.process_client, "
        "chairlift.server.http.application, chairlift.server.serve"
    )
    code = f"import sys, {modules}; print({{'torch', 'numpy', 'gguf', 'safetensors'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
