"""Fields that are accepted although nothing reads them, because what is done anyway satisfies the value.

This is the whole table: name, values that are satisfied, reason. A field that is neither here nor honoured is refused,
and so is every other value of these.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from chairlift.server.api.protocol.base import RequestBody
from chairlift.server.api.protocol.item_limits import Metadata, MetadataKey, MetadataValue, check_number_of_pairs

EmptyValue = Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)] | None
"""null, or an empty list or object."""


class CacheControl(RequestBody):
    """Anthropic's cache breakpoint. It has no effect: the prefix cache finds equal prefixes without a hint."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CompatibilityFields(RequestBody):
    """At every endpoint that generates."""

    user: str | None = Field(None, description="Says who asks; nothing here depends on it.")
    safety_identifier: str | None = Field(None, description="Says who asks; nothing here depends on it.")
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    prompt_cache_key: str | None = Field(None, description="The prefix cache finds equal prefixes without a hint.")
    prompt_cache_retention: Literal["in_memory"] | None = Field(None, description="The prefix cache is in memory.")
    moderation: None = Field(None, description="Nothing is moderated.")
    kv_transfer_params: None = Field(None, description="KV memory stays here.")
    mm_processor_kwargs: EmptyValue = Field(None, description="Text only: nothing else is processed.")
    vllm_xargs: EmptyValue = Field(None, description="There are no extensions.")


class SamplingCompatibilityFields(CompatibilityFields):
    """At /v1/completions and /v1/chat/completions."""

    metadata: Metadata | None = Field(None, description="Tags for the caller's own use; nothing is stored.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one tier.")
    use_beam_search: Literal[False] | None = Field(None, description="Answers are sampled.")
    spaces_between_special_tokens: bool | None = Field(None, description="Decoders here put in no spaces of their own.")
    logits_processors: EmptyValue = Field(None, description="There are none.")


class CompletionsCompatibilityFields(SamplingCompatibilityFields):
    """At /v1/completions."""

    suffix: Literal[""] | None = Field(None, description="Nothing is to follow.")
    prompt_embeds: None = Field(None, description="Prompts are text or tokens.")


class ChatCompatibilityFields(SamplingCompatibilityFields):
    """At /v1/chat/completions."""

    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=16)] | None = Field(
        None, description="Answers are text."
    )
    audio: None = Field(None, description="Answers are text.")
    prediction: None = Field(None, description="Nothing is predicted.")
    web_search_options: None = Field(None, description="Nothing is searched.")
    verbosity: Literal["medium"] | None = Field(None, description="The model answers as it does.")
    functions: EmptyValue = Field(None, description="There are none; `tools` are today's form.")
    function_call: Literal["none"] | None = Field(None, description="There are none; `tool_choice` is today's form.")


class ResponsesCompatibilityFields(CompatibilityFields):
    """At /v1/responses. It is stateless: what the client wants remembered, it sends again."""

    background: Literal[False] | None = Field(None, description="Answers are given at once.")
    conversation: None = Field(None, description="Nothing is remembered.")
    previous_response_id: None = Field(None, description="Nothing is remembered.")
    context_management: EmptyValue = Field(None, description="Nothing is remembered.")
    prompt: None = Field(None, description="There are no stored prompts.")
    truncation: Literal["disabled"] | None = Field(None, description="A prompt that is too long is refused.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one tier.")
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(None, description="Built-in tools only, and none is.")


class MessagesCompatibilityFields(CompatibilityFields):
    """At /v1/messages."""

    metadata: Annotated[dict[MetadataKey, MetadataValue | None], BeforeValidator(check_number_of_pairs)] | None = Field(
        None, description="Identifies the caller; has no effect here."
    )
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="There is one tier.")
    inference_geo: Literal["global", "not_available"] | None = Field(None, description="It runs where it runs.")
    cache_control: CacheControl | None = Field(None, description="Every prefix is cached, without a hint.")
    container: None = Field(None, description="Nothing is executed.")
    context_management: EmptyValue = Field(None, description="The client sends the whole conversation.")
    mcp_servers: EmptyValue = Field(None, description="There are none.")
    speed: Literal["standard"] | None = Field(None, description="There is one speed.")
