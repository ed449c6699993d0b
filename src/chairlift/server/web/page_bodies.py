"""The request and response bodies of the live page."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chairlift.server.protocol.base import RequestBody

MAX_BURST_REQUESTS: Final = 1000
MAX_SIMULATED_REQUESTS: Final = 1000
MAX_SIMULATED_TOKENS: Final = 32_768
"""Bounds a simulation to less than a second, in which other calls wait for the interpreter lock at times."""

SimulatedPolicy = Literal["static", "fcfs", "srpt", "mlfq"]
"""What the live page can simulate: static batching, and continuous batching with the orders of the queue that need no
tenant, priority or SLO of a request."""

Count = Annotated[int, Field(ge=1, le=1 << 20)]


class SimulationView(BaseModel):
    """Whether the page can simulate other policies, and otherwise why not."""

    available: bool
    policies: tuple[str, ...] = get_args(SimulatedPolicy)
    message: str | None


class PageView(BaseModel):
    """What the live page can show and do with the key of the call.

    `replicas` are the ids of the replicas of the model that the page shows, if it has several engines.
    `recorded_log` is the name of a recorded event log that the page shows instead of an engine.
    """

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    object: Literal["page"] = "page"
    version: str
    models: list[str]
    replicas: list[str] = []
    is_admin: bool
    key: str
    control: bool
    simulation: SimulationView
    recorded_log: str | None = None
    history_seconds: float


class BurstBody(RequestBody):
    """A burst of synthetic requests with lengths between the bounds, drawn with `seed`."""

    num_requests: Annotated[int, Field(ge=1, le=MAX_BURST_REQUESTS)] = 32
    min_prompt_tokens: Count = 16
    max_prompt_tokens: Count = 256
    min_output_tokens: Count = 16
    max_output_tokens: Count = 256
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for kind in ("prompt", "output"):
            low, high = getattr(self, f"min_{kind}_tokens"), getattr(self, f"max_{kind}_tokens")
            if low > high:
                raise ValueError(f"min_{kind}_tokens={low} must be at most max_{kind}_tokens={high}")
        return self


class BurstRequest(BaseModel):
    """A request of a burst with its lengths in tokens."""

    id: str
    num_prompt_tokens: int
    num_output_tokens: int


class BurstView(BaseModel):
    object: Literal["page.burst"] = "page.burst"
    requests: list[BurstRequest]


class SimulatedRequestBody(RequestBody):
    """A request with the lengths that it had. `arrival_time` is in seconds of the engine's clock."""

    request_id: Annotated[str, Field(min_length=1, max_length=256)]
    arrival_time: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    num_prompt_tokens: Count
    num_output_tokens: Count


class SimulationBody(RequestBody):
    policy: SimulatedPolicy = "static"
    requests: Annotated[list[SimulatedRequestBody], Field(min_length=1, max_length=MAX_SIMULATED_REQUESTS)]

    @model_validator(mode="after")
    def _check_requests(self) -> Self:
        num_tokens = sum(each.num_prompt_tokens + each.num_output_tokens for each in self.requests)
        if num_tokens > MAX_SIMULATED_TOKENS:
            raise ValueError(f"the requests have {num_tokens} tokens, at most {MAX_SIMULATED_TOKENS} can be simulated")
        if len({each.request_id for each in self.requests}) < len(self.requests):
            raise ValueError("two requests have the same request_id")
        return self
