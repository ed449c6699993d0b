"""If the engine dies, a stream of each endpoint ends with an error that the official clients raise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from api_model import check_type, raw
from test_api_matrix import EVENTS

from chairlift import AsyncLLM
from chairlift.engine.grammar_gate import GrammarGate
from chairlift.engine.input_processor import EngineRequest
from chairlift.errors import RequestError
from support.running_server import RunningServer, run_server

REQUEST: dict[str, Any] = {"model": "tiny", "stream": True}
ENDLESS = {"ignore_eos": True}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def dying_server(api_folder: Path) -> Iterator[RunningServer]:
    """A server whose engine dies in its 20th step."""
    llm = AsyncLLM(model=str(api_folder), num_kv_blocks=40, num_threads=1)
    executor = llm.engine.core._executor  # type: ignore[attr-defined]
    submit, steps = executor.submit, iter(range(20))

    def breaks(output: Any) -> Any:
        if next(steps, None) is None:
            raise RuntimeError("device lost")
        return submit(output)

    executor.submit = breaks
    with run_server(llm, "tiny") as running:
        yield running


def test_chats(dying_server: RunningServer) -> None:
    stream = dying_server.client().chat.completions.create(
        **REQUEST, messages=HELLO, max_tokens=200, extra_body=ENDLESS
    )
    with pytest.raises(openai.APIError, match="device lost"):
        list(stream)


def test_responses(dying_server: RunningServer) -> None:
    body = {**REQUEST, "input": "Hello", "max_output_tokens": 200, **ENDLESS}
    with httpx.stream("POST", f"{dying_server.url}/v1/responses", json=body) as response:
        text = response.read().decode()
    error, failed = text.strip().split("\n\n")[-2:]
    assert error.startswith("event: error\n")
    assert "device lost" in error
    event = openai.types.responses.ResponseFailedEvent.model_validate_json(failed.split("data: ")[1])
    assert event.response.status == "failed"
    check_type(EVENTS["response.failed"], raw(event))


def test_messages(dying_server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=dying_server.url, api_key="unused", max_retries=0)
    stream = client.messages.create(**REQUEST, messages=HELLO, max_tokens=200, extra_body=ENDLESS)
    with pytest.raises(anthropic.APIStatusError, match="device lost"):
        list(stream)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
OWN_FORMAT = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
UNNAMED = {"type": "json_schema", "schema": SCHEMA}
FUNCTION = {"name": "add", "parameters": SCHEMA}
FORCED = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
WITH_GRAMMAR: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": "Hello", "response_format": FORMAT}, "response_format: its schema is too complex"),
    ("completions", {"prompt": "Hello", "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json is too"),
    ("chat/completions", {"messages": HELLO, "response_format": FORMAT}, "response_format: its schema is too complex"),
    ("chat/completions", {"messages": HELLO, **FORCED}, "tools: its schema is too complex"),
    ("responses", {"input": "Hello", "text": OWN_FORMAT}, "text: its schema is too complex"),
    ("messages", {"messages": HELLO, "max_tokens": 9, "output_config": {"format": UNNAMED}}, "output_config: its"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "message"), WITH_GRAMMAR, ids=lambda value: str(value)[:40])
def test_an_error_names_the_field_of_a_grammar_that_only_the_engine_rejects(
    api_server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], message: str,
    stream: bool,
) -> None:  # fmt: skip
    def reject(_gate: GrammarGate, request: EngineRequest) -> None:
        constraint = request.sampling_params.structured_outputs
        assert constraint is not None
        field = f"structured_outputs.{'json' if constraint.calls is None else 'calls'}"
        raise RequestError(f"{field} is too complex", field)

    monkeypatch.setattr(GrammarGate, "check", reject)
    answer = api_server.post(f"/v1/{path}", {"model": "tiny", "stream": stream, **fields})
    assert answer.status_code == (200 if stream else 400)
    assert f'"message":"{message}' in answer.text
    if path != "messages":
        param = message.split(": ")[0].split(" ")[0]
        assert f'"param":"{param}"' in answer.text
