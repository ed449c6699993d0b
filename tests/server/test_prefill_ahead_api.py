"""A server with one seat: two answers begin at once, and whoever stands is told of."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from chairlift import AsyncLLM
from plain_http import NO_TLS
from running_server import RunningServer, run_server

MAX_TOKENS = 60


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    llm = AsyncLLM(
        model=str(tiny_model_dir("llama")),
        num_kv_blocks=60,
        skip_tokenizer_init=True,
        num_threads=1,
        max_num_seqs=1,
        prefill_ahead=2,
    )
    with run_server(llm, "tiny") as running:
        running.slow_down(0.03)
        yield running


def stream(client: openai.OpenAI, prompt: list[int], name: str) -> Any:
    extra = {"ignore_eos": True, "request_id": name, "return_token_ids": True}
    return client.completions.create(
        model="tiny", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True, extra_body=extra
    )


def get(server: RunningServer, path: str) -> Any:
    answer = httpx.get(f"{server.url}{path}", timeout=20, verify=NO_TLS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(chunk: Any) -> list[int]:
    return list(chunk.choices[0].token_ids)


def answer(chunks: Iterable[Any]) -> list[int]:
    return [token for chunk in chunks for token in tokens(chunk)]


def metrics(server: RunningServer) -> str:
    return httpx.get(f"{server.url}/metrics", verify=NO_TLS).text


def wait_for_standing(server: RunningServer) -> Any:
    """The only request that stands: its first token is told before the next step leaves it out."""
    deadline = time.monotonic() + 10
    while True:
        found = [one for one in get(server, "/v1/requests")["data"] if one["state"] == "standing"]
        if found or time.monotonic() > deadline:
            (standing,) = found
            return standing


def test_a_stream_begins_ahead_of_its_seat_and_goes_on_with_it(server: RunningServer) -> None:
    client = server.client()
    first, second = (stream(client, [7, index], f"ahead-{index}") for index in (1, 2))
    begun = [tokens(next(first)), tokens(next(second))]
    assert all(begun)
    standing = wait_for_standing(server)
    assert (standing["num_output_tokens"], standing["wait_reason"]) == (1, None)
    call = standing["id"].rpartition("~")[0]
    (explained,) = get(server, f"/v1/requests/{call}/explain")["sequences"]
    assert explained["standing"]["text"].startswith("has its first token and stands until a seat is free: 0 before it")
    batch = get(server, "/v1/engine")["batch"]
    assert (batch["num_running"], batch["num_standing"]) == (2, 1)
    assert re.search(r"^chairlift:num_requests_standing\{.*\} 1\.0$", metrics(server), re.MULTILINE)
    whole = [start + answer(chunks) for start, chunks in zip(begun, (first, second), strict=True)]
    assert [len(token_ids) for token_ids in whole] == [MAX_TOKENS] * 2
    assert whole == [answer(stream(client, [7, index], f"alone-{index}")) for index in (1, 2)]


def test_who_leaves_while_it_stands_leaves_nothing_behind(server: RunningServer) -> None:
    client = server.client()
    first, second = (stream(client, [9, index], f"leaves-{index}") for index in (1, 2))
    assert tokens(next(first))
    assert tokens(next(second))
    second.close()
    assert len(answer(first)) == MAX_TOKENS - 1
    assert get(server, "/v1/requests")["data"] == []
    assert get(server, "/v1/engine")["pool"]["held_blocks"] == 0
