"""Limits on the number of items in one request.

A request over a limit is rejected with the field, the number and the limit. The limits keep the cost of a request
proportional to its size: no field may hold so many items that work for each of them delays other requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

MAX_MESSAGES: Final = 4096
"""Messages of a conversation, or items of the input of /v1/responses."""

MAX_CONTENT_PARTS: Final = 1024
"""Parts (blocks) in the content of one message."""

MAX_TOOLS: Final = 512
"""Tools of a request, and tools that `tool_choice` names."""

MAX_TOOLS_BYTES: Final = 512 << 10
"""Bytes of the definitions of all tools of a request, as JSON."""

MAX_TOOL_CALLS: Final = 256
"""Tool calls in one message of the assistant."""

MAX_DOCUMENTS: Final = 1024
"""Documents that a chat template receives."""

MAX_PROMPTS: Final = 2048
"""Prompts of one call to /v1/completions."""

MAX_METADATA: Final = 16
"""Pairs in `metadata`, of keys of at most 64 and values of at most 512 characters (the limits of OpenAI)."""

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def check_number_of_pairs(given: Any) -> Any:
    """Reject an object with too many pairs before each pair is validated: each wrong pair would be an error of its
    own."""
    if isinstance(given, dict) and len(given) > MAX_METADATA:
        raise PydanticCustomError("too_long", "has too many entries", {"max_length": MAX_METADATA})
    return given


Metadata = Annotated[dict[MetadataKey, MetadataValue], BeforeValidator(check_number_of_pairs)]
