"""The base classes of request and response bodies, and the records that several endpoints share.

A request over a limit of this module is rejected with the field, the number and the limit. The limits keep the cost of
a request proportional to its size, so that the work for the items of one request does not delay other requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from chairlift.errors import RequestError

MAX_FIELDS: Final = 256  # of one object
MAX_MESSAGES: Final = 4096  # of a conversation; also input items of /v1/responses
MAX_CONTENT_PARTS: Final = 1024  # of one message
MAX_TOOLS: Final = 512  # of a request; also of `tool_choice`
MAX_TOOLS_BYTES: Final = 512 << 10  # of all tools of a request as JSON
MAX_TOOL_CALLS: Final = 256  # of one message
MAX_DOCUMENTS: Final = 1024  # for the chat template
MAX_PROMPTS: Final = 2048  # of one call
MAX_TEXTS: Final = 8192  # in a list of one call for vectors or scores
MAX_POOLED_TOKENS: Final = 4 << 20  # of one call for vectors or scores
MAX_METADATA: Final = 16  # As at OpenAI, like the lengths of keys and values.

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def limit_entries(limit: int) -> BeforeValidator:
    """A validator that rejects an object with too many entries before they are validated one by one."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > limit:
            raise PydanticCustomError("too_long", "has too many entries", {"max_length": limit})
        return given

    return BeforeValidator(check)


Metadata = Annotated[dict[MetadataKey, MetadataValue], limit_entries(MAX_METADATA)]


def _set_fail_fast(schema: Any) -> None:
    """Let the validation of every list end at its first invalid item."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _set_fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _set_fail_fast(part)


@dataclass(frozen=True, slots=True)
class Advisory:
    """Marks a field whose value has no effect, except for values that describe what the server does anyway."""

    neutral: tuple[Any, ...]


def advisory(description: str = "Has no effect.", *neutral: Any) -> Any:
    """An optional field that has no effect (ADR 21). `ignored_fields` names it, unless its value is null or neutral."""
    field: Any = Field(None, description=description)
    field.metadata.append(Advisory(neutral))
    return field


KNOWN_FIELDS: Final[list[frozenset[str]]] = []
"""The names of the fields of each kind of object in requests, for suggestions."""


class StoredItems(Protocol):
    """The responses of one API key that are kept for later requests; see `api.response_store.KeptResponses`."""

    def __contains__(self, response_id: str) -> bool: ...
    def conversation(self, response_id: str) -> list[bytes]: ...
    def item(self, item_id: str) -> bytes | None: ...
    def add(self, response_id: str, previous: str | None, given: list[bytes], output: list[dict[str, Any]]) -> None: ...


def example_bodies(**fields: Any) -> ConfigDict:
    """The configuration of a body that has an example with these fields in /docs."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class RequestBody(BaseModel):
    """A JSON object in a request. Unknown fields are rejected, and types are not converted.

    null is the default of every field that is not required, because clients write null for what they do not set.

    The number of validation errors is limited, because each takes about 1 KiB and a body may contain millions of
    invalid values.

    Attributes:
        advisory_fields: the fields that are declared with `advisory`, with their neutral values.
        content_fields: the fields that are not read after planning, and may be large.
        own_names: name of a field of chat completions -> its name at this endpoint, if it differs.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    advisory_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    content_fields: ClassVar[Sequence[str]] = ()
    own_names: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        fields = cls.model_fields.items()
        KNOWN_FIELDS.append(frozenset(field.alias or name for name, field in fields))
        marks = ((name, mark) for name, field in fields for mark in field.metadata)
        cls.advisory_fields = {name: mark.neutral for name, mark in marks if isinstance(mark, Advisory)}

    @property
    def chat_field_names(self) -> Mapping[str, str]:
        """`own_names`, as far as they depend on the fields that the request has."""
        return self.own_names

    def own_error(self, error: RequestError) -> RequestError:
        """The error with the names that fields of chat completions have at this endpoint.

        Only the field of the error is renamed, and `max_tokens` in errors of `min_tokens`, because other words of a
        message may be a quotation from the request.
        """
        names, field = self.chat_field_names, error.param or ""
        renamed = "max_tokens" if field == "min_tokens" else field
        if renamed not in names:
            return error
        message = re.sub(rf"\b{renamed}\b", names[renamed], str(error))
        return RequestError(message, names.get(field, field), error.code)

    @contextmanager
    def errors_with_own_names(self) -> Iterator[None]:
        """Raise `own_error` of errors that the block raises."""
        try:
            yield
        except RequestError as error:
            raise self.own_error(error) from None

    def read_stored(self, open_store: Callable[[], StoredItems]) -> int:
        """Read the stored items to which the request refers; returns their bytes. Raises RequestError if a response is
        not there."""
        return 0

    def is_stored(self, response_id: str) -> bool:
        """Whether an earlier response with this id is stored."""
        return False

    def drop_content(self) -> None:
        """Set `content_fields` to None, because the body exists until the end of its call."""
        for name in self.content_fields:
            setattr(self, name, None)

    def ignored_fields(self) -> list[str]:
        """The advisory fields that have no effect, including the fields of nested bodies."""
        found: list[str] = []
        for name in self.model_fields_set:
            value = getattr(self, name)
            if isinstance(value, RequestBody):
                found += (f"{name}.{inner}" for inner in value.ignored_fields())
            if name in self.advisory_fields and value not in (None, *self.advisory_fields[name]):
                found.append(name)
        return sorted(found)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """The object without optional fields that are null; raises PydanticCustomError if it has too many fields."""
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:
            raise PydanticCustomError("too_long", "has too many fields", {"max_length": MAX_FIELDS})
        if None not in given.values():
            return given
        optional = {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name not in optional}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _set_fail_fast(handler.resolve_ref_schema(schema))
        return schema


class ReceivedObject(RequestBody):
    """An object that a server has produced, or a tool that only another server has. Unknown fields are ignored."""

    model_config = ConfigDict(extra="allow")


class CacheControl(RequestBody):
    """A cache breakpoint of Anthropic. The prefix cache finds equal prefixes without it; a `ttl` of 1h in the system
    prompt keeps them longer."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class CacheableObject(RequestBody):
    """A part of a prompt that may end with a cache breakpoint."""

    cache_control: CacheControl | None = None


def field_of(value: Any, name: str) -> Any:
    """A field of an object that has been validated, or has not; None without it. Discriminators read both."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def as_list(given: str | list[Any]) -> list[Any]:
    """The texts or prompts of a field that may also be one text or the token ids of one prompt."""
    return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


def labelled_values(field: str, values: Sequence[Any]) -> list[tuple[str, Any]]:
    """The values with their labels in messages: the name of the field, with an index if there are several."""
    return [(f"{field}[{index}]" if len(values) > 1 else field, value) for index, value in enumerate(values)]


def omitted_if_null() -> Any:
    """A field of a response that is null by default, and then left out."""
    return Field(None, exclude_if=lambda value: value is None)


class CacheMiss(BaseModel):
    """Why the prefix cache had no more of a prompt. Fields that do not belong to the reason are left out."""

    reason: str = Field(description="A reason of the guide: never_seen, differs, evicted, ...")
    token: int | None = omitted_if_null()
    text: str | None = omitted_if_null()
    idle_seconds: float | None = omitted_if_null()


class PromptTokensDetails(BaseModel):
    """The tokens of prompts that were cached, and those of them that were on disk."""

    cached_tokens: int
    disk_tokens: int | None = omitted_if_null()
    cache_miss: CacheMiss | None = omitted_if_null()


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class UsageInfo(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = omitted_if_null()


class Timings(BaseModel):
    """The times of the answer that finished last, in seconds. A rate is null if its time is zero."""

    queue: float = Field(description="Seconds from the arrival of the request to its first step.")
    prefill: float = Field(description="Seconds from the first step to the first output token.")
    decode: float = Field(description="Seconds from the first to the last output token.")
    prompt_tokens_per_second: float | None = Field(
        description="Prompt tokens, without cached ones, per second of prefill."
    )
    output_tokens_per_second: float | None = Field(
        description="Output tokens after the first one, per second of decode."
    )


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """An error response, in the form of OpenAI."""

    error: ErrorInfo

    @classmethod
    def of(cls, _status: int, info: ErrorInfo) -> Self:
        """The body of a response with an error."""
        return cls(error=info)
