"""What the operator decides about the API."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.server.tools.call_formats import tool_call_format
from chairlift.server.tools.reasoning_parser import reasoning_format


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Attributes:
    tool_call_parser: how the model writes tool calls, see `tools/call_formats.py`; `auto` goes by its chat template.
    reasoning_parser: the same for its reasoning; `none` leaves reasoning in the content.
    chat_template: Jinja2 text, instead of the model's.
    trust_request_chat_template: requests may bring their own.
    allow_special_tokens_in_content: added tokens that the content of messages spells become these tokens; otherwise
        they are plain text.

    Raises:
        ConfigError: there is no parser of that name.
    """

    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    allow_special_tokens_in_content: bool = False

    def __post_init__(self) -> None:
        tool_call_format(self.tool_call_parser, None)
        reasoning_format(self.reasoning_parser, None)
