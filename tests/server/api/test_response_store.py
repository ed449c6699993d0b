"""References of /v1/responses to earlier answers: the conversation that a client would have sent, or OpenAI's error."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_model import with_api_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from chairlift import AsyncLLM
from chairlift.errors import RequestError
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.access.keys import KeyRing, key_record, parse_key
from chairlift.server.api.response_store import RECORD_BYTES, STORE_SECONDS, SWEEP_SECONDS, KeptResponses, ResponseStore
from support.byte_tokenizer import VOCAB_SIZE
from support.running_server import RunningServer, run_server

ANN, BEN = "sk-ann-ann-ann-ann", "sk-ben-ben-ben-ben"
FIXED: dict[str, Any] = {"max_output_tokens": 4, "temperature": 0, "ignore_eos": True}
STORE_BYTES = 1 << 16


def served(folder: Path, store_bytes: int) -> Any:
    keys = [parse_key(key_record(key, name=name), name) for name, key in (("ann", ANN), ("ben", BEN))]
    llm = AsyncLLM(model=str(folder), num_kv_blocks=300, num_threads=1, max_num_seqs=4)
    return run_server(llm, "tiny", keys=KeyRing(keys), limits=ServerLimits(response_store_bytes=store_bytes))


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=4096)
    return with_api_tokenizer(tiny, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with served(folder, STORE_BYTES) as running:
        yield running


def create(server: RunningServer, key: str = ANN, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/responses", {**FIXED, **fields}, key)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def error_of(server: RunningServer, key: str = ANN, **fields: Any) -> tuple[int, str | None, str | None]:
    answer = server.post("/v1/responses", {**FIXED, **fields}, key)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["code"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def shown(response: dict[str, Any]) -> tuple[Any, Any]:
    """What depends on the prompt: its length and the answer."""
    return response["usage"]["input_tokens"], [item.get("content") for item in response["output"]]


def test_a_conversation_by_references_is_the_one_that_is_sent_whole(server: RunningServer) -> None:
    rng = random.Random(5)
    for _ in range(10):
        sent, previous = [], None
        for turn in range(rng.randint(2, 5)):
            text = user("".join(rng.choices("abc ", k=rng.randint(1, 40))))
            whole = create(server, input=[*sent, text], store=False)
            if previous is not None and rng.random() < 0.4:
                references = [
                    {"type": "item_reference", "id": item["id"]} if item.get("id") and rng.random() < 0.8 else item
                    for item in sent
                ]
                response = create(server, input=[*references, text])
            else:
                response = create(server, input=[text], previous_response_id=previous)
            assert response["previous_response_id"] in (None, previous)
            assert shown(response) == shown(whole), turn
            if previous is not None and response["previous_response_id"] is None:
                break  # Such a response begins a new chain, which the next loop tries.
            sent += [text, *response["output"]]
            previous = response["id"]


def test_streams_are_stored_too_and_instructions_are_not_repeated(server: RunningServer) -> None:
    client = server.client(ANN)
    stream = client.responses.create(model="tiny", input="hi", instructions="Be brief.", stream=True, extra_body=FIXED)
    first = list(stream)[-1].response  # type: ignore[union-attr]
    second = create(server, input="go on", previous_response_id=first.id)
    history = [user("hi"), first.output[0].model_dump(), user("go on")]
    assert shown(second) == shown(create(server, input=history, store=False))


def test_references_to_what_is_not_stored_have_the_errors_of_openai(server: RunningServer) -> None:
    unstored, of_ben = create(server, input="hi", store=False), create(server, BEN, input="secret")
    for lost in (unstored, of_ben):
        expected = (400, "previous_response_id", "previous_response_not_found")
        assert error_of(server, input="x", previous_response_id=lost["id"]) == expected
        reference = {"type": "item_reference", "id": lost["output"][-1]["id"]}
        assert error_of(server, input=[user("x"), reference]) == (404, "input", None)
    assert shown(create(server, BEN, input="x", previous_response_id=of_ben["id"]))
    with pytest.raises(openai.NotFoundError, match="Item with id 'msg_0' not found"):
        server.client(ANN).responses.create(model="tiny", input=[{"type": "item_reference", "id": "msg_0"}])


def test_old_responses_leave_a_full_store(server: RunningServer) -> None:
    first = create(server, input="hi")
    for _ in range(2):
        create(server, input="x" * (STORE_BYTES // 20), previous_response_id=first["id"])
    for _ in range(30):
        last = create(server, input="x" * (STORE_BYTES // 20))
    expected = (400, "previous_response_id", "previous_response_not_found")
    assert error_of(server, input="x", previous_response_id=first["id"]) == expected
    assert create(server, input="x", previous_response_id=last["id"])


def test_a_store_of_size_0_keeps_nothing(folder: Path) -> None:
    with served(folder, 0) as server:
        response = create(server, input="hi")
        assert error_of(server, input="x", previous_response_id=response["id"])[0] == 400
        metrics = httpx.get(f"{server.url}/health")
        assert metrics.status_code == 200


def answer(response_id: str, size: int) -> list[dict[str, Any]]:
    return [{"id": f"msg_{response_id}", "text": "x" * size}]


STEP = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 700), st.integers(0, 2000))


@given(st.lists(STEP, max_size=40))
def test_the_size_and_the_age_of_the_store_are_bounded(steps: list[tuple[int, int, int, int]]) -> None:
    now = 0.0
    most = 6 * RECORD_BYTES + 1000
    kept = KeptResponses(most, lambda: now)
    for name, previous, size, seconds in steps:
        now += seconds
        kept.add(str(name), str(previous), [b'"question"'], answer(str(name), size))
        assert all(now - each.last_used <= STORE_SECONDS for each in kept._responses.values())
        assert 0 <= kept.num_bytes <= most
        assert kept.num_bytes == sum(each.num_bytes for each in kept._responses.values())
        assert set(kept._response_of.values()) <= kept._responses.keys()
        with contextlib.suppress(RequestError):  # The parent may have left the store.
            assert kept.conversation(str(name))[-2] == b'"question"'
    now += STORE_SECONDS + 1
    assert kept.item("msg_0") is None
    assert kept.num_bytes == 0


def test_the_responses_of_a_key_without_calls_expire() -> None:
    now = 0.0
    store = ResponseStore(1 << 20, lambda: now)
    kept = store.of("ann")
    kept.add("r", None, [], answer("r", 3))
    now += STORE_SECONDS + SWEEP_SECONDS
    store.of("ben")
    assert (kept.num_bytes, "r" in kept) == (0, False)


def test_a_response_larger_than_the_store_evicts_no_other() -> None:
    kept = KeptResponses(4 * RECORD_BYTES)
    kept.add("small", None, [], answer("small", 3))
    kept.add("large", "small", [b"x" * 4 * RECORD_BYTES], answer("large", 3))
    assert ("small" in kept, "large" in kept) == (True, False)


def test_turns_with_one_request_id_have_different_responses(server: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {ANN}", "x-request-id": "turn"}
    previous, lengths = None, []
    for _ in range(4):
        body = {**FIXED, "input": "hi", "previous_response_id": previous}
        response = httpx.post(f"{server.url}/v1/responses", json=body, headers=headers).json()
        previous = response["id"]
        lengths.append(response["usage"]["input_tokens"])
    assert lengths == sorted(set(lengths))
