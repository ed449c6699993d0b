"""Fields that are accepted but not read.

Most of their permitted values describe what the server does anyway. Advisory fields, which popular clients send by
default and whose answers are valid without them, are accepted with every value (ADR 21): `ignored_fields` names those
that had no effect, and the response does so in the header `x-chairlift-ignored`.

This module is the complete table: name, permitted values, reason. Other values of these fields are rejected, and so are
fields that are neither listed here nor implemented.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from chairlift.server.protocol.base import (
    MAX_FIELDS,
    MAX_METADATA,
    CacheControl,
    Metadata,
    MetadataKey,
    MetadataValue,
    ReceivedObject,
    RequestBody,
    advisory,
    limit_entries,
)

EmptyValue = Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)] | None
"""null, or an empty list or object."""


def _without_content(value: Any) -> Any:
    """The value of a field that is not read, of which only whether it is empty has a meaning."""
    if isinstance(value, dict):
        return dict.fromkeys([*value][:1])
    return [None] * bool(value) if isinstance(value, list) else value


AnyFields = Annotated[dict[str, Any], limit_entries(MAX_FIELDS), AfterValidator(_without_content)]
AnyList = Annotated[list[Any], AfterValidator(_without_content)]
ServiceTier = Literal["auto", "default", "standard_only", "flex", "scale", "priority", "fast", "ultrafast"]


class CompatibilityFields(RequestBody):
    """Accepted by every endpoint that generates.

    Attributes:
        clamps_max_tokens: `max_tokens` is lowered to what fits beside the prompt, whatever the server's options are.
    """

    clamps_max_tokens: ClassVar[bool] = False

    @property
    def retention(self) -> str | None:
        """The value of `SamplingParams.prompt_cache_retention`."""
        return self.prompt_cache_retention

    def ignored_content(self) -> list[str]:
        """The fields of messages and tools that have no effect."""
        return []

    user: str | None = advisory("Identifies the end user; has no effect.")
    safety_identifier: str | None = advisory("Identifies the end user; has no effect.")
    store: bool | None = advisory("Has no effect: responses are not stored.", False)
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="How long prefixes stay in the cache is learned from requests with an equal key."
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="24h keeps the prefix in the cache as if it were used again within a second."
    )
    prompt_cache_options: AnyFields | None = advisory("Has no effect: every prefix is cached.", {})
    service_tier: ServiceTier | None = advisory(
        "Has no effect: there is only one service tier.", "auto", "default", "standard_only"
    )
    moderation: None = Field(None, description="Moderation is not supported.")
    kv_transfer_params: None = Field(None, description="KV transfer between servers is not supported.")
    mm_processor_kwargs: EmptyValue = Field(None, description="Only text is supported.")
    rid: None = Field(None, description="Send it as `request_id`.")
    vllm_xargs: EmptyValue = Field(None, description="Arguments for extensions of vLLM are not supported.")


class SamplingCompatibilityFields(CompatibilityFields):
    """Accepted by /v1/completions and /v1/chat/completions."""

    metadata: Metadata | None = advisory("Key-value pairs for the client; they are not stored.", {})
    spaces_between_special_tokens: bool | None = Field(
        None, description="Has no effect: no spaces are added between special tokens."
    )
    logits_processors: EmptyValue = Field(None, description="Logits processors are not supported.")
    # -- fields that vllm-router and sglang-router add to every request --
    no_stop_trim: Literal[False] | None = advisory("Use `include_stop_str_in_output`.")
    return_hidden_states: Literal[False] | None = advisory("Hidden states are not returned.")


class CompletionsCompatibilityFields(SamplingCompatibilityFields):
    """Accepted by /v1/completions."""

    suffix: Literal[""] | None = Field(None, description="Insertion before a suffix is not supported.")
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Has no effect: at most `n`, because answers are not ranked."
    )
    prompt_embeds: None = Field(None, description="Prompts are text or token ids.")


class ChatCompatibilityFields(SamplingCompatibilityFields):
    """Accepted by /v1/chat/completions."""

    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=16)] | None = Field(
        None, description="Answers are text."
    )
    audio: None = Field(None, description="Audio is not supported.")
    prediction: None = Field(None, description="Predicted outputs are not supported.")
    web_search_options: None = Field(None, description="Web search is not supported.")
    verbosity: Literal["low", "medium", "high"] | None = advisory(
        "Has no effect: the verbosity cannot be changed.", "medium"
    )
    functions: EmptyValue = Field(None, description="Deprecated by OpenAI; use `tools`.")
    function_call: Literal["none"] | None = Field(None, description="Deprecated by OpenAI; use `tool_choice`.")
    # -- fields that vllm-router and sglang-router add to every request --
    separate_reasoning: Literal[True] | None = advisory("Reasoning is always separated.")
    stream_reasoning: Literal[True] | None = advisory("Reasoning is always streamed.")


class ResponsesCompatibilityFields(CompatibilityFields):
    """Accepted by /v1/responses."""

    client_metadata: AnyFields | None = advisory("Describes the client (Codex); has no effect.", {})
    background: Literal[False] | None = Field(None, description="Background responses are not supported.")
    conversation: None = Field(None, description="Conversations are not stored.")
    context_management: EmptyValue = Field(None, description="Conversations are not stored.")
    prompt: None = Field(None, description="Prompt templates are not stored.")
    truncation: Literal["disabled", "auto"] | None = advisory(
        "Has no effect: a prompt that is too long is rejected.", "disabled"
    )
    max_tool_calls: Annotated[int, Field(ge=1)] | None = advisory(
        "Limits calls of built-in tools, which are not supported; has no effect."
    )


class ContextEdit(ReceivedObject):
    """A way of Anthropic to shorten a conversation, with its settings."""

    type: Annotated[str, Field(pattern=r"^(clear_thinking|clear_tool_uses|compact)_[0-9]{8}$")]


class ContextManagement(RequestBody):
    edits: Annotated[list[ContextEdit], Field(max_length=16)] | None = None


class MessagesCompatibilityFields(CompatibilityFields):
    """Accepted by /v1/messages."""

    metadata: Annotated[dict[MetadataKey, MetadataValue | None], limit_entries(MAX_METADATA)] | None = advisory(
        "Identifies the end user; has no effect.", {}
    )
    inference_geo: Literal["global", "not_available"] | None = Field(None, description="Has no effect.")
    cache_control: CacheControl | None = Field(
        None, description="A ttl of 1h has the effect of prompt_cache_retention; every prefix is cached."
    )
    container: str | AnyFields | None = advisory("Has no effect: no code is executed.")
    context_management: ContextManagement | EmptyValue = advisory(
        "Has no effect: nothing is removed.", [], {}, ContextManagement(), ContextManagement(edits=[])
    )
    diagnostics: AnyFields | None = advisory("Has no effect: there are no diagnostics of the cache.", {})
    billing_policy: AnyFields | None = advisory("Has no effect: nothing is billed.")
    fallback_credit_token: str | AnyFields | None = advisory("Has no effect: nothing is billed.")
    user_profile_id: str | None = advisory("Identifies the end user; has no effect.")
    fallbacks: str | AnyList | None = advisory("Has no effect: the model does not decline requests.", [])
    mcp_servers: EmptyValue = Field(None, description="MCP servers are not supported.")
    speed: Literal["standard", "fast"] | None = advisory("Has no effect: there is only one speed.", "standard")
