"""The file of `chairlift report --output` in a browser, without a server."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import FrameLocator, Page, expect

from support.command_runner import invoke
from support.recorded_logs import HOSTILE, recorded_log


def report(*logs: Path) -> Path:
    """Write the page of these logs."""
    output = logs[0].parent / "report.html"
    done = invoke(["report", *map(str, logs), "--output", str(output)])
    assert done.exception is None, done.exception
    assert "report.html shows run.jsonl" in done.stdout.replace(f"{logs[0].parent}/", "")
    return output


def check_run(page: Page | FrameLocator, log: str) -> None:
    """Replay the run that a page or a frame shows."""
    expect(page.locator("#status")).to_have_text(f"Log: {log}")
    page.locator("#scrubber").fill("300")
    expect(page.locator("#figure-running")).to_have_text("2 / 2")
    expect(page.locator("#queue")).to_contain_text("all 2 seats are taken")
    page.locator("#queue button").first.click()
    expect(page.locator("#selected-id")).not_to_be_empty()


def opened(page: Page, path: Path) -> list[str]:
    """Open a file; returns the addresses that it requests and the errors of its scripts, as they come."""
    found: list[str] = []
    page.on("request", lambda request: found.append(request.url))
    page.on("pageerror", lambda error: found.append(str(error)))
    page.goto(path.as_uri())
    return found


def test_a_file_shows_a_run_offline(page: Page, tmp_path: Path) -> None:
    output = report(recorded_log(tmp_path, HOSTILE))
    found = opened(page, output)
    check_run(page, "run.jsonl")
    assert found == [output.as_uri()]
    assert not page.evaluate("window.wasExecuted")


def test_two_runs_are_side_by_side_in_one_file(page: Page, tmp_path: Path) -> None:
    first = recorded_log(tmp_path)
    other = first.rename(tmp_path / "other.jsonl")
    output = report(recorded_log(tmp_path), other)
    found = opened(page, output)
    for log in ("run.jsonl", "other.jsonl"):
        check_run(page.frame_locator(f'iframe[title="{log}"]'), log)
    assert [address for address in found if not re.match("about:srcdoc|blob:", address)] == [output.as_uri()]
    left, right = (page.locator("iframe").nth(index).bounding_box() for index in range(2))
    assert left is not None
    assert right is not None
    assert (left["y"], left["x"] + left["width"]) == (right["y"], right["x"])


def test_a_log_is_not_replaced_by_its_page(tmp_path: Path) -> None:
    log = recorded_log(tmp_path)
    content, link = log.read_bytes(), tmp_path / "link.html"
    link.symlink_to(log)
    for output in (log, link):
        assert f"output={output} is an event log" in invoke(["report", str(log), "--output", str(output)]).output
    assert log.read_bytes() == content


def test_a_log_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    """The first line is valid, and the invalid byte follows long after it."""
    log = recorded_log(tmp_path)
    line = len(log.read_bytes().splitlines()) + 1
    with log.open("ab") as file:
        file.write(b" " * 100_000 + b"\xff")
    failed = invoke(["report", str(log), "--output", str(tmp_path / "report.html")])
    assert f"not an event log: {log}, line {line}: not UTF-8" in str(failed.exception)
