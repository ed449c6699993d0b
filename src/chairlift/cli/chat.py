"""`chairlift chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from chairlift.cli.chat_engine import AnswerStats, ChatEngine, Message
from chairlift.cli.console import (
    MODEL_HELP,
    SAMPLING_DEFAULTS,
    check_model,
    input_errors_explained,
    print_error,
    print_notice,
)
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, ConfigError
from chairlift.option_sources import with_options
from chairlift.options import Selection

PARAMETERS: Final[dict[str, Callable[[str], int | float]]] = {
    "temperature": float,
    "top_p": float,
    "max_tokens": int,
    "seed": int,
}
"""The sampling parameters that /set changes, with the type of their values."""

COMMANDS: Final = {
    "/help": "List these commands.",
    "/system TEXT": "Set the system prompt; without a text, remove it.",
    "/set NAME VALUE": f"Set {', '.join(PARAMETERS)}; without a value, use the default.",
    "/retry": "Generate the last answer again.",
    "/clear": "Begin a new conversation.",
    "/save FILE": "Write the conversation to a JSON file.",
    "/load FILE": "Continue the conversation of a JSON file.",
    "/quit": "End the program; so does Ctrl-D.",
}


class ChatHistory:
    """The messages, the system prompt and the sampling parameters of a conversation."""

    def __init__(self) -> None:
        self.system = ""
        self.messages: list[Message] = []
        self.parameters: dict[str, Any] = {}

    def all_messages(self) -> list[Message]:
        """The messages with the system prompt."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def run(self, line: str) -> str | None:
        """Run a command that begins with `/`.

        Returns:
            text for the user; None if the last answer is to be generated again.

        Raises:
            ConfigError: the command or its argument is invalid.
            EOFError: the program is to end.
        """
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name in ("/quit", "/exit", "/bye"):
            raise EOFError
        if name == "/system":
            self.system = argument
            return "The system prompt is set." if argument else "There is no system prompt."
        if name == "/set":
            return self._set(*argument.split(maxsplit=1))
        if name == "/clear":
            self.messages.clear()
            return "A new conversation."
        if name == "/save":
            return self._save(argument)
        if name == "/load":
            return self._load(argument)
        if name == "/retry":
            self._remove_last_answer()
            return None
        if name == "/help":
            return "\n".join(f"{command:16}  {text}" for command, text in COMMANDS.items())
        raise ConfigError(f"{name} is not a command: /help lists them; a message cannot begin with /")

    def _set(self, name: str = "", value: str = "") -> str:
        if name not in PARAMETERS:
            raise ConfigError(f"/set takes {', '.join(PARAMETERS)}, got {name!r}: for example /set temperature 0.5")
        if not value:
            self.parameters.pop(name, None)
            return f"{name} has its default."
        try:
            self.parameters[name] = PARAMETERS[name](value)
        except ValueError:
            kind = "an integer" if PARAMETERS[name] is int else "a number"
            raise ConfigError(f"{name} must be {kind}, got {value!r}") from None
        return f"{name} is {self.parameters[name]}."

    def _remove_last_answer(self) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise ConfigError("there is no message to answer again")

    def _save(self, path: str) -> str:
        content = {"messages": self.all_messages(), "parameters": self.parameters}
        try:
            _path("/save", path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        return f"{len(self.messages)} messages are saved in {path}."

    def _load(self, path: str) -> str:
        file = _path("/load", path)
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in content["messages"]]
            parameters = {name: PARAMETERS[name](value) for name, value in content.get("parameters", {}).items()}
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{path} is not a conversation that /save has written") from None
        self.system = next((m["content"] for m in messages if m["role"] == "system"), "")
        self.messages = [m for m in messages if m["role"] != "system"]
        self.parameters = parameters
        return f"{len(self.messages)} messages are loaded from {path}."


def _path(command: str, text: str) -> Path:
    if not text:
        raise ConfigError(f"{command} needs the name of a file")
    return Path(text).expanduser()


@with_options
def chat(
    model: Annotated[str | None, Parameter(help=MODEL_HELP)] = None,
    /,
    *,
    system: Annotated[str, Parameter(help="System prompt.")] = "",
    config: Annotated[EngineConfig, Selection(without=("model", *SAMPLING_DEFAULTS))],
) -> None:
    """Read lines of a conversation from the terminal, and answer them."""
    check_model(model, accept_terms=config.accept_terms)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        print_notice("Loading the model ...")
    engine = ChatEngine(replace(config, model=model))
    conversation = ChatHistory()
    conversation.system = system
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # `input` then has editing and a history
        print_notice(f"{engine.name}. /help lists the commands.")
    with asyncio.Runner() as runner:
        try:
            while _turn(runner, engine, conversation, is_terminal):
                pass
        finally:
            runner.run(engine.close())


def _turn(runner: asyncio.Runner, engine: ChatEngine, conversation: ChatHistory, is_terminal: bool) -> bool:
    """Read a line and answer it. Returns False at the end of the input."""
    try:
        with input_errors_explained():
            line = input("> " if is_terminal else "").strip()
        try:
            if not line:
                return True
            if line.startswith("/"):
                if (text := conversation.run(line)) is not None:
                    print_notice(text)
                    return True
            else:
                conversation.messages.append({"role": "user", "content": line})
            _answer(runner, engine, conversation, is_terminal)
        except ChairliftError as error:
            print_error(str(error))
    except EOFError:
        return False
    except KeyboardInterrupt:
        print_notice("\nCtrl-D or /quit ends the program.")
    return True


def _answer(runner: asyncio.Runner, engine: ChatEngine, conversation: ChatHistory, is_terminal: bool) -> None:
    """Print the answer to the conversation as it is generated, and add it. Ctrl-C keeps the text so far."""
    parts: list[str] = []
    stats = AnswerStats()

    async def print_answer() -> None:
        async for text in engine.stream(conversation.all_messages(), conversation.parameters, stats):
            parts.append(text)
            print(text, end="", flush=True)

    try:
        runner.run(print_answer())
    except KeyboardInterrupt:
        if not parts:
            raise
    except ChairliftError:
        if not parts:
            conversation.messages.pop()
        raise
    finally:
        if parts:
            print()
            conversation.messages.append({"role": "assistant", "content": "".join(parts)})
    if is_terminal:
        print_notice(stats.text())
