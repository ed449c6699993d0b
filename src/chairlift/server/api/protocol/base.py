"""What every endpoint has: strict bodies, usage, timings, errors."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema

MAX_FIELDS: Final = 256


def _stop_at_first_errors(schema: Any) -> None:
    """Lists are not read on behind an item that is wrong."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_at_first_errors(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_first_errors(part)


class RequestBody(BaseModel):
    """Strict: a number in a string is a string. What is wrong is found out at little cost: an error is a kilobyte, and
    a body has room for millions of wrong values."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"{len(given)} fields in one object are more than {MAX_FIELDS}")
        return given

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first_errors(handler.resolve_ref_schema(schema))
        return schema


class SparseResponse(BaseModel):
    """An answer that leaves out what nobody asked for: the fields of `optional` are there if they are not null."""

    optional: ClassVar[frozenset[str]]

    @model_serializer(mode="wrap")
    def _sparse(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value is not None or name not in self.optional}


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class UsageInfo(SparseResponse):
    optional = frozenset({"completion_tokens_details"})
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class Timings(BaseModel):
    """Seconds, from arrival on; of the answer that ended last. Rates are null where nothing was computed in no time.

    Attributes:
        queue: until the first step.
        prefill: from there to the first token.
        decode: from there to the last one.
        prompt_tokens_per_second: of the prompt without what was cached, while in prefill.
        output_tokens_per_second: after the first token.
    """

    queue: float
    prefill: float
    decode: float
    prompt_tokens_per_second: float | None
    output_tokens_per_second: float | None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chairlift"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """`reason`: why the engine died, unless `status` is "ok"."""

    status: Literal["ok", "restarting", "cannot_restart", "dead"]
    reason: str | None = None


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """What every refusal looks like."""

    error: ErrorInfo
