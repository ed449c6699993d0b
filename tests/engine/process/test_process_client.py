"""An engine in a process returns the same outputs as one in a thread, and is restarted when it dies."""

from __future__ import annotations

import asyncio
import errno
import itertools
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
from chairlift.engine.process import engine_child, process_client, restart_policy, watchdog, wire
from chairlift.errors import ConfigError, EngineDeadError, EngineUnavailableError, ModelLoadError, RequestError
from chairlift.events import EngineStarted, Event, EventList, RequestFinished, Step
from chairlift.kernels import choice
from chairlift.outputs import RequestOutput
from support.fakes import expected_tokens
from support.process_engines import FAKE_ENGINE, faulty, forced, outcome, started, tiny_config
from support.waiting import AMPLE_SECONDS, until, wait_for

ModelDir = Callable[..., Path]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_BACKOFF", 0.01)


@pytest.fixture
def whole_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks are read when the main thread, which is the last one, has written its own, which may be late."""
    read = engine_child.EngineChild.stacks

    def stacks(child: engine_child.EngineChild) -> str:
        wait_for(lambda: " in main\n" in read(child))
        return read(child)

    monkeypatch.setattr(engine_child.EngineChild, "stacks", stacks)


def tokens(answer: RequestOutput | Exception) -> list[int]:
    assert isinstance(answer, RequestOutput), answer
    return answer.outputs[0].token_ids


async def answers_and_events(llm: AsyncLLM) -> tuple[list[RequestOutput | Exception], list[Event]]:
    received = EventList()
    llm.events.add(received)
    llm.open()
    params = [forced(5, n=2), forced(9, logprobs=2, prompt_logprobs=1), SamplingParams(seed=4, logit_bias={7: 3.0})]
    outcomes = await asyncio.gather(*(outcome(llm, [5, 6, 7 + n], p) for n, p in enumerate(params)))
    await until(lambda: sum(isinstance(event, RequestFinished) for event in received.events) == 4)
    return outcomes, received.events


def test_a_process_returns_the_same_outputs_as_a_thread(
    tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A process also runs if the path of the folder for temporary files is too long for sockets."""

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
    choice._warn_once.cache_clear()  # warns of missing native kernels again
    expected = asyncio.run(run(AsyncLLM(config)))
    messages = [record.message for record in caplog.records]
    caplog.clear()
    assert asyncio.run(run(AsyncLLM(client=started(config)))) == expected
    assert [record.message for record in caplog.records] == messages, "the log lines are the same"
    (long_folder := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    llm = AsyncLLM(client=started(config, FAKE_ENGINE))
    assert tokens(asyncio.run(outcome(llm, [5], forced(4)))) == expected_tokens([5], 4)
    llm.close()


async def test_after_a_kill_started_requests_are_lost_and_waiting_ones_run(
    tiny_model_dir: ModelDir, tmp_path: Path
) -> None:
    config = tiny_config(tiny_model_dir("llama"), max_num_seqs=4)
    client = started(config, faulty("none", 0, tmp_path, is_fake=True))
    llm, received = AsyncLLM(client=client), EventList()
    llm.events.add(received)
    hold, held = tmp_path / "hold", tmp_path / "held"
    hold.touch()
    running = [asyncio.create_task(outcome(llm, [5, n], forced(100))) for n in range(4)]
    await until(held.exists)
    for step in itertools.count(int(held.read_text()) + 1):
        hold.write_text(str(step))
        await until(lambda number=str(step): held.read_text() == number)
        if any(isinstance(event, Step) and event.num_running == 4 for event in received.events):
            break
    waiting = [asyncio.create_task(outcome(llm, [6, n], forced(n + 1))) for n in range(4)]
    await until(lambda: llm.num_unfinished == 8)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        os.kill(client.engine_pid, number)
    await asyncio.sleep(0.05)
    assert llm.status().state == "running", "the engine process ignores signals that end a server"
    os.kill(client.engine_pid, signal.SIGKILL)
    hold.unlink()
    await until(lambda: llm.status().state == "restarting")
    late = asyncio.create_task(outcome(llm, [7], forced(3)))
    for lost in await asyncio.gather(*running):
        assert isinstance(lost, EngineDeadError)
        assert "SIGKILL" in str(lost)
    assert [len(tokens(answer)) for answer in await asyncio.gather(*waiting)] == [1, 2, 3, 4]
    assert len(tokens(await late)) == 3
    status = llm.status()
    assert (status.state, status.restarts, status.num_unfinished) == ("running", 1, 0)
    assert sum(isinstance(event, EngineStarted) for event in received.events) == 2
    llm.close()


async def test_an_error_in_a_step_ends_its_requests(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    client = started(
        tiny_config(tiny_model_dir("llama"), max_num_seqs=1), faulty("once-raise", 3, tmp_path, is_fake=True)
    )
    llm = AsyncLLM(client=client)
    broken, waiting = await asyncio.gather(outcome(llm, [5], forced(50)), outcome(llm, [6], forced(2)))
    assert isinstance(broken, EngineDeadError)
    assert "device lost" in str(broken)
    assert len(tokens(waiting)) == 2
    llm.close()


async def test_the_reason_of_an_exit_may_arrive_after_it(
    tiny_model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_child, "LAST_MESSAGE_SECONDS", AMPLE_SECONDS)

    config = tiny_config(tiny_model_dir("llama"), max_num_seqs=8)
    client = started(config, faulty("once-raise", 1, tmp_path, is_fake=True))
    llm, exits = AsyncLLM(client=client), 0

    def handle_exit(child: Any) -> None:
        nonlocal exits
        exits += 1
        type(client)._handle_exit(client, child)

    monkeypatch.setattr(client, "_handle_exit", handle_exit)
    with monkeypatch.context() as late:
        late.setattr(wire.FrontLink, "receive", lambda _link: None)
        late.setattr(wire.FrontLink, "has_sender", True)
        broken = asyncio.create_task(outcome(llm, [5], forced(50)))
        await until(lambda: exits >= 3)
        assert llm.status().state == "running"
    assert "device lost" in str(await broken)
    llm.close()


async def test_a_fork_that_keeps_the_connection_of_a_dead_engine_delays_the_restart_only(
    tiny_model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_child, "LAST_MESSAGE_SECONDS", AMPLE_SECONDS)
    monkeypatch.setattr(wire.FrontLink, "has_sender", True)
    config = tiny_config(tiny_model_dir("llama"), max_num_seqs=8)

    client = started(config, faulty("once-raise", 1, tmp_path, is_fake=True), watchdog_timeout=0.0)
    llm = AsyncLLM(client=client)
    lost = asyncio.create_task(outcome(llm, [5], forced(50)))
    await until(lambda: client._failure != "")
    monkeypatch.setattr(engine_child, "LAST_MESSAGE_SECONDS", 0.1)  # The last message has arrived.
    assert isinstance(await lost, EngineDeadError)
    assert len(tokens(await outcome(llm, [6], forced(2)))) == 2
    llm.close()
    with pytest.raises(EngineDeadError, match="exit status 3"):
        started(config, (sys.executable, "-c", "raise SystemExit(3)"), watchdog_timeout=0.0)


@pytest.mark.usefixtures("whole_stacks")
async def test_the_stacks_of_a_stuck_engine_are_logged_and_it_is_restarted(
    tiny_model_dir: ModelDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tiny_model_dir("llama"), max_num_seqs=1)
    client = started(config, faulty("once-hang", 2, tmp_path, is_fake=True), watchdog_timeout=0.4)
    client._watchdog.timeout = client._start_watchdog.timeout = AMPLE_SECONDS
    llm = AsyncLLM(client=client)
    stuck = asyncio.create_task(outcome(llm, [5], forced(50)))
    waiting = asyncio.create_task(outcome(llm, [6, 6], forced(2)))
    await until((tmp_path / "broken-once").exists)
    client._watchdog.timeout = 0.4
    error = await stuck
    client._watchdog.timeout = AMPLE_SECONDS
    assert isinstance(error, EngineDeadError)
    assert "it was stuck" in str(error)
    assert len(tokens(await waiting)) == 2
    client._watchdog.timeout = 0.4
    await asyncio.sleep(0.6)
    assert llm.status().restarts == 1, "an idle engine is not stuck"
    llm.close()
    stuck, stacks, *_ = (line.message for line in caplog.records if line.levelname == "ERROR")
    assert stuck == "the engine is stuck: no step for 0.4 s with 2 unfinished requests"
    assert stacks.startswith("the engine was in ")
    assert "faulty_engine.py" in stacks


async def test_the_blocks_of_an_aborted_request_are_free_within_two_steps(
    tiny_model_dir: ModelDir, tmp_path: Path
) -> None:
    client = started(tiny_config(tiny_model_dir("llama"), max_num_seqs=8), faulty("none", 0, tmp_path, is_fake=True))
    llm, received = AsyncLLM(client=client), EventList()
    llm.events.add(received)
    (hold := tmp_path / "hold").write_text("30")
    continued = asyncio.create_task(outcome(llm, [5], forced(60)))
    aborted = llm.start(None, [6] * 40, forced(80))
    await until((tmp_path / "held").exists)
    aborted.abort()
    await until((tmp_path / "commanded").exists)
    hold.unlink()
    assert len(tokens(await continued)) == 60
    first = int((tmp_path / "held").read_text())
    steps = [event for event in received.events if isinstance(event, Step) and event.step >= first]
    assert all(len(step.request_ids) == 1 for step in steps[2:])
    assert steps[2].free_blocks > steps[0].free_blocks
    llm.close()


async def test_an_engine_that_cannot_be_restarted_ends_waiting_requests_and_recovers(
    tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "MAX_FAILURES", 2)
    monkeypatch.setattr(restart_policy, "LONGEST_BACKOFF", 0.05)

    client = started(tiny_config(tiny_model_dir("llama"), max_num_seqs=8), FAKE_ENGINE)
    llm = AsyncLLM(client=client)
    llm.open()
    client._command = (sys.executable, "-c", "raise SystemExit(5)")
    os.kill(client.engine_pid, signal.SIGKILL)
    await until(lambda: llm.status().state == "restarting")
    assert llm.is_healthy
    waited = await asyncio.wait_for(outcome(llm, [5], forced(3)), AMPLE_SECONDS)
    assert isinstance(waited, EngineUnavailableError)
    assert re.search("cannot be restarted: exit status 5.*restart the server", str(waited))
    assert llm.status().state == "cannot_restart"
    assert not llm.is_healthy
    assert llm.num_unfinished == len(client._in_flight) == 0
    with pytest.raises(EngineUnavailableError, match="exit status 5") as rejected:
        llm.start(None, [5], forced(3))
    assert 0 <= rejected.value.retry_after <= 0.05
    tries = llm.status().restarts
    await until(lambda: llm.status().restarts >= tries + 4)
    client._command = FAKE_ENGINE
    await until(lambda: llm.status().state == "running")
    assert len(tokens(await outcome(llm, [5], forced(3)))) == 3
    assert llm.is_healthy
    llm.close()


async def test_a_restart_with_a_changed_model_fails(
    tiny_model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end keeps the tokenizer and limits of the first model."""
    monkeypatch.setattr(restart_policy, "MAX_FAILURES", 1)
    monkeypatch.setattr(restart_policy, "LONGEST_BACKOFF", 0.05)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir("llama"), folder)
    config = folder / "config.json"
    first = config.read_text()

    client = started(tiny_config(folder, max_num_seqs=8), FAKE_ENGINE)
    llm = AsyncLLM(client=client)
    llm.open()
    config.write_text(json.dumps({**json.loads(first), "vocab_size": json.loads(first)["vocab_size"] + 1}))
    os.kill(client.engine_pid, signal.SIGKILL)
    await until(lambda: llm.status().state == "cannot_restart")
    assert "has changed since the server was started" in (llm.status().last_failure or "")
    config.write_text(first)
    await until(lambda: llm.status().state == "running")
    llm.close()


def test_a_start_that_lacks_descriptors_or_processes_is_attempted_again(
    tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed starts leave no files behind, and the waiting request runs after the restart."""
    with tempfile.TemporaryDirectory() as folder:  # tmp_path may be too long for the path of a socket
        _attempt_starts(tiny_model_dir("llama"), Path(folder), monkeypatch)


def _attempt_starts(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [zmq.ZMQError(errno.EMFILE), OSError(errno.EAGAIN, "no process"), None]
    create, start = wire.zmq.Context.socket, subprocess.Popen
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def scarce_socket(context: zmq.Context[Any], *options: Any) -> Any:
        if isinstance(errors[0], zmq.ZMQError):
            raise errors.pop(0)  # type: ignore[misc]
        return create(context, *options)

    def scarce_process(*arguments: Any, **options: Any) -> Any:
        if isinstance(errors[0], OSError):
            raise errors.pop(0)  # type: ignore[misc]
        return start(*arguments, **options)

    async def run() -> None:
        client = started(tiny_config(model, max_num_seqs=8), FAKE_ENGINE)
        llm = AsyncLLM(client=client)
        llm.open()
        monkeypatch.setattr(wire.zmq.Context, "socket", scarce_socket)
        monkeypatch.setattr(subprocess, "Popen", scarce_process)
        os.kill(client.engine_pid, signal.SIGRTMIN + 3)  # without a name
        await until(lambda: llm.status().state == "restarting")
        assert len(tokens(await outcome(llm, [5], forced(3)))) == 3
        assert llm.status().restarts == 3
        assert len(list(folder.iterdir())) == 1, "only the folder of the running engine"
        llm.close()

    asyncio.run(run())


def test_errors_of_the_first_start_keep_their_type(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len=99 exceeds the 4 tokens"):
        started(tiny_config(tiny_model_dir("llama"), num_kv_blocks=1, max_model_len=99))
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        started(tiny_config(tmp_path / "nothing"), FAKE_ENGINE)
    with pytest.raises(EngineDeadError, match="exit status 3"):
        started(tiny_config(tiny_model_dir("llama")), (sys.executable, "-c", "raise SystemExit(3)"))


@pytest.mark.usefixtures("whole_stacks")
def test_a_first_start_that_is_stuck_raises_an_error_with_its_position(
    tiny_model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_client, "FIRST_START_SECONDS", 2.0)
    check, position = watchdog.Watchdog.check, tmp_path / "is reached"
    # The time counts from the position at which the start is stuck.
    monkeypatch.setattr(watchdog.Watchdog, "check", lambda self, _: check(self, position.exists()))
    code = """
import sys, threading
from pathlib import Path
from chairlift.engine.process import engine_process
threading.Thread(target=threading.Event().wait, daemon=True).start()
engine_process._build = lambda *_: (Path(sys.argv[1]).touch(), threading.Event().wait())
engine_process.main()
"""
    with pytest.raises(EngineDeadError, match=r"not ready 2 s .* it was in run \(engine_process.py:\d+\)") as raised:
        started(tiny_config(tiny_model_dir("llama")), (sys.executable, "-c", code, str(position)), watchdog_timeout=1.0)
    assert "--watchdog-timeout" in str(raised.value)
    assert caplog.text.count("most recent call first") >= 2


def test_a_start_has_no_time_limit_if_the_watchdog_has_none(
    tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_client, "FIRST_START_SECONDS", 0.1)
    with pytest.raises(EngineDeadError, match=r"is stuck: not ready 0\.1 s"):
        started(tiny_config(tiny_model_dir("llama")), ("sleep", "60"), watchdog_timeout=0.05)
    started(tiny_config(tiny_model_dir("llama"), max_num_seqs=8), FAKE_ENGINE, watchdog_timeout=0.0).close()


def test_an_engine_process_exits_when_its_front_end_is_killed(tiny_model_dir: ModelDir) -> None:
    code = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support.process_engines import FAKE_ENGINE, started, tiny_config
print(started(tiny_config(Path(sys.argv[1]), max_num_seqs=8), FAKE_ENGINE).engine_pid, flush=True)
time.sleep(600)
"""
    arguments = [sys.executable, "-c", code, str(tiny_model_dir("llama")), str(Path(__file__).parents[2])]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        engine = psutil.Process(int(front.stdout.readline()))
        assert engine.is_running()
        front.kill()
        engine.wait(AMPLE_SECONDS)
