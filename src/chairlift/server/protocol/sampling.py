"""The fields of sampling and scheduling that several endpoints share."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from chairlift.errors import RequestError
from chairlift.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_IDS,
    SamplingDefaults,
    SamplingParams,
)
from chairlift.server.protocol.base import RequestBody, limit_entries
from chairlift.server.protocol.compatibility_fields import CompatibilityFields, SamplingCompatibilityFields
from chairlift.slo import SLO
from chairlift.structured_outputs import MAX_CHOICES, StructuredOutputs

MAX_REQUEST_ID: Final = 128
REQUEST_ID_PATTERN: Final = r"^\.*[A-Za-z0-9_~!$&'()*+,;=:@-][A-Za-z0-9._~!$&'()*+,;=:@-]*$"
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID, pattern=REQUEST_ID_PATTERN)]
"""An id that the client chooses. It is written to logs and is a segment of the path `/v1/requests/{id}`. It consists of
characters that need no escapes there (RFC 3986, section 3.3), and not of dots alone, which clients remove (5.2.4)."""

TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS)]
StopStrings = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)]


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(None, description="Send the token counts in a last chunk.")
    continuous_usage_stats: bool | None = Field(None, description="Send the token counts so far in every chunk.")
    include_obfuscation: Literal[False] | None = Field(None, description="Obfuscation of chunk sizes is not supported.")


class StructuredOutputsField(RequestBody):
    """A constraint on the output: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class SLOField(RequestBody):
    """The latencies that the request should have. They do not end it."""

    ttft_ms: float | None = Field(None, description="Milliseconds to the first token.")
    tpot_ms: float | None = Field(None, description="Mean milliseconds per output token after the first.")


class TextFormat(RequestBody):
    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    type: Literal["json_object"]


class JsonObjectWithSchemaFormat(JsonObjectFormat):
    """The form of llama.cpp and Together, which some clients send."""

    schema_: dict[str, Any] | None = Field(None, alias="schema")


class JsonSchema(RequestBody):
    name: str
    description: str | None = Field(None, description="Has no effect.")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(
        None, description="Has no effect: the schema is always followed, except for the parts that a header names."
    )


class JsonSchemaFormat(RequestBody):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectWithSchemaFormat | JsonSchemaFormat, Field(discriminator="type")]


class CallFields(CompatibilityFields):
    """The fields that every endpoint that uses the engine accepts."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Cached prefixes are shared only between requests with the same salt."
    )
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Seconds after which the request is aborted with status 408."
    )


class EngineFields(CallFields):
    """The fields that every endpoint that generates accepts."""

    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    seed: int | None = None
    # -- fields of vLLM --
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    structured_outputs: StructuredOutputsField | None = None
    # -- fields of Chairlift --
    slo: SLOField | None = None
    timings: bool = Field(False, description="Add the times of queueing, prefill and decode to the response.")

    def engine_fields(self) -> dict[str, Any]:
        """The fields of this class that the request has set."""
        return {name: getattr(self, name) for name in EngineFields.model_fields if name in self.model_fields_set}

    def own_error(self, error: RequestError) -> RequestError:
        """As for other bodies. Errors of the constraint name the field from which it was taken; errors of the
        grammar of tool calls name `tools`."""
        given = error.param or ""
        is_own = self.structured_outputs is not None or not given.startswith("structured_outputs.")
        field = "tools" if given == "structured_outputs.calls" else None if is_own else "response_format"
        if field is not None:
            reason = str(error).removeprefix(given).removeprefix(" ")
            error = RequestError(f"{field}: its schema {reason}", field)
        return super().own_error(error)


class SamplingFields(EngineFields, SamplingCompatibilityFields):
    """The fields that completions and chat completions share."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    stop: str | StopStrings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], limit_entries(MAX_LOGIT_BIAS)] | None = None
    response_format: ResponseFormat | None = None
    # -- fields of vLLM --
    use_beam_search: bool | None = Field(None, description="Return the `n` best answers of a search with `n` beams.")
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def constraint(self) -> StructuredOutputs | None:
        """The constraint on the output, if any; raises RequestError."""
        structured, form = self.structured_outputs, self.response_format
        constraint = None
        if structured is not None:
            constraint = StructuredOutputs(**structured.model_dump(by_alias=True, exclude_none=True))
        if form is None or form.type == "text":
            return constraint
        if constraint is not None:
            raise RequestError("send only one of response_format and structured_outputs", "structured_outputs")
        schema = form.json_schema.schema_ if form.type == "json_schema" else form.schema_
        if schema is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=schema, has_annotations=True)

    def sampling_params(self, defaults: SamplingDefaults, **overrides: Any) -> SamplingParams:
        """The validated sampling parameters of these fields and of `overrides`; raises RequestError.

        Args:
            defaults: the model's values for fields that the request has not set. Their `max_new_tokens` is a limit for
                every request, as in vLLM.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            message = f"prompt_logprobs={self.prompt_logprobs} cannot be streamed: leave out stream or prompt_logprobs"
            raise RequestError(message, "prompt_logprobs")
        if self.use_beam_search and self.stream:
            raise RequestError(
                "use_beam_search cannot be streamed, because the answers are known at the end: leave out stream or "
                "use_beam_search",
                "use_beam_search",
            )
        names = {field.name for field in fields(SamplingParams)} & SamplingFields.model_fields.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}  # null is the default.
        slo = None if self.slo is None else SLO(self.slo.ttft_ms, self.slo.tpot_ms)
        given |= {"slo": slo, "structured_outputs": self.constraint(), "is_streamed": bool(self.stream)}
        params = defaults.params(**given | overrides)
        limit = defaults.max_new_tokens
        is_limited = limit is not None and params.max_tokens is not None and params.max_tokens > limit
        return replace(params, max_tokens=limit) if is_limited else params
