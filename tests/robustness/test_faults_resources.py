"""A server continues if disk space or descriptors are not available."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from chairlift.events import read_events
from support.plain_http import NO_TLS
from support.served import FAKE_COMMAND, Served, serve
from support.tiny_engine import tiny_options
from support.waiting import AMPLE_SECONDS, wait_for

SMALL = {"num_kv_blocks": 24, "max_model_len": 128, "served_model_name": "tiny"}
FILE_BYTES = 6000
DESCRIPTORS = 48

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs resource limits as Linux has them")


def limited(kind: int, limit: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (limit, limit))


def answer(served: Served, max_tokens: int = 20) -> httpx.Response:
    body = {"prompt": [3, 4, 5], "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(f"{served.url}/v1/completions", json=body, verify=NO_TLS)


def wait_for_word(served: Served, word: str) -> str:
    wait_for(lambda: any(word in line for line in served.stderr_lines))
    return next(line for line in served.stderr_lines if word in line)


def test_a_full_disk_stops_the_event_log_but_not_the_server(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    with serve(tiny_options(tmp_path / "model", event_log=events, **SMALL)) as served:
        (engine,) = served.processes()[1:]
        resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        for _ in range(6):
            assert answer(served).json()["usage"]["completion_tokens"] == 20
        assert "cannot be written, later events are dropped: " in wait_for_word(served, str(events))
        assert answer(served).status_code == 200
        assert served.processes()[1].pid == engine.pid, "it was not restarted"
    check_torn_event_log(events)
    stderr = "".join(served.stderr_lines)
    assert stderr.count(f"event log {events}: cannot be written") == 1
    assert "Traceback" not in stderr


def check_torn_event_log(log: Path) -> None:
    """Check that a log has the first events up to its limit of FILE_BYTES."""
    assert log.stat().st_size == FILE_BYTES
    if not log.read_bytes().endswith(b"\n"):  # the limit may happen to be the end of a line
        with pytest.raises(ValueError, match="line"):
            list(read_events(log))
    kinds = []
    with contextlib.suppress(ValueError):
        for event in read_events(log):
            kinds.append(event.type)  # noqa: PERF401 - up to the torn line
    assert kinds[0] == "engine_started"
    assert "step" in kinds


def test_server_continues_after_running_out_of_descriptors(tmp_path: Path) -> None:
    options = tiny_options(tmp_path, max_num_seqs=8, **SMALL)
    with serve(options, FAKE_COMMAND, preexec_fn=limited(resource.RLIMIT_NOFILE, DESCRIPTORS)) as served:
        port = int(served.url.rsplit(":", 1)[1])
        body = {"prompt": [3], "max_tokens": 100, "ignore_eos": True, "stream": True}
        with contextlib.ExitStack() as crowd:
            client = crowd.enter_context(httpx.Client(base_url=served.url))
            stream = crowd.enter_context(client.stream("POST", "/v1/completions", json=body))
            for _ in range(2 * DESCRIPTORS):
                crowd.enter_context(
                    contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=AMPLE_SECONDS))
                )
            assert stream.status_code == 200
            assert list(stream.iter_lines())[-2] == "data: [DONE]", "the request in progress is answered"
        wait_for(lambda: _is_answered(served))
        assert served.get("/v1/engine")["status"]["restarts"] == 0


def _is_answered(served: Served) -> bool:
    try:
        return answer(served).status_code == 200
    except httpx.TransportError:
        return False
