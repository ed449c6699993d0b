"""A stream whose engine dies ends with an error that the official clients understand, at every endpoint."""

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

ASK: dict[str, Any] = {"model": "tiny", "stream": True}
LONG = {"ignore_eos": True}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def doomed(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> Iterator[RunningServer]:
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


def test_chats(doomed: RunningServer) -> None:
    stream = doomed.client().chat.completions.create(**ASK, messages=HELLO, max_tokens=200, extra_body=LONG)
    with pytest.raises(openai.APIError, match="device lost"):
        list(stream)


def test_responses(doomed: RunningServer) -> None:
    body = {**ASK, "input": "Hello", "max_output_tokens": 200, **LONG}
    with httpx.stream("POST", f"{doomed.url}/v1/responses", json=body, timeout=30) as response:
        text = response.read().decode()
    error, failed = text.strip().split("\n\n")[-2:]
    assert error.startswith("event: error\n")
    assert "device lost" in error
    told = openai.types.responses.ResponseFailedEvent.model_validate_json(failed.split("data: ")[1])
    assert told.response.status == "failed"
    check_type(EVENTS["response.failed"], raw(told))


def test_messages(doomed: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=doomed.url, api_key="unused", max_retries=0)
    stream = client.messages.create(**ASK, messages=HELLO, max_tokens=200, extra_body=LONG)
    with pytest.raises(anthropic.APIStatusError, match="device lost"):
        list(stream)
