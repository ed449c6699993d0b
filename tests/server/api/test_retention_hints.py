"""The hints of callers about the prefix cache reach the parameters of a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.sampling_params import SamplingParams
from chairlift.server.api.engine_call import GeneratingCall
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.compatibility_fields import CompatibilityFields
from chairlift.server.protocol.messages import MessagesRequest

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
