"""A server that fails in every way: failures are counted by kind, and the other calls are as they were."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from bench_servers import Answer, FakeServer, event, stream, text_chunk, usage_chunk, whole_answer
from starlette.responses import JSONResponse, Response
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import ConfigError
from chairlift.lab.bench.serving.benchmark import ServeOptions, ServeResult, run_serve
from chairlift.lab.bench.serving.http_client import EventLines, RequestFailure
from chairlift.lab.bench.serving.tables import notes


async def well(index: int, body: dict[str, Any]) -> Response:
    return whole_answer(body)


def error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "server_error"}}, status_code=status)


def load(answer: Answer, num_prompts: int = 6, **changes: Any) -> tuple[ServeResult, FakeServer]:
    with FakeServer(answer).running() as server:
        options: dict[str, Any] = {
            "num_prompts": num_prompts,
            "input_len": "fixed:5",
            "output_len": "fixed:4",
            **changes,
        }
        return run_serve(ServeOptions(base_url=server.url, **options)), server


def misbehave(*wrong: Response) -> Answer:
    """The probe and every call after these go well."""

    async def answer(index: int, body: dict[str, Any]) -> Response:
        return wrong[index - 1] if 1 <= index <= len(wrong) else whole_answer(body)

    return answer


WRONG = {
    "http 500": lambda: error(500, "out of luck"),
    "http 503": lambda: Response("<html>gone</html>", status_code=503),
    "cut stream": lambda: stream(event(text_chunk("a ")), cut=True),
    "error in stream": lambda: stream(event(text_chunk("a ")), event({"error": {"message": "engine died"}})),
    "bad chunk": lambda: stream(event(b"{nonsense"), event(b"[DONE]")),
    "not a stream": lambda: JSONResponse({"choices": [{"text": "all at once"}]}),
    "empty answer": lambda: stream(event(b"[DONE]")),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_failure_is_counted_and_the_others_go_on(kind: str) -> None:
    result, server = load(misbehave(WRONG[kind](), WRONG[kind]()))
    metrics = result.metrics
    assert len(server.bodies) == 1 + 6
    assert (metrics.completed, metrics.failed) == (4, 2)
    (failure,) = metrics.failures
    assert (failure.kind, failure.count) == (kind, 2)
    assert metrics.total_output_tokens == 4 * 4, "what a failed call had got does not count"
    ttft = metrics.latencies["ttft"]
    assert ttft is not None
    assert ttft.count == 4
    assert any(note.startswith(f"failed, {kind}: 2") for note in notes(result))


def test_a_load_without_an_answer_ends_with_status_1() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return whole_answer(body) if index == 0 else error(500, "out of luck")

    with FakeServer(answer).running() as server:
        command = ["bench", "serve", "--base-url", server.url, "--num-prompts", "3", "--output-len", "fixed:2"]
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "failed, http 500: 3, the first one: out of luck" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["results"]["failures"]["http 500"]["count"] == 3


def test_messages_are_those_of_the_server() -> None:
    result, _ = load(misbehave(error(500, "out of luck"), WRONG["error in stream"](), error(500, "again")))
    calls = [call.failure for call in result.calls if call.failure is not None]
    assert sorted(calls, key=lambda failure: failure.message) == [
        RequestFailure("http 500", "again"),
        RequestFailure("error in stream", "engine died"),
        RequestFailure("http 500", "out of luck"),
    ]
    assert [(failure.kind, failure.count) for failure in result.metrics.failures] == [
        ("http 500", 2),
        ("error in stream", 1),
    ]


def test_an_end_without_a_reason_is_a_cut() -> None:
    result, _ = load(misbehave(stream(event(text_chunk("a ")))))
    assert [failure.kind for failure in result.metrics.failures] == ["cut stream"]


def test_silence_is_a_timeout() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        if index == 1:
            await asyncio.sleep(1.0)
        return whole_answer(body)

    result, _ = load(answer, timeout=0.5)
    assert [(failure.kind, failure.count) for failure in result.metrics.failures] == [("timeout", 1)]
    assert result.metrics.completed == 5


def test_a_slow_stream_is_slow_and_nothing_else() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return whole_answer(body, gap=0.04)

    result, _ = load(answer, goodput=("tpot:10",))
    assert result.metrics.completed == 6
    assert result.metrics.request_goodput == 0
    for call in result.calls:
        assert call.tpot is not None
        assert call.tpot > 0.01
        assert sum(call.itls) == pytest.approx(call.chunk_times[-1] - call.chunk_times[0])


def test_without_usage_chunks_are_counted() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return whole_answer(body, with_usage=False)

    result, _ = load(answer)
    assert result.metrics.total_output_tokens == 6 * 4
    assert result.metrics.num_counted_by_usage == 0
    assert any("by chunks in 6" in note for note in notes(result))


def test_an_answer_in_one_piece_has_no_tpot() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return stream(event(text_chunk("a b c d", "length")), event(usage_chunk(5, 4)), event(b"[DONE]"))

    metrics = load(answer)[0].metrics
    assert metrics.num_unstreamed == 6
    assert metrics.latencies["tpot"] is None
    assert metrics.latencies["itl"] is None
    assert metrics.total_output_tokens == 6 * 4


def test_short_answers_are_told() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return stream(event(text_chunk("a", "stop")), event(usage_chunk(5, 1)), event(b"[DONE]"))

    result, server = load(answer, ignore_eos=False, max_tokens=9)
    assert result.metrics.num_short == 6
    assert any("6 answers are shorter" in note for note in notes(result))
    assert all("ignore_eos" not in body and body["max_tokens"] == 9 for body in server.bodies[1:])


def test_a_server_without_token_ids_gets_text() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return whole_answer(body) if isinstance(body["prompt"], str) else error(400, "prompt must be a string")

    result, server = load(answer)
    assert result.prompt_format == "text"
    assert result.metrics.completed == 6
    assert [len(body["prompt"].split()) for body in server.bodies[2:]] == [5] * 6
    assert any("refused token ids" in note for note in notes(result))


def test_bodies() -> None:
    result, server = load(well, backend="openai-chat")
    assert result.metrics.completed == 6
    for body in server.bodies:
        (message,) = body.pop("messages")
        assert message["role"] == "user"
        assert body == {
            "model": "fake",
            "max_completion_tokens": 4,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


def test_the_first_request_decides_whether_there_is_a_load() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return error(400, "ignore_eos: unknown")

    with pytest.raises(ConfigError, match=r"ids: http 400: ignore_eos: unknown; as text: .*--no-ignore-eos"):
        load(answer)


def test_the_key_reaches_the_server() -> None:
    with FakeServer(well).running() as server:
        run_serve(ServeOptions(base_url=server.url, num_prompts=1, output_len="fixed:1"), api_key="k1")
    assert set(server.authorizations) == {"Bearer k1"}


def test_chunks_may_hold_what_text_would_break_at() -> None:
    whole = event(text_chunk("one\u2028two\u0085three")) + event(b"[DONE]")
    for size in (1, 7, len(whole)):
        lines = EventLines()
        payloads = [p for start in range(0, len(whole), size) for p in lines.feed(whole[start : start + size])]
        assert len(payloads) == 2
        assert payloads[1] == b"[DONE]"
