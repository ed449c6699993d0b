"""The options of the API."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from chairlift.errors import ConfigError
from chairlift.options import check_options, option
from chairlift.server.tools.answer_formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from chairlift.system.input_files import read_text

logger = logging.getLogger("chairlift")

TEXT_OPTIONS: Final = ("tool_call_parser", "reasoning_parser", "clamp_max_tokens", "sse_ping_interval")
"""Options without an effect on models that compute vectors or scores."""


def read_template(file: str, name: str) -> str:
    """Read a chat template. Text with Jinja2 tags or several lines is the template itself. Raises ConfigError."""
    if any(mark in file for mark in ("{{", "{%", "\n")):
        return file
    try:
        return read_text(Path(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}={file!r} cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """How the API renders prompts and parses answers. Raises ConfigError if the name of a parser is unknown, or the
    template cannot be read."""

    OPTION_GROUP: ClassVar = "API"

    tool_call_parser: str = option(
        "auto",
        "Format of the model's tool calls. auto: from its chat template.",
        choices=("auto", *TOOL_CALL_FORMATS),
    )
    reasoning_parser: str = option(
        "auto",
        "Format of the model's reasoning. auto: from its chat template. none: reasoning stays in the content.",
        choices=("auto", "none", *REASONING_FORMATS),
    )
    chat_template: str | None = option(
        None, "Jinja2 file with the chat template, or its text. Default: that of the model.", parse=read_template
    )
    allow_special_tokens_in_content: bool = option(
        False,
        "Convert special tokens in message content, so that a message can contain turns of other roles.",
    )

    clamp_max_tokens: bool = option(
        True,
        "Lower max_tokens to what fits beside the prompt. Default: on; off rejects requests, except for /v1/messages.",
    )

    sse_ping_interval: float = option(
        15.0,
        "Seconds without an event after which a stream sends a comment; of completions and chats only before the first "
        "token. -1 sends none.",
        minimum=-1.0,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.sse_ping_interval <= 0 and self.sse_ping_interval != -1:
            raise ConfigError(f"sse_ping_interval must be above 0, or -1 for none, got {self.sse_ping_interval:g}")

    def log_unused(self, model: str) -> None:
        """Log the options that were given and have no effect on a model that computes vectors or scores."""
        defaults, own = ApiOptions(), {name: getattr(self, name) for name in TEXT_OPTIONS}
        if given := [f"{name}={value}" for name, value in own.items() if value != getattr(defaults, name)]:
            logger.info("%s: no effect on model %r, which generates no text", ", ".join(given), model)
