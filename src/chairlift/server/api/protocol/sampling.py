"""The fields that say how tokens are chosen, and what the endpoints have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from chairlift.errors import RequestError
from chairlift.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_TOKEN_IDS, SamplingParams
from chairlift.server.api.protocol.base import RequestBody
from chairlift.server.api.protocol.compatibility_fields import CompatibilityFields, SamplingCompatibilityFields
from chairlift.structured_outputs import MAX_CHOICES, StructuredOutputs

RequestId = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=r"^\.*[A-Za-z0-9_~!$&'()*+,;=:@-][A-Za-z0-9._~!$&'()*+,;=:@-]*$"),
]
"""It is written to logs and terminals, and is a segment of paths: the characters are those that a segment has as they
are (RFC 3986, section 3.3), and not all of them dots, since clients take such segments away (section 5.2.4)."""

TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS)]
StopStrings = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)]

SAMPLING_PARAMS = (
    "temperature",
    "top_p",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "seed",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "bad_words",
    "allowed_token_ids",
)
"""Fields that are sampling parameters of the same name; null is the parameter's default."""


def _few_biases(given: Any) -> Any:
    """Before each of them is looked at."""
    if isinstance(given, dict) and len(given) > MAX_LOGIT_BIAS:
        raise ValueError(f"{len(given)} tokens are more than {MAX_LOGIT_BIAS}")
    return given


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(None, description="A last chunk with the token counts.")
    continuous_usage_stats: bool | None = Field(None, description="Token counts so far in every chunk.")
    include_obfuscation: Literal[False] | None = Field(None, description="Chunks are not padded.")


class StructuredOutputsField(RequestBody):
    """Exactly one of the first five; see `StructuredOutputs`."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None

    def constraint(self) -> StructuredOutputs:
        """The record; raises RequestError."""
        given = self.model_dump(by_alias=True, exclude_none=True)
        return StructuredOutputs(**given)


class TextFormat(RequestBody):
    type: Literal["text"]

    def constraint(self) -> None:
        return None


class JsonObjectFormat(RequestBody):
    type: Literal["json_object"]

    def constraint(self) -> StructuredOutputs:
        return StructuredOutputs(json_object=True)


class JsonSchema(RequestBody):
    name: str
    description: str | None = Field(None, description="For the reader; the schema is what is followed.")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The schema is always followed to the letter.")

    def constraint(self) -> StructuredOutputs:
        return StructuredOutputs(json_object=True) if self.schema_ is None else StructuredOutputs(json=self.schema_)


class JsonSchemaFormat(RequestBody):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    def constraint(self) -> StructuredOutputs:
        return self.json_schema.constraint()


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class EngineFields(CompatibilityFields):
    """What every endpoint that generates takes. Below the line vLLM's names, for what OpenAI does not have."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    seed: int | None = None
    # -- vLLM's --
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
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsField | None = None
    priority: int | None = None
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Cached prefixes are shared only among calls of the same salt."
    )
    # -- ours --
    timeout: float | None = Field(None, description="Seconds after which nobody wants the answer any more.")
    timings: bool = Field(False, description="Tell how long it waited and was computed.")

    @property
    def max_tokens_field(self) -> str:
        """What the caller calls `max_tokens`."""
        return "max_tokens"

    def engine_fields(self) -> dict[str, Any]:
        """Those of these fields that were given."""
        return {name: getattr(self, name) for name in EngineFields.model_fields if name in self.model_fields_set}


class SamplingFields(EngineFields, SamplingCompatibilityFields):
    """What completions and chat completions have in common."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    stop: str | StopStrings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] | None = None
    response_format: ResponseFormat | None = None
    # -- vLLM's --
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def constraint(self) -> StructuredOutputs | None:
        """What the answer has to look like; raises RequestError."""
        given = None if self.structured_outputs is None else self.structured_outputs.constraint()
        wanted = None if self.response_format is None else self.response_format.constraint()
        if given is not None and wanted is not None:
            raise RequestError("response_format and structured_outputs are both given: keep one", "structured_outputs")
        return given or wanted

    @property
    def constraint_field(self) -> str:
        """The field that says what the answer looks like."""
        return "structured_outputs" if self.structured_outputs is not None else "response_format"

    def num_choices(self) -> int:
        """How many are made for each prompt."""
        return 1 if self.n is None else self.n

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Validated parameters: these fields, and `more`. Raises RequestError naming the field."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be streamed: leave out stream", "prompt_logprobs")
        given: dict[str, Any] = {name: value for name in SAMPLING_PARAMS if (value := getattr(self, name)) is not None}
        return SamplingParams(**{"structured_outputs": self.constraint(), **given, **more})

    @property
    def include_usage(self) -> bool:
        """A stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage_stats(self) -> bool:
        """Every chunk of a stream has them."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )
