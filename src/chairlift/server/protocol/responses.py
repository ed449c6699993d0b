"""The request and response bodies of /v1/responses, for text and tools of the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PrivateAttr

from chairlift.errors import RequestError, UnknownItemError
from chairlift.server.protocol.base import (
    MAX_MESSAGES,
    MAX_TOOLS_BYTES,
    Metadata,
    PromptTokensDetails,
    RequestBody,
    StoredItems,
    Timings,
    advisory,
    example_bodies,
    omitted_if_null,
)
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.compatibility_fields import ResponsesCompatibilityFields
from chairlift.server.protocol.response_items import (
    ITEM,
    ITEMS,
    ConvertedInput,
    InputItem,
    InputMessage,
    ItemReference,
    OtherItem,
)
from chairlift.server.protocol.response_tools import CalledTool, OfferedTools, ResponsesToolChoice, ResponsesTools
from chairlift.server.protocol.sampling import EngineFields, JsonObjectFormat, JsonSchema, StopStrings, TextFormat

LOGPROBS = "message.output_text.logprobs"

IncludedOutput = (
    Literal["message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url"]
    | Annotated[str, Field(pattern=r"^(code_interpreter|computer|file_search|web_search)_call[a-z_.]+$")]
)


class ResponsesSchemaFormat(JsonSchema):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponsesText(RequestBody):
    format: Annotated[TextFormat | JsonObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = advisory("Has no effect.", "medium")


class ResponsesReasoning(RequestBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = advisory("Has no effect: it is complete.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = advisory("As `summary`.")
    mode: Literal["standard", "pro"] | None = advisory("Has no effect.", "standard")
    context: Literal["auto", "current_turn", "all_turns"] | None = advisory("Has no effect.", "auto")


class ResponsesStreamOptions(RequestBody):
    include_obfuscation: Literal[False] | None = Field(None, description="Obfuscation of event sizes is not supported.")


class ResponsesRequest(EngineFields, ResponsesCompatibilityFields):
    """The body of POST /v1/responses. The response repeats instructions and tools."""

    own_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    }
    model_config = example_bodies(input="What is the capital of France?", max_output_tokens=32, temperature=0)
    content_fields = ("input", "chat_template_kwargs")
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    store: bool | None = Field(None, description="false: no later request refers to the response. Default: true.")
    previous_response_id: str | None = Field(None, description="The recent response that the input continues.")
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: ResponsesTools | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    include: list[IncludedOutput] | None = Field(
        None, max_length=16, description="Additional output. Only `message.output_text.logprobs` has an effect."
    )
    top_logprobs: int | None = None
    metadata: Metadata | None = Field(None, description="Returned unchanged.")
    stream_options: ResponsesStreamOptions | None = None
    # -- fields of vLLM --
    stop: str | StopStrings | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    _stored: StoredItems | None = PrivateAttr(None)
    _earlier: list[bytes] = PrivateAttr(default_factory=list)
    _referred: dict[str, bytes] = PrivateAttr(default_factory=dict)
    _given: list[bytes] = PrivateAttr(default_factory=list)
    _called_tools: dict[str, CalledTool] = PrivateAttr(default_factory=dict)
    _ignored: list[str] = PrivateAttr(default_factory=list)

    def ignored_content(self) -> list[str]:
        return self._ignored

    def is_stored(self, response_id: str) -> bool:
        return self._stored is not None and response_id in self._stored

    def read_stored(self, open_store: Callable[[], StoredItems]) -> int:
        self._stored = stored = open_store()
        if self.previous_response_id is not None:
            self._earlier = stored.conversation(self.previous_response_id)
        for item in self.input if isinstance(self.input, list) else []:
            if isinstance(item, ItemReference) and (found := stored.item(item.id)) is not None:
                self._referred[item.id] = found
        return sum(map(len, (*self._earlier, *self._referred.values())))

    def keep(self, response_id: str, output: list[dict[str, Any]]) -> None:
        """Store the response, unless the request forbids it."""
        if self._stored is not None and self.store is not False:
            self._stored.add(response_id, self.previous_response_id, self._given, output)

    def called_tool(self, function: str) -> CalledTool:
        return self._called_tools.get(function) or CalledTool(function)

    @property
    def include_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])

    def to_chat(self) -> ChatCompletionRequest:
        """The corresponding chat request; raises RequestError."""
        if self.top_logprobs is not None and not self.include_logprobs:
            raise RequestError(f"top_logprobs is only allowed with include: [{LOGPROBS!r}]", "top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream: true", "stream_options")
        self._check_repeated()
        items = self._conversation()
        later = [tool for item in items if isinstance(item, OtherItem) for tool in item.tools or []]
        tools = OfferedTools(self.tools or [], later)
        converted = ConvertedInput(items, tools)
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice = tools.choice(self.tool_choice)
        self._called_tools, self._ignored = tools.called, sorted(tools.ignored | converted.ignored)
        fields: dict[str, Any] = {
            **self.engine_fields(),
            "messages": [*system, *converted.messages],
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools.functions or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": self.include_logprobs,
            "top_logprobs": self.top_logprobs,
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "stop": self.stop,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatCompletionRequest.from_fields(fields)

    def _check_repeated(self) -> None:
        """Raise RequestError if the tools and `tool_choice`, which each response repeats on the event loop, are too
        large. Hosted tools may have any fields."""
        num_bytes = len(self.model_dump_json(include={"tools", "tool_choice"}, exclude_none=True))
        if num_bytes > MAX_TOOLS_BYTES:
            message = f"tools and tool_choice have {num_bytes} bytes as JSON, but at most {MAX_TOOLS_BYTES} are allowed"
            raise RequestError(f"{message}: declare fewer tools, or shorten them", "tools")

    def _conversation(self) -> list[InputItem]:
        """The items of the conversation: those of earlier responses, and the input with what it refers to."""
        text = {"role": "user", "content": self.input}
        given = [InputMessage.model_validate(text)] if isinstance(self.input, str) else self.input
        given = list(map(self._resolved, given))
        if self._stored is not None and self.store is not False:
            self._given = [ITEM.dump_json(item, exclude_unset=True, by_alias=True) for item in given]
        items: list[InputItem] = [*ITEMS.validate_json(b"[%b]" % b",".join(self._earlier)), *given]
        self._earlier, self._referred = [], {}
        if len(items) > MAX_MESSAGES:
            message = f"the conversation has {len(items)} items with those of previous_response_id, but at most "
            raise RequestError(f"{message}{MAX_MESSAGES} are allowed: start a new one", "previous_response_id")
        return items

    def _resolved(self, item: InputItem) -> InputItem:
        """The item, or the stored one to which it refers. Reasoning may be missing: a later answer does not need it."""
        if not isinstance(item, ItemReference) or (item.id not in self._referred and item.id.startswith("rs_")):
            return item
        if item.id not in self._referred:
            message = (
                f"Item with id {item.id!r:.100} not found: its response was not stored, has been removed for newer "
                "ones, or belongs to another key. Send the item itself, as clients do with store: false."
            )
            raise UnknownItemError(message, "input")
        found: InputItem = ITEM.validate_json(self._referred[item.id])
        return found

    def _response_format(self) -> Any:
        form = None if self.text is None else self.text.format
        if isinstance(form, ResponsesSchemaFormat):
            return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}
        return None if form is None else form.model_dump()


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int = 0


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseObject(BaseModel):
    """A response. A stream sends it at its beginning and at its end. The items of `output` are messages, calls and
    reasoning. Fields that are always null belong to features that are not supported; clients read them."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = omitted_if_null()
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: dict[Literal["code", "message"], str] | None = None
    incomplete_details: dict[Literal["reason"], str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"] = "default"
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = omitted_if_null()
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    access_programs: None = None
    conversation: None = None
    image: None = None
    input_transformations: None = None
    moderation: None = None
    prompt: None = None
    prompt_cache_diagnostics: None = None
    prompt_cache_options: None = None
    tool_usage: None = None
    timings: Timings | None = omitted_if_null()
