"""Recorded traces can be replayed and contain no texts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.events import RequestFinished
from chairlift.lab.workload.traces import read_trace
from chairlift.observability.trace_recorder import TraceRecorder
from chairlift.slo import SLO
from support.fakes import make_request


def arrive(
    recorder: TraceRecorder, name: str, prompt: Sequence[int], max_tokens: int, now: float, priority: int = 0
) -> None:
    request = make_request(name, list(prompt), max_tokens, priority=priority)
    request.arrival_time = now
    recorder.on_add(request)


def finish(recorder: TraceRecorder, name: str, num_output_tokens: int, arrival: float, now: float) -> None:
    counts = {"num_prompt_tokens": 1, "num_output_tokens": num_output_tokens, "num_cached_tokens": 0}
    times = {"arrival_time": arrival, "first_scheduled_time": None, "first_token_time": None}
    recorder.emit(RequestFinished(now, name, "length", num_preemptions=0, **counts, **times))


def common_blocks(a: list[int], b: list[int]) -> int:
    """The number of equal full blocks of 16 tokens at the beginning."""
    count = 0
    while (end := 16 * (count + 1)) <= min(len(a), len(b)) and a[:end] == b[:end]:
        count += 1
    return count


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts with common prefixes."""
    made: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        stem = draw(st.sampled_from(made)) if made and draw(st.booleans()) else []
        own = draw(st.lists(st.integers(0, 100_000), max_size=40))
        made.append([*stem[: draw(st.integers(0, len(stem)))], *own] or [7])
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts())
def test_a_recorded_trace_has_equal_lengths_times_and_prefixes(tmp_path: Path, session: list[list[int]]) -> None:
    """Replayed prompts share exactly the same full blocks, and have the same lengths and times."""
    path = tmp_path / "session"
    with closing(TraceRecorder(path)) as recorder:
        for i, prompt in enumerate(session):
            arrive(recorder, f"r{i}", prompt, 50 + i, 100.0 + i, priority=i)
        for i in reversed(range(len(session))):
            finish(recorder, f"r{i}", i + 1, 100.0 + i, 200.0 + i)
    replayed = read_trace(path)
    assert [(r.arrival, len(r.prompt_token_ids), r.output_len, r.max_tokens, r.priority) for r in replayed] == [
        (float(i), len(prompt), i + 1, 50 + i, i) for i, prompt in enumerate(session)
    ]
    rebuilt = [list(r.prompt_token_ids) for r in replayed]
    for i in range(len(session)):
        for j in range(i):
            assert common_blocks(rebuilt[i], rebuilt[j]) == common_blocks(session[i], session[j])


def test_the_file_has_no_texts_or_ids_and_no_comparable_hashes(tmp_path: Path) -> None:
    """There are no fields for tokens and ids, and the hashes of two sessions differ."""
    tokens = [123_456 + i for i in range(32)]
    lines: list[str] = []
    for name in ("one", "two"):
        with closing(TraceRecorder(tmp_path / name)) as recorder:
            arrive(recorder, "secret-user", tokens, 8, 1_700_000_000.0)
            finish(recorder, "secret-user", 4, 1_700_000_000.0, 1_700_000_002.5)
        lines.append((tmp_path / name).read_text())
    assert "secret" not in lines[0]
    first, second = map(json.loads, lines)
    assert first.keys() == {
        "arrival",
        "prompt_len",
        "output_len",
        "max_tokens",
        "e2e_latency",
        "hash_block_size",
        "prompt_hashes",
    }
    assert (first["arrival"], first["e2e_latency"]) == (0.0, 2.5)
    assert not set(first["prompt_hashes"]) & set(second["prompt_hashes"])


def test_lines_are_there_when_a_request_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "session"
    recorder = TraceRecorder(path)
    arrive(recorder, "a", [1], 4, 0.0)
    arrive(recorder, "b", [1], 4, 1.0)
    arrive(recorder, "c", [1], 4, 2.0)
    assert path.read_text() == ""
    finish(recorder, "b", 4, 1.0, 3.0)
    assert len(path.read_text().splitlines()) == 1
    finish(recorder, "c", 0, 2.0, 3.0)
    assert len(path.read_text().splitlines()) == 1
    recorder.close()
    finish(recorder, "a", 2, 0.0, 9.0)
    (request,) = read_trace(path)
    assert (request.arrival, request.output_len) == (0.0, 4)


def test_many_threads_can_record(tmp_path: Path) -> None:
    path = tmp_path / "session"
    with closing(TraceRecorder(path)) as recorder:

        def serve(worker: int) -> None:
            for i in range(50):
                arrive(recorder, f"{worker}-{i}", bytes(20), 8, float(i))
                finish(recorder, f"{worker}-{i}", 3, float(i), i + 0.5)

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    requests = read_trace(path)
    assert len(requests) == 200
    assert all(a.arrival <= b.arrival for a, b in pairwise(requests))
    assert len({bytes(r.prompt_token_ids[:16]) for r in requests}) == 1


def test_a_full_disk_ends_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    recorder = TraceRecorder("/dev/full")
    for name in "ab":
        arrive(recorder, name, [1], 4, 0.0)
        finish(recorder, name, 1, 0.0, 1.0)
    recorder.close()
    assert caplog.text.count("recording ends") == 1


def test_trace_files_that_cannot_be_written_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_trace=.*session: No such file"):
        TraceRecorder(tmp_path / "nowhere" / "session")
    with pytest.raises(ConfigError, match="must be different files"):
        EngineConfig(record_trace=tmp_path / "log", event_log=tmp_path / "log")


def test_a_recorded_trace_has_the_slos_of_its_requests_and_whether_they_were_streamed(tmp_path: Path) -> None:
    path = tmp_path / "session"
    with closing(TraceRecorder(path)) as recorder:
        for name, slo in (("a", SLO(500, 50)), ("b", SLO(tpot_ms=20.5)), ("c", None)):
            recorder.on_add(make_request(name, [1], 4, slo=slo, is_streamed=name != "b"))
            finish(recorder, name, 2, 0.0, 1.0)
    requests = read_trace(path)
    assert [request.slo for request in requests] == [SLO(500, 50), SLO(tpot_ms=20.5), None]
    assert [request.sampling_params.is_streamed for request in requests] == [True, False, True]


def test_a_recorded_trace_tells_tenants_apart_without_their_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with closing(TraceRecorder(path)) as recorder:
        for index, tenant in enumerate(("alice", "bob", "alice", "")):
            recorder.on_add(make_request(f"r{index}", [1], 4, tenant=tenant))
            finish(recorder, f"r{index}", 1, 0.0, 1.0)
    tenants = [request.tenant for request in read_trace(path)]
    assert tenants[0] == tenants[2] != tenants[1]
    assert tenants[3] == ""
    assert not {"alice", "bob"} & set(path.read_text().split('"'))


def test_prompts_with_another_salt_or_adapter_have_no_common_prefix_in_a_trace(tmp_path: Path) -> None:
    path, prompt = tmp_path / "trace.jsonl", list(range(40))
    owners = [(None, 0), ("5:alice:", 0), ("3:bob:", 0), ("5:alice:", 0), ("5:alice:", 1)]
    with closing(TraceRecorder(path)) as recorder:
        for index, (salt, lora_id) in enumerate(owners):
            recorder.on_add(make_request(f"r{index}", prompt, 4, cache_salt=salt, lora_id=lora_id))
            finish(recorder, f"r{index}", 1, 0.0, 1.0)
    prompts = [request.prompt_token_ids for request in read_trace(path)]
    common = [[common_blocks(first, second) for second in prompts] for first in prompts]
    assert common == [[2 if first == second else 0 for second in owners] for first in owners]
    assert "alice" not in path.read_text()


def test_a_served_session_is_read_back_with_its_lengths_and_common_beginnings(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    llm = LLM(str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=50, record_trace=path)
    prompts = [list(range(3, 40)), [*range(3, 36), 99, 98], [7, 8, 9]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 4, 5)]
    llm.generate(prompts, params)
    llm.close()
    trace = sorted(read_trace(path), key=lambda request: request.output_len)
    assert [(len(r.prompt_token_ids), r.output_len) for r in trace] == [(37, 3), (35, 4), (3, 5)]
    first, second, _ = (list(request.prompt_token_ids) for request in trace)
    assert first[:32] == second[:32]
    assert "token_ids" not in path.read_text()


def test_a_trace_that_cannot_be_written_is_rejected(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_trace=.*No such file or directory; create the folder"):
        LLM(
            str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=50, record_trace=tmp_path / "no" / "t"
        )
