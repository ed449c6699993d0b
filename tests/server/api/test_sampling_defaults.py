"""Sampling defaults of the model, and hints of callers, reach the parameters of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api_model import raw

from chairlift import LLM, AsyncLLM
from chairlift.errors import RequestError
from chairlift.sampling_params import SamplingParams
from chairlift.server.api.engine_call import GeneratingCall
from chairlift.server.api.routes import ENDPOINTS
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.conversation import ModelPlanner
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.compatibility_fields import CompatibilityFields
from chairlift.server.protocol.messages import MessagesRequest
from support.running_server import run_server
from support.tiny_engine import tiny_options

CONFIG = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_new_tokens": 6}
MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "generation_config.json").write_text(json.dumps(CONFIG))
    return tiny_options(folder, num_kv_blocks=60)


@pytest.fixture(scope="module")
def llm(options: dict[str, Any]) -> Iterator[LLM]:
    loaded = LLM(**options)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def planner(llm: LLM) -> ModelPlanner:
    return ModelPlanner(llm.engine, ApiOptions())


def params(planner: ModelPlanner, path: str, **fields: Any) -> SamplingParams:
    endpoint = next(each for each in ENDPOINTS if each.path == path)
    planned = endpoint.plan(planner, endpoint.body.model_validate({**BODIES[path], **fields})).params
    assert isinstance(planned, SamplingParams)
    return planned


@pytest.mark.parametrize("endpoint", BODIES)
def test_requests_have_the_defaults_of_the_model(planner: ModelPlanner, endpoint: str) -> None:
    plain = params(planner, endpoint)
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.7, 0.8, 20)
    given = params(planner, endpoint, temperature=0, top_p=0.5)
    assert (given.temperature, given.top_p, given.top_k) == (0, 0.5, 20)


def test_max_new_tokens_limits_every_request(planner: ModelPlanner, llm: LLM) -> None:
    assert params(planner, "/v1/completions").max_tokens == 6
    assert params(planner, "/v1/completions", max_tokens=5).max_tokens == 5
    assert params(planner, "/v1/messages", max_tokens=100).max_tokens == 6
    assert params(planner, "/v1/chat/completions").max_tokens is None
    (request,) = llm.engine.input_processor.make("r", [1], SamplingParams(max_tokens=None), arrival_time=0)
    assert request.max_tokens == 6
    (late,) = llm.engine.input_processor.make("r", [1] * 508, SamplingParams(max_tokens=None), arrival_time=0)
    assert late.max_tokens == 4
    with pytest.raises(RequestError, match="min_tokens=7 is too large: at most 6 output tokens are possible"):
        llm.engine.input_processor.make(
            "r", [1], SamplingParams(max_tokens=None, min_tokens=7, ignore_eos=True), arrival_time=0
        )


def test_offline_prompts_without_parameters(llm: LLM) -> None:
    expected = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_tokens=None)
    assert llm.get_default_sampling_params() == expected
    (output,) = llm.generate([[5, 6]], use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 6
    assert llm.chat([]) == []


def test_without_a_generation_config(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps(CONFIG))
    options = tiny_options(folder, num_kv_blocks=60, generation_config="vllm")
    assert LLM(**options).get_default_sampling_params() == SamplingParams()
    options["override_generation_config"] = {"temperature": 0.1}
    assert LLM(**options).get_default_sampling_params() == SamplingParams(temperature=0.1)


def test_the_server_shows_the_defaults(options: dict[str, Any]) -> None:
    with run_server(AsyncLLM(**options), "tiny") as server:
        (card,) = server.client().models.list().data
        assert raw(card)["default_sampling_params"] == CONFIG
        answer = server.post("/v1/responses", {"input": "Hello"}).json()
        assert (answer["temperature"], answer["top_p"]) == (0.7, 0.8)
        assert answer["usage"]["output_tokens"] <= CONFIG["max_new_tokens"]


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def params_of(body: CompatibilityFields) -> SamplingParams:
    call = SimpleNamespace(plan=SimpleNamespace(params=SamplingParams()), permit=SimpleNamespace(slo=None), body=body)
    return GeneratingCall.sampling_params(call)  # type: ignore[arg-type]


def test_keys_and_retention_of_openai() -> None:
    given = {"prompt_cache_key": "session 1", "prompt_cache_retention": "24h"}
    params = params_of(ChatCompletionRequest.model_validate({**CHAT, **given}))
    assert (params.prompt_cache_key, params.prompt_cache_retention) == ("session 1", "24h")
    params = params_of(ChatCompletionRequest.model_validate(CHAT))
    assert (params.prompt_cache_key, params.prompt_cache_retention) == (None, None)


@pytest.mark.parametrize(("ttl", "expected"), [("1h", "1h"), ("5m", None), (None, None)])
def test_time_to_live_of_anthropic(ttl: str | None, expected: str | None) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
    system = {"system": [{"type": "text", "text": "s"}, {"type": "text", "text": "t", **mark}]}
    for given in (mark, system):
        assert params_of(MessagesRequest.model_validate({**CHAT, **given})).prompt_cache_retention == expected
