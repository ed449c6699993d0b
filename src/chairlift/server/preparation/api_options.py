"""The options of the API that the command line sets."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.server.tools.answer_formats import reasoning_format, tool_call_format


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """How the API renders prompts and parses answers.

    Attributes:
        tool_call_parser: the format of tool calls; `auto` derives it from the chat template.
        reasoning_parser: the format of reasoning; `auto` derives it from the chat template, and `none` keeps reasoning
            in the content.
        chat_template: a Jinja2 template that replaces that of the model.
        allow_special_tokens_in_content: encode special tokens in the content of messages as such, not as plain text.

    Raises:
        ConfigError: the name of a parser is unknown.
    """

    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template: str | None = None
    allow_special_tokens_in_content: bool = False

    def __post_init__(self) -> None:
        tool_call_format(self.tool_call_parser, None)
        reasoning_format(self.reasoning_parser, None)
