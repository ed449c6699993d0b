"""LoRA adapters over HTTP: selected by `model`, listed, loaded and unloaded at run time with an admin key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from chairlift import LLM, AsyncLLM, SamplingParams
from chairlift.errors import ConfigError
from chairlift.server.access.keys import Key, KeyRing, digest
from chairlift.server.api.routes import LARGE_BODY
from chairlift.server.application import make_single_manager
from chairlift.server.preparation.api_options import ApiOptions
from support.byte_tokenizer import VOCAB_SIZE, with_byte_tokenizer
from support.lora_adapters import VARIANTS, write_adapter
from support.running_server import ON_CLUSTER, RunningServer, run_server

ADMIN, PLAIN = "admin-secret-0123456789", "plain-secret-0123456789"
KEYS = KeyRing([Key("admin", digest(ADMIN), is_admin=True), Key("plain", digest(PLAIN))])
PROMPT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_byte_tokenizer(tiny_model_dir("llama", vocab_size=VOCAB_SIZE), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(model, folder / name, seed, **VARIANTS[seed])) for seed, name in enumerate(("a", "b"))
    }


@pytest.fixture(scope="module")
def expected(model: Path, adapters: dict[str, str]) -> dict[str | None, str]:
    llm = LLM(str(model), num_threads=1, num_kv_blocks=100, lora_modules=adapters)
    names: list[str | None] = ["a", "b", None]
    outputs = llm.generate([PROMPT] * 3, GREEDY, lora_request=names, use_tqdm=False)
    texts = {name: output.outputs[0].text for name, output in zip(names, outputs, strict=True)}
    assert len(set(texts.values())) == 3
    return texts


@pytest.fixture
def server(model: Path, adapters: dict[str, str]) -> Iterator[RunningServer]:
    modules = {"a": adapters["a"]}
    llm = AsyncLLM(model=str(model), num_threads=1, num_kv_blocks=100, lora_modules=modules, max_loras=2)
    with run_server(llm, "base", keys=KEYS) as running:
        yield running


def test_an_adapter_has_another_name_than_the_model(model: Path, adapters: dict[str, str]) -> None:
    """A call with this name would select the model, and never the adapter."""
    llm = AsyncLLM(model=str(model), num_threads=1, num_kv_blocks=100, lora_modules={"base": adapters["a"]})
    try:
        with pytest.raises(ConfigError, match="lora_modules: 'base' is the name of the model: use another name"):
            make_single_manager(llm, "base", ApiOptions())
    finally:
        llm.close()


def complete(server: RunningServer, model: str, prompt: str = PROMPT) -> str:
    answer = server.client(PLAIN).completions.create(
        model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.model == model
    return answer.choices[0].text


def test_adapters_are_selected_by_model(server: RunningServer, expected: dict[str | None, str]) -> None:
    assert complete(server, "a") == expected["a"]
    assert complete(server, "base") == expected[None]
    listed = server.client(PLAIN).models.list().data
    assert [(card.id, card.to_dict()["parent"]) for card in listed] == [("base", None), ("a", "base")]
    assert server.client(PLAIN).models.retrieve("a").to_dict()["parent"] == "base"
    with pytest.raises(
        openai.NotFoundError, match="model 'c' is not served here: use 'base' or 'a' or leave out model"
    ):
        complete(server, "c")
    assert server.post("/tokenize", {"model": "a", "prompt": PROMPT}, PLAIN).json()["count"] > 0
    chunks = server.client(PLAIN).completions.create(
        model="a", prompt=PROMPT, max_tokens=8, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected["a"]
    chat = server.client(PLAIN).chat.completions.create(
        model="a", messages=[{"role": "user", "content": "x"}], max_tokens=2
    )
    assert chat.model == "a"


def test_a_large_body_selects_its_adapter(server: RunningServer) -> None:
    padded = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "user": "x" * LARGE_BODY}
    texts = []
    for name in ("a", "base"):
        large = server.post("/v1/completions", {**padded, "model": name}, PLAIN).json()
        small = server.post("/v1/completions", {**padded, "user": "x", "model": name}, PLAIN).json()
        assert large["choices"][0]["text"] == small["choices"][0]["text"]
        assert large["model"] == name
        texts.append(large["choices"][0]["text"])
    assert texts[0] != texts[1]


@pytest.mark.skipif(ON_CLUSTER, reason="adapters of a cluster are fixed")
def test_adapters_are_loaded_and_unloaded_with_an_admin_key(
    server: RunningServer, adapters: dict[str, str], expected: dict[str | None, str]
) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "b", "lora_path": adapters["b"]}
    refused = server.post(load, body, PLAIN)
    assert refused.status_code == 403
    assert "needs an admin key" in refused.json()["error"]["message"]
    assert server.post(load, body, ADMIN).json()["parent"] == "base"
    assert complete(server, "b") == expected["b"]
    again = server.post(load, body, ADMIN)
    assert again.status_code == 400
    assert "lora_name='b' is loaded from" in again.json()["error"]["message"]
    assert again.json()["error"]["param"] == "lora_name"
    third = server.post(load, {**body, "lora_name": "c"}, ADMIN)
    assert "max_loras=2 does not allow another LoRA adapter" in third.json()["error"]["message"]
    taken = server.post(load, {**body, "lora_name": "base"}, ADMIN)
    assert "lora_name='base' is the name of a model" in taken.json()["error"]["message"]
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
    assert server.post(unload, {"lora_name": "b"}, PLAIN).status_code == 403
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'vllm:lora_requests_info{max_lora="2",model_name="base",running_lora_adapters="a,b",waiting' in metrics
    assert server.post(unload, {"lora_name": "b"}, ADMIN).json() == {"id": "b", "object": "model", "deleted": True}
    for name in ("b", "base"):
        unloaded = server.post(unload, {"lora_name": name}, ADMIN)
        assert unloaded.status_code == 404
        expected_message = f"lora_name={name!r} is not loaded; the loaded adapters are: 'a'"
        assert unloaded.json()["error"]["message"] == expected_message
    missing = server.post(load, {**body, "lora_path": adapters["b"] + "-x"}, ADMIN)
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "lora_path"
    for path in ("~nosuchuser/x", "a\0b", "/dev", "x" * 5000):
        odd = server.post(load, {**body, "lora_path": path}, ADMIN)
        assert (odd.status_code, odd.json()["error"]["param"]) == (400, "lora_path"), odd.text
    for name, problem in (("", "at least 1 character"), ("a\nb", "printable"), ("x" * 300, "at most 256 characters")):
        odd = server.post(load, {"lora_name": name, "lora_path": adapters["b"]}, ADMIN)
        assert odd.status_code == 400
        assert problem in odd.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError):
        complete(server, "b")
    assert complete(server, "a") == expected["a"]
