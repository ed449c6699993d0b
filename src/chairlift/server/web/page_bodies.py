"""The request and response bodies of the live page."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chairlift.server.protocol.base import RequestBody

MAX_BURST_REQUESTS: Final = 1000

Count = Annotated[int, Field(ge=1, le=1 << 20)]


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
    recorded_log: str | None = None
    history_seconds: float


class BurstBody(RequestBody):
    """A burst of synthetic requests with lengths between the bounds, drawn with `seed`. Absent fields depend on the
    engine (see `BurstSizes`)."""

    num_requests: Annotated[int, Field(ge=1, le=MAX_BURST_REQUESTS)] | None = None
    min_prompt_tokens: Count | None = None
    max_prompt_tokens: Count | None = None
    min_output_tokens: Count | None = None
    max_output_tokens: Count | None = None
    max_tokens: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        pairs = [(f"min_{kind}_tokens", f"max_{kind}_tokens") for kind in ("prompt", "output")]
        for smaller, larger in [*pairs, ("min_output_tokens", "max_tokens"), ("max_output_tokens", "max_tokens")]:
            low, high = getattr(self, smaller), getattr(self, larger)
            if low is not None and high is not None and low > high:
                raise ValueError(f"{smaller}={low} must be at most {larger}={high}")
        return self


class BurstRequest(BaseModel):
    """A request of a burst with its lengths in tokens."""

    id: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int


class BurstView(BaseModel):
    object: Literal["page.burst"] = "page.burst"
    requests: list[BurstRequest]
