"""`bench serve` against a failing server: failures are counted by kind, and other requests are unaffected."""

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
from chairlift.lab.bench.serving.http_client import EventLines, HttpFailure
from chairlift.lab.bench.serving.tables import notes


async def answer_completely(index: int, body: dict[str, Any]) -> Response:
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


def fail_with(*wrong: Response) -> Answer:
    """Answers the first request, fails with the given responses, and answers the other requests."""

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
def test_failures_are_counted_and_other_requests_continue(kind: str) -> None:
    result, server = load(fail_with(WRONG[kind](), WRONG[kind]()))
    metrics = result.metrics
    assert len(server.bodies) == 1 + 6
    assert (metrics.completed, metrics.failed) == (4, 2)
    (failure,) = metrics.failures
    assert (failure.kind, failure.count) == (kind, 2)
    assert metrics.total_output_tokens == 4 * 4, "tokens of failed requests are not counted"
    ttft = metrics.latencies["ttft"]
    assert ttft is not None
    assert ttft.count == 4
    assert any(note.startswith(f"failed with {kind}: 2") for note in notes(result))


def test_a_workload_without_an_answer_ends_with_status_1() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return whole_answer(body) if index % 4 == 0 else error(500, "out of luck")

    with FakeServer(answer).running() as server:
        command = ["bench", "serve", "--base-url", server.url, "--num-prompts", "3", "--output-len", "fixed:2"]
        result = CliRunner().invoke(app, command)
        as_json = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == as_json.exit_code == 1
    assert "failed with http 500: 3 requests; the first message: out of luck" in result.stdout
    assert json.loads(as_json.stdout)["results"]["failures"]["http 500"]["count"] == 3


def test_messages_of_the_server_are_kept() -> None:
    result, _ = load(fail_with(error(500, "out of luck"), WRONG["error in stream"](), error(500, "again")))
    failures = [record.failure for record in result.records if record.failure is not None]
    assert sorted(failures, key=lambda failure: failure.message) == [
        HttpFailure("http 500", "again"),
        HttpFailure("error in stream", "engine died"),
        HttpFailure("http 500", "out of luck"),
    ]
    assert [(failure.kind, failure.count) for failure in result.metrics.failures] == [
        ("http 500", 2),
        ("error in stream", 1),
    ]


def test_an_end_without_finish_reason_is_a_cut_stream() -> None:
    result, _ = load(fail_with(stream(event(text_chunk("a ")))))
    assert [failure.kind for failure in result.metrics.failures] == ["cut stream"]


def test_a_response_without_data_is_a_timeout() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        if index == 1:
            await asyncio.sleep(1.0)
        return whole_answer(body)

    result, _ = load(answer, timeout=0.5)
    assert [(failure.kind, failure.count) for failure in result.metrics.failures] == [("timeout", 1)]
    assert result.metrics.completed == 5


def test_a_slow_stream_is_not_a_failure() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return whole_answer(body, gap=0.04)

    result, _ = load(answer, goodput=("tpot:10",))
    assert result.metrics.completed == 6
    assert result.metrics.request_goodput == 0
    for record in result.records:
        assert record.tpot is not None
        assert record.tpot > 0.01
        assert sum(record.itls) == pytest.approx(record.chunk_times[-1] - record.chunk_times[0])


def test_chunks_are_counted_without_usage() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return whole_answer(body, with_usage=False)

    result, _ = load(answer)
    assert result.metrics.total_output_tokens == 6 * 4
    assert result.metrics.num_counted_by_usage == 0
    assert any("by chunks in 6" in note for note in notes(result))


def test_an_answer_in_one_chunk_has_no_tpot() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return stream(event(text_chunk("a b c d", "length")), event(usage_chunk(5, 4)), event(b"[DONE]"))

    metrics = load(answer)[0].metrics
    assert metrics.num_unstreamed == 6
    assert metrics.latencies["tpot"] is None
    assert metrics.latencies["itl"] is None
    assert metrics.total_output_tokens == 6 * 4


def test_short_answers_are_noted() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return stream(event(text_chunk("a", "stop")), event(usage_chunk(5, 1)), event(b"[DONE]"))

    result, server = load(answer, ignore_eos=False, max_tokens=9)
    assert result.metrics.num_short == 6
    assert any("6 answers are shorter" in note for note in notes(result))
    assert all("ignore_eos" not in body and body["max_tokens"] == 9 for body in server.bodies[1:])


def test_a_server_that_rejects_token_ids_receives_text() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return whole_answer(body) if isinstance(body["prompt"], str) else error(400, "prompt must be a string")

    result, server = load(answer)
    assert result.prompt_format == "text"
    assert result.metrics.completed == 6
    assert [len(body["prompt"].split()) for body in server.bodies[2:]] == [5] * 6
    assert any("rejected token ids" in note for note in notes(result))


def test_bodies_of_chat_requests() -> None:
    result, server = load(answer_completely, backend="openai-chat")
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


def test_a_failed_first_request_is_an_error() -> None:
    async def answer(index: int, body: dict[str, Any]) -> Response:
        return error(400, "ignore_eos: unknown")

    with pytest.raises(ConfigError, match=r"ids: http 400: ignore_eos: unknown; as text: .*--no-ignore-eos"):
        load(answer)


def test_the_api_key_is_sent() -> None:
    with FakeServer(answer_completely).running() as server:
        run_serve(ServeOptions(base_url=server.url, num_prompts=1, output_len="fixed:1"), api_key="k1")
    assert set(server.authorizations) == {"Bearer k1"}


def test_chunks_may_contain_unicode_line_separators() -> None:
    whole = event(text_chunk("one\u2028two\u0085three")) + event(b"[DONE]")
    for size in (1, 7, len(whole)):
        lines = EventLines()
        payloads = [p for start in range(0, len(whole), size) for p in lines.feed(whole[start : start + size])]
        assert len(payloads) == 2
        assert payloads[1] == b"[DONE]"
