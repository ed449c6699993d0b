"""Tests `chairlift chat` and `chairlift generate`, as processes and in this one, and the commands of a conversation."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from chairlift.cli.chat import COMMANDS, ChatHistory
from chairlift.cli.chat_engine import AnswerStats
from chairlift.errors import ConfigError
from support.command_runner import invoke
from support.shared_models import shared_model
from support.waiting import AMPLE_SECONDS

COMMAND = [sys.executable, "-m", "chairlift"]
POOL = ["--num-kv-blocks", "100", "--num-threads", "1"]


@pytest.fixture(autouse=True)
def shared_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process use one loaded model, one after the other."""
    monkeypatch.setattr("chairlift.engine.startup.factory.load_model", shared_model)


def conversation() -> ChatHistory:
    talk = ChatHistory()
    talk.messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    return talk


def test_commands_change_the_conversation() -> None:
    talk = conversation()
    talk.run("/system  Be brief. ")
    talk.run("/set temperature 0.5")
    talk.run("/set max_tokens 7")
    assert talk.all_messages()[0] == {"role": "system", "content": "Be brief."}
    assert talk.parameters == {"temperature": 0.5, "max_tokens": 7}
    talk.run("/set temperature")
    assert talk.parameters == {"max_tokens": 7}
    assert talk.run("/retry") is None
    assert [message["role"] for message in talk.messages] == ["user"]
    talk.run("/clear")
    assert talk.messages == []
    with pytest.raises(ConfigError, match="no message"):
        talk.run("/retry")
    with pytest.raises(EOFError):
        talk.run("/quit")
    assert all(command in str(talk.run("/help")) for command in COMMANDS)


def test_a_conversation_is_saved_and_loaded(tmp_path: Path) -> None:
    talk, path = conversation(), tmp_path / "talk.json"
    talk.run("/system Be brief.")
    talk.run("/set seed 3")
    talk.run(f"/save {path}")
    other = ChatHistory()
    assert other.run(f"/load {path}") == f"2 messages are loaded from {path}."
    assert (other.system, other.messages, other.parameters) == (talk.system, talk.messages, {"seed": 3})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/foo", "/foo is not a command: /help lists them"),
        ("/set", "/set takes temperature, top_p, max_tokens, seed, got ''"),
        ("/set heat 3", "got 'heat': for example"),
        ("/set max_tokens many", "max_tokens must be an integer, got 'many'"),
        ("/load", "/load needs the name of a file"),
        ("/load nowhere.json", "nowhere.json cannot be read: No such file"),
        (f"/load {__file__}", "is not a conversation that /save has written"),
        ("/save /nowhere/at/all", "cannot be written: No such file"),
    ],
)
def test_wrong_commands_are_explained(line: str, message: str) -> None:
    talk = conversation()
    with pytest.raises(ConfigError, match=message):
        talk.run(line)
    assert len(talk.messages) == 2


def test_the_numbers_of_an_answer() -> None:
    stats = AnswerStats(0.0, 0.5, 2.5, 64, 32, 11)
    assert stats.text() == "11 tokens, 5.0 tokens/s, first token after 0.50 s, 32 of 64 prompt tokens cached"
    assert AnswerStats().text() == "0 tokens"


LINES = "/set temperature 0\nWhat is the capital of France?\n/wrong\n/retry\n\nAnd of Germany?\n"


def test_piped_lines_are_answered_by_an_engine_in_the_process(smollm2_gguf: Path) -> None:
    result = invoke(["chat", "--system", "Be brief.", *POOL], text=LINES)
    assert result.exit_code == 0, result.output
    first, again, second = result.stdout.splitlines()
    assert "Paris" in first
    assert "Paris" in again
    assert "Germany" in second
    assert "error: /wrong is not a command" in result.stderr


def test_an_error_of_an_answer_is_not_one_of_the_standard_input(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    monkeypatch.setattr("chairlift.cli.chat._answer", mock.Mock(side_effect=error))
    with pytest.raises(UnicodeDecodeError):
        invoke(["chat", *POOL], text="Hello\n")


def test_ctrl_c_stops_an_answer_and_not_the_program(smollm2_gguf: Path) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", str(smollm2_gguf), *POOL],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(terminal)

    unread = ""

    def read_until(pattern: str) -> str:
        nonlocal unread
        deadline = time.monotonic() + AMPLE_SECONDS
        while (found := re.search(pattern, unread)) is None:
            ready, _, _ = select.select([controller], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, unread
            unread += os.read(controller, 4096).decode(errors="replace")
        before, unread = unread[: found.start()], unread[found.end() :]
        return before

    read_until("> ")
    os.write(controller, b"Write a long story about a dragon and a knight.\n")
    read_until(r"knight\.")
    read_until(r"\w\w")  # The words of the answer depend on the seed.
    os.kill(process.pid, signal.SIGINT)
    read_until("> ")
    os.write(controller, b"/set max_tokens 5\n")
    read_until(r"max_tokens is 5\.")
    os.write(controller, b"Hello\n")
    assert "tokens/s" in read_until("cached")
    os.write(controller, b"/quit\n")
    assert process.wait(AMPLE_SECONDS) == 0
    os.close(controller)


def test_generate_reads_and_continues_the_standard_input(smollm2_gguf: Path) -> None:
    result = invoke(["generate", "--max-tokens", "8", *POOL], text="What is the capital of France?\n")
    assert result.stdout == "The capital of France is Paris.\n"
    result = invoke(["generate", "-", "--no-chat", "--max-tokens", "2", *POOL], text="The capital of France is")
    assert result.stdout == "The capital of France is Paris.\n"


def test_generate_prints_json_lines(smollm2_gguf: Path) -> None:
    arguments = ["generate", "What is the capital of France?", "-", "--json", "--max-tokens", "6", *POOL]
    first, second = map(json.loads, invoke(arguments, text="Hi\n").stdout.splitlines())
    assert first["prompt"] == "What is the capital of France?"
    assert first["text"].startswith("The capital of France is")
    assert (first["finish_reason"], first["num_output_tokens"]) == ("length", 6)
    assert second["prompt"] == "Hi"


@pytest.mark.parametrize(("arguments", "text"), [(["-", "-"], "x"), (["-"], ""), ([""], "x")])
def test_generate_rejects_missing_prompts(arguments: list[str], text: str) -> None:
    result = invoke(["generate", *arguments], text=text)
    assert result.exit_code == 2
    assert str(result.exception).startswith("PROMPT")
