"""If the engine dies, a stream of each endpoint ends with an error that the official clients raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from api_model import check_type, raw, with_api_tokenizer
from test_api_matrix import EVENTS

from byte_tokenizer import VOCAB_SIZE
from chairlift import AsyncLLM
from running_server import RunningServer, run_server

REQUEST: dict[str, Any] = {"model": "tiny", "stream": True}
ENDLESS = {"ignore_eos": True}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def dying_server(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> Iterator[RunningServer]:
    """A server whose engine dies in its 20th step."""
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    llm = AsyncLLM(model=str(with_api_tokenizer(tiny, tmp_path)), num_kv_blocks=40, num_threads=1)
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
    with httpx.stream("POST", f"{dying_server.url}/v1/responses", json=body, timeout=30) as response:
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
