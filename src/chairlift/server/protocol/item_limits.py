"""Limits on the number of items in one request.

A request over a limit is rejected with the field, the number and the limit. The limits keep the cost of a request
proportional to its size, so that the work for the items of one request does not delay other requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

MAX_MESSAGES: Final = 4096
"""The maximum number of messages of a conversation, or of input items of /v1/responses."""

MAX_CONTENT_PARTS: Final = 1024
"""The maximum number of parts (blocks) in the content of one message."""

MAX_TOOLS: Final = 512
"""The maximum number of tools of a request, and of tools in `tool_choice`."""

MAX_TOOLS_BYTES: Final = 512 << 10
"""The maximum size of all tool definitions of a request as JSON, in bytes."""

MAX_TOOL_CALLS: Final = 256
"""The maximum number of tool calls in one message of the assistant."""

MAX_DOCUMENTS: Final = 1024
"""The maximum number of documents for the chat template."""

MAX_PROMPTS: Final = 2048
"""The maximum number of prompts of one call to /v1/completions."""

MAX_METADATA: Final = 16
"""The maximum number of pairs in `metadata`, with keys of at most 64 and values of at most 512 characters (OpenAI)."""

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
