from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from chairlift.events import from_json, read_events
from chairlift.observability.event_log import EventFile, encode_event
from support.fakes import make_engine, make_request, run_to_end


def test_every_event_survives_the_file(tmp_path: Path) -> None:
    core, _, _, events = make_engine(num_blocks=6, enable_prefix_caching=False)
    for name in "abc":
        core.add(make_request(name, [1, 2, 3], max_tokens=12))
    run_to_end(core)
    log = EventFile(tmp_path / "log.jsonl")
    for event in events.events:
        log.emit(event)
    log.close()
    assert list(read_events(tmp_path / "log.jsonl")) == events.events
    assert {"request_arrived", "request_waiting", "step", "request_finished"} <= {e.type for e in events.events}


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("nonsense", "Expecting value"),
        ("[1]", "an event must be a JSON object"),
        ('{"type": "surprise"}', "type must be one of"),
        ('{"type": "request_rejected", "time": 1}', "missing"),
        (
            '{"type": "request_rejected", "time": 1, "request_id": "a", "message": "", "x": 1}',
            r"unknown fields \['x'\]",
        ),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(line: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        from_json(line)
    path = tmp_path / "log.jsonl"
    path.write_text(f"\n{line}\n".lstrip())
    with pytest.raises(ValueError, match=r"log\.jsonl, line 1"):
        list(read_events(path))


def test_a_full_disk_ends_the_event_log_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    core, _, _, events = make_engine()
    core.add(make_request("a", [1, 2, 3], max_tokens=200))
    run_to_end(core)
    log = EventFile(Path("/dev/full"))
    with caplog.at_level(logging.WARNING, "chairlift"):
        for event in events.events * 50:
            log.emit(event)
        log.close()
    assert log.error is not None
    assert "event log /dev/full: cannot be written" in caplog.text
    assert encode_event(events.events[0]).startswith(b'{"type":"request_arrived"')


def test_a_log_continues_in_the_file_that_has_its_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    core, _, _, events = make_engine()
    core.add(make_request("a", [1, 2, 3], max_tokens=3))
    run_to_end(core)
    folder, rotated = tmp_path / "logs", tmp_path / "rotated"
    folder.mkdir()
    log, first, second = EventFile(folder / "log"), *events.events[:2]
    log.emit(first)
    log.reopen()
    log.emit(second)
    folder.rename(rotated)
    log.reopen()
    assert f"event_log={folder / 'log'}: No such file or directory; create the folder {folder}" in caplog.text
    log.emit(first)
    folder.mkdir()
    log.emit(replace(first, request_id="\ud800"))
    log.emit(first)
    log.reopen()
    assert log.error is None
    log.emit(second)
    log.close()
    log.reopen()
    log.emit(first)
    assert list(read_events(rotated / "log")) == [first, second, first]
    assert list(read_events(folder / "log")) == [second]


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_event_that_cannot_be_written_does_not_end_the_engine(tmp_path: Path, is_closed: bool) -> None:
    core, _, _, events = make_engine()
    core.add(make_request("a", [1, 2, 3], max_tokens=1))
    run_to_end(core)
    log = EventFile(tmp_path / "log.jsonl")
    first = events.events[0]
    log.emit(first)
    if is_closed:
        log.close()
    else:
        log.emit(replace(first, request_id="\ud800"))  # not in UTF-8
    log.emit(first)
    log.close()
    assert list(read_events(tmp_path / "log.jsonl")) == [first]
    assert (log.error is None) == is_closed
