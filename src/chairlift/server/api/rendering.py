"""The endpoints of vLLM that return the prompts of a call without computing them: the path of the call with /render."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, RootModel

from chairlift.server.api.chat import create_chat_completion
from chairlift.server.api.completions import create_completion
from chairlift.server.api.endpoint import Endpoint
from chairlift.server.api.engine_call import check_size
from chairlift.server.api.messages import create_message
from chairlift.server.api.responses import create_response
from chairlift.server.preparation.conversation import ModelPlanner, RequestPlan
from chairlift.server.protocol.encoding import encode
from chairlift.server.protocol.sampling import EngineFields

NUMBERS: Final = (
    "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "seed", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "logprobs",
    "prompt_logprobs",
)  # fmt: skip
"""The sampling parameters of constant size. Lists would be repeated for each prompt of a call."""


class RenderedPrompt(BaseModel):
    """A prompt as the engine would receive it, with names of vLLM's `GenerateRequest`.

    `sampling_params` has the numbers that would apply, and the `max_tokens` that fits beside the prompt; lists, texts
    and constraints are left out.
    """

    token_ids: list[int]
    sampling_params: dict[str, float | int | bool | None]
    model: str
    stream: bool
    priority: int
    cache_salt: str | None


class RenderedPrompts(RootModel[list[RenderedPrompt]]):
    """The prompts of a call of /v1/completions."""


def _rendered(planner: ModelPlanner, body: EngineFields, plan: RequestPlan) -> list[dict[str, Any]]:
    clamps = body.clamps_max_tokens or planner.options.clamp_max_tokens
    numbers = {name: getattr(plan.params, name) for name in NUMBERS}
    common = {
        "model": body.model or planner.engine.facts.model_name,
        "stream": bool(body.stream),
        "priority": 0 if "priority" in plan.ignored else body.priority or 0,
        "cache_salt": body.cache_salt,
    }
    check_size(plan, planner.engine.input_processor.limits)
    max_tokens = planner.engine.input_processor.max_tokens
    return [
        {
            "token_ids": token_ids,
            "sampling_params": {**numbers, "max_tokens": max_tokens(plan.params, len(token_ids), clamps=clamps)},
            **common,
        }
        for _text, token_ids in plan.prompts
    ]


def _rendering_of(source: Endpoint[Any]) -> Endpoint[Any]:
    is_list = source is create_completion

    def render(planner: ModelPlanner, body: EngineFields) -> bytes:
        prompts = _rendered(planner, body, source.plan(planner, body))
        return encode(prompts if is_list else prompts[0])

    render.__name__ = source.plan.__name__.replace("create", "render")
    render.__doc__ = f"Return what {source.path} would compute, as token ids (vLLM)."
    return Endpoint(f"{source.path}/render", render, source.body, RenderedPrompts if is_list else RenderedPrompt)


RENDERINGS: Final = [
    _rendering_of(source) for source in (create_completion, create_chat_completion, create_response, create_message)
]
