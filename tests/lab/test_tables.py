from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest
from rich.text import Text

from chairlift.lab.tables import FILE_WIDTH, print_parts

NOTE, COMMAND = "word " * 60, "--option=value " * 30


class TerminalFile(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_wraps_notes_between_words_and_keeps_commands_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "48")
    monkeypatch.setenv("TERM", "xterm")
    with redirect_stdout(TerminalFile()) as file:
        print_parts([NOTE, Text(COMMAND)])
    *notes, command = file.getvalue().splitlines()
    assert len(notes) > 1
    assert all(set(line.split()) == {"word"} for line in notes)
    assert command.split() == COMMAND.split()


def test_a_file_gets_each_note_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts([NOTE])
    assert len(NOTE) > FILE_WIDTH
    assert capsys.readouterr().out.splitlines() == [NOTE]
