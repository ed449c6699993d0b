"""Steps through the chapters of the lesson's page in Chromium."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

from conftest import DESKTOP, PHONE  # type: ignore[attr-defined]

PLAYED = ("static", "continuous", "memory", "pool", "sharing")
"""The chapters with a player."""


def slider_of(page: Page, chapter: str) -> Locator:
    return page.locator(f"#{chapter} input[type=range]").first


def move(page: Page, chapter: str, step: int) -> None:
    slider_of(page, chapter).fill(str(step))


def caption(page: Page, chapter: str) -> str:
    return page.inner_text(f"#{chapter} .caption")


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_every_chapter_can_be_stepped_from_its_start_to_its_end(
    page: Page, lesson_url: str, size: dict[str, int], scheme: str
) -> None:
    page.set_viewport_size(size)  # type: ignore[arg-type]
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(lesson_url)
    for chapter in PLAYED:
        last = int(slider_of(page, chapter).get_attribute("max") or 0)
        assert last > 10
        shown = set()
        for step in (1, last // 3, 2 * last // 3, last):
            move(page, chapter, step)
            expect(page.locator(f"#{chapter} .player .number")).to_have_text(f"step {step} of {last}")
            shown.add(page.inner_text(f"#{chapter} .stage"))
        assert len(shown) == 4
        page.locator(f"#{chapter}").get_by_role("button", name="Previous step").click()
        expect(page.locator(f"#{chapter} .player .number")).to_have_text(f"step {last - 1} of {last}")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_the_page_is_accessible_and_fits_on_a_phone(
    page: Page, lesson_url: str, check_page: Callable[[str], None]
) -> None:
    page.goto(lesson_url)
    check_page("lesson")


def test_seats_are_idle_only_in_static_batches(page: Page, lesson_url: str) -> None:
    page.goto(lesson_url)
    assert page.locator("#static .part.idle").count() > 5
    assert page.locator("#continuous .part.idle").count() == 0
    move(page, "static", 200)
    move(page, "continuous", 200)
    assert "So far 0 % of the seats' time was idle" in caption(page, "continuous")
    assert "So far 0 %" not in caption(page, "static")


def test_a_seat_and_a_waiting_request_say_what_they_are(page: Page, lesson_url: str) -> None:
    page.goto(lesson_url)
    move(page, "static", 60)
    page.get_by_role("button", name="Request 3 in seat 3").first.click()
    facts = page.locator("#static .facts")
    expect(facts).to_contain_text("Request 3")
    expect(facts).to_contain_text("the batch ends with its longest answer")
    page.locator("#static .queue").get_by_role("button", name="Waiting request 8").click()
    expect(facts).to_contain_text("Request 8")
    expect(facts).to_contain_text("Waits because")
    expect(facts).to_contain_text("needs 64 blocks")
    page.locator("#static .queue").get_by_role("button", name="Waiting request 9").focus()
    page.keyboard.press("Enter")
    expect(facts).to_contain_text("it is behind the first request of the queue")


def test_paging_holds_only_what_one_request_has_written(page: Page, lesson_url: str) -> None:
    page.goto(lesson_url)
    lines = page.locator("#memory .stage > p.muted")
    expect(lines.nth(0)).to_contain_text("256 slots held")
    held = [int(lines.nth(row).inner_text().split()[0]) for row in range(3)]
    assert held[0] > held[1] > held[2]
    page.locator("#memory .choices label").nth(4).click()
    expect(lines.nth(0)).to_contain_text("256 slots held")


def test_a_block_of_the_pool_names_its_request_with_the_keyboard(page: Page, lesson_url: str) -> None:
    page.goto(lesson_url)
    facts = page.locator("#pool .facts")
    expect(facts).to_contain_text("the largest free piece has 32")
    page.locator("#pool canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(facts).to_contain_text("KV memory")
    page.get_by_role("radio", name="continuous, paged").check()
    move(page, "pool", 60)
    assert "I 0" in caption(page, "pool")


def test_a_shared_block_is_in_several_tables(page: Page, lesson_url: str) -> None:
    page.goto(lesson_url)
    move(page, "sharing", 8)
    blocks = page.locator("#sharing .tables .block.shared")
    assert blocks.count() >= 6
    blocks.nth(1).click()
    expect(page.locator("#sharing .facts")).to_contain_text("computed once and is stored once")
    assert page.locator("#sharing .block.selected").count() >= 3


def test_the_sliders_show_other_results(page: Page, lesson_url: str) -> None:
    page.goto(lesson_url)
    before = page.inner_text("#explorer .stage")
    seats = page.locator("#explorer input[type=range]").first
    seats.focus()
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#explorer .stage") != before
    assert page.locator("#numbers tbody tr").count() > 12


def test_play_runs_and_pauses_and_is_absent_with_reduced_motion(page: Page, lesson_url: str) -> None:
    page.goto(lesson_url)
    move(page, "static", 1)
    play = page.locator("#static").get_by_role("button", name="Play")
    play.click()
    expect(page.locator("#static .player .number")).not_to_have_text("step 1 of 240")
    page.locator("#static").get_by_role("button", name="Pause").click()
    expect(play).to_be_visible()
    page.emulate_media(reduced_motion="reduce")
    page.reload()
    expect(page.locator("#static .player .primary")).to_be_hidden()
