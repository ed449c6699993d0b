"""Tests the pages in Traditional Chinese in Chromium: no text is left in English, and everything fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from chairlift.lab.bench.machine import machine_facts
from conftest import DESKTOP, PHONE  # type: ignore[attr-defined]
from support.command_runner import invoke
from support.recorded_logs import recorded_log
from support.running_server import RunningServer, completion_body
from support.waiting import wait_for

CHINESE = pytest.mark.parametrize("page", ["zh-TW"], indirect=True)
NAMES = re.compile(
    r"（[A-Za-z ]+）|--[a-z-]+|(?:torch|Python|chairlift|Chairlift) [\w.+]+|English|Anyscale|Daniel|Kwon|SOSP'23|"
    r"TGI|Ray Serve|PagedAttention|[Tt]okens?|goodput|beam|API|KV|SLO|TTFT|ITL|TPOT|GPU|CPU|RSS|P99|GiB|MiB|"
    r"burst-\w+-\d+~\d+|run\.jsonl|"
    r"\b(?:Chairlift|max_tokens|static|max|exact|pow2|paged|fcfs|srpt|mlfq|length|fake|tiny(?:-model|_llama_[0-9a-f]+)?|[A-D]+|ms|min)\b|"
    + re.escape(machine_facts().cpu)
)
"""Names of options, policies, requests, files, models and persons, units, and terms, also those in brackets."""

TEXTS = """
() => [...document.querySelectorAll("title, body, body *:not(script)")].flatMap(element => [
  ...[...element.childNodes].filter(node => node.nodeType === Node.TEXT_NODE).map(node => node.data),
  ...["aria-label", "aria-valuetext", "placeholder"].map(name => element.getAttribute(name) ?? ""),
  element.dataset.more ?? "",
])
"""
OVERFLOWING = """
() => [...document.querySelectorAll("main *")].filter(element => {
  const {overflow, display} = getComputedStyle(element);
  const isBox = element.clientWidth && overflow === "visible" && display !== "inline";
  return isBox && element.checkVisibility() && element.scrollWidth > element.clientWidth + 1;
}).map(element => element.outerHTML.slice(0, 200))
"""


def english_texts(page: Page) -> list[str]:
    """The texts and labels of a page that have English words besides names."""
    texts: set[str] = set(page.evaluate(TEXTS))
    return sorted(text for text in texts if re.search(r"[A-Za-z]{2,}", NAMES.sub("", text)))


def check_chinese(page: Page) -> None:
    """Check that the open page has no English text, and that nothing is wider than its place."""
    assert page.evaluate("document.documentElement.lang") == "zh-TW"
    assert english_texts(page) == []
    for size in (DESKTOP, PHONE):
        page.set_viewport_size(size)
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], "it scrolls sideways"
        assert page.evaluate(OVERFLOWING) == []
    page.set_viewport_size(DESKTOP)


def describe_cells(page: Page, selector: str, count: int) -> None:
    """Check the texts of cells of a canvas, which the keyboard reaches one after the other."""
    page.locator(selector).focus()
    for _ in range(count):
        page.keyboard.press("ArrowLeft" if selector == "#lanes" else "ArrowRight")
        assert english_texts(page) == []


@CHINESE
def test_the_live_page_is_in_the_language_of_the_browser(page: Page, live: RunningServer) -> None:
    page.goto(live.url)
    expect(page.locator("#status")).to_have_text("即時")
    check_chinese(page)
    with live.hold_steps() as gate:
        page.get_by_role("button", name="送出一波請求").click()
        expect(page.locator("#burst-status")).to_contain_text("已送出 16 個請求：提示 ")
        gate.allow(4)
        expect(page.locator("#figure-running")).to_have_text("8 / 8")
        expect(page.locator("#queue th").first).to_contain_text("8 個座位都有人坐")
        page.locator("#queue button").first.click()
        expect(page.locator("#explanation")).to_contain_text("8 個座位都有人坐")
        expect(page.locator("#facts")).to_contain_text("等待的原因")
        check_chinese(page)
        page.locator("section > details > summary").click()
        page.locator("#batch button").first.click()
        expect(page.locator("#facts")).to_contain_text("執行中")
        describe_cells(page, "#lanes", 2)
        describe_cells(page, "#memory-map", 2)
        page.get_by_role("button", name="暫停").click()
        expect(page.locator("#status")).to_have_text("已暫停")
        check_chinese(page)
    page.reload()
    wait_for(lambda: not live.llm.num_unfinished)


@CHINESE
def test_the_language_can_be_changed_and_other_choices_are_kept(page: Page, live: RunningServer) -> None:
    page.goto(f"{live.url}/?model=tiny")
    page.get_by_role("link", name="English").click()
    page.wait_for_url("**/?model=tiny&lang=en")
    expect(page.get_by_role("button", name="Send the burst")).to_be_visible()
    assert live.post("/v1/completions", completion_body(3)).status_code == 200
    page.locator("#lanes").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.evaluate("location.search") == "?model=tiny&lang=en", "a selection changes neither"
    page.get_by_role("link", name="繁體中文").click()
    page.wait_for_url("**/?model=tiny&lang=zh-TW")
    expect(page.get_by_role("button", name="送出一波請求")).to_be_visible()


@pytest.mark.parametrize(
    ("page", "lang"), [("zh-Hant", "zh-TW"), ("zh-HK", "zh-TW"), ("zh-CN", "en"), ("de-DE", "en")], indirect=["page"]
)
def test_other_languages_of_the_browser(page: Page, live: RunningServer, lang: str) -> None:
    page.goto(live.url)
    expect(page.locator("html")).to_have_attribute("lang", lang)


@CHINESE
def test_the_chat_page_has_one_language(page: Page, live: RunningServer) -> None:
    page.goto(f"{live.url}/chat")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert page.evaluate("document.documentElement.lang") == "en"
    assert not re.search("[\u4e00-\u9fff]", " ".join(page.evaluate(TEXTS)))


def test_the_lesson_is_in_chinese(page: Page, lesson_url: str) -> None:
    page.goto(f"{lesson_url}?lang=zh-TW")
    check_chinese(page)
    for chapter in ("static", "continuous", "memory", "pool", "sharing"):
        slider = page.locator(f"#{chapter} input[type=range]").first
        for step in (1, 60, int(slider.get_attribute("max") or 0), 8):
            slider.fill(str(step))
            assert english_texts(page) == []
    page.locator("#static .stay").nth(3).click()
    page.locator("#static .queue button").first.click()
    assert english_texts(page) == []
    page.get_by_role("radio", name="連續，分頁（paged）").check()
    page.locator("#pool canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator("#sharing .tables .block").first.click()
    for slider in page.locator("#explorer input[type=range]").all():
        for position in range(int(slider.get_attribute("max") or 0) + 1):
            slider.fill(str(position))
            assert english_texts(page) == []
    check_chinese(page)


@CHINESE
def test_the_lesson_follows_the_browser(page: Page, lesson_url: str) -> None:
    page.goto(lesson_url)
    expect(page.locator("h1")).to_have_text("從靜態批次到分頁注意力（PagedAttention）")


def report(tmp_path: Path, *options: str) -> str:
    output = tmp_path / "report.html"
    done = invoke(["report", str(recorded_log(tmp_path)), "--output", str(output), *options])
    assert done.exception is None, done.exception
    return output.as_uri()


def test_a_report_has_the_language_of_its_command(page: Page, tmp_path: Path) -> None:
    page.goto(report(tmp_path, "--lang", "zh-TW"))
    expect(page.locator("#status")).to_have_text("紀錄：run.jsonl")
    for position in (0, 300, 600, 1000):
        page.locator("#scrubber").fill(str(position))
        check_chinese(page)
    page.get_by_role("radio", name="依格的種類").check()
    page.locator("section > details > summary").click()
    check_chinese(page)


@CHINESE
def test_a_report_in_english_stays_english(page: Page, tmp_path: Path) -> None:
    page.goto(report(tmp_path, "--lang", "en"))
    expect(page.locator("#status")).to_have_text("Log: run.jsonl")
    page.goto(report(tmp_path))
    expect(page.locator("#status")).to_have_text("紀錄：run.jsonl")


@CHINESE
def test_the_sentences_of_an_explanation_are_in_chinese(page: Page, live: RunningServer) -> None:
    page.goto(live.url)
    expect(page.locator("#status")).to_have_text("即時")
    sentences = page.evaluate(
        """async () => {
          const {sentences} = await import("/page/explanation.js");
          const counts = {needed_blocks: 9, free_blocks: 7, evictable_blocks: 2, largest_free_piece: 4};
          const span = {...counts, reason: "memory", start: 0, end: 2, text: "English", head: "a", is_head: false};
          const slo = {missed: "ttft", ttft_ms: 50, is_met: false, cause: "shared_steps", cause_seconds: 1};
          const changes = [{changes: {num_kv_blocks: 30}, admits: true}, {changes: {max_tokens: 1}, admits: false},
            {changes: {num_kv_blocks: 20}, admits: true}];
          const sequence = {position: 2, expected_wait: 3, slo, waits: [{spans: [span]}], would_admit: changes};
          return sentences({...sequence, state: "waiting"}, {num_blocks: 20, max_num_seqs: 8});
        }"""
    )
    assert sentences == [
        "在佇列的第 3 位，預計 3.0 s 後開始。",
        "SLO：TTFT 超過 SLO 的 50 ms，主要原因：它的步驟也計算了其他請求的 token"
        "（--max-num-batched-tokens、--max-num-seqs）（1.0 s）。",
        "2.0 s：排在佇列最前面的 a 後面：需要 9 個區塊，空閒 7 個，其中 2 個存著快取的前綴；最大的一塊空閒有 4 個",
        "若 num_kv_blocks=30，它就會被接受",
        "即使 max_tokens=1，它也不會被接受",
        "同樣是 num_kv_blocks=20，若沒有碎片，它就會被接受",
    ]
