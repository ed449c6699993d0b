"""Tests the chat page in Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from conftest import AMPLE_MILLISECONDS, SECRETS  # type: ignore[attr-defined]
from support.running_server import MODEL, RunningServer
from support.waiting import wait_for


@pytest.fixture
def chat(page: Page, server: RunningServer) -> Page:
    page.goto(f"{server.url}/chat")
    expect(page.locator("#model")).to_have_value(MODEL)
    return page


def send(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.keyboard.press("Enter")


def finish(page: Page) -> str:
    """Wait for the end of the answer, and return its text."""
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".timing").last).to_contain_text("queue")
    return page.locator(".message.assistant .content").last.inner_text()


def set_parameters(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.fill(f"[name={name}]", value)


def test_an_answer_streams_with_its_timing_and_a_link_to_its_lane(
    chat: Page, server: RunningServer, check_page: Callable[[str], None]
) -> None:
    set_parameters(chat, temperature="0", max_tokens="120")
    send(chat, "What is the capital of France?")
    assert "Paris" in finish(chat)
    send(chat, "Write a Python function that adds two numbers.")
    assert "def " in finish(chat)
    timing = chat.locator(".timing").last
    expect(timing).to_contain_text(
        re.compile(r"queue .*prefill .* \d+ of \d+ prompt tokens cached, \d+ tokens in .* tokens/s")
    )
    chat.evaluate("document.getElementById('log').scrollTop = 0")
    check_page("chat")
    timing.get_by_role("link", name="its seat on the live page").click()
    expect(chat.locator("#facts")).to_contain_text("finished")


def test_stop_keeps_the_part_that_was_received_and_ends_the_request(chat: Page, server: RunningServer) -> None:
    set_parameters(chat, temperature="0", max_tokens="2000")
    with server.hold_steps() as gate:  # The answer does not end before it is stopped.
        gate.allow(9)
        send(chat, "Write the numbers from 1 to 1000, one per line.")
        expect(chat.locator(".message.assistant .content").last).to_contain_text(re.compile(r"\w"))
        chat.get_by_role("button", name="Stop").click()
        expect(chat.locator("#send")).to_be_visible()
    wait_for(lambda: not server.llm.num_unfinished)
    assert chat.locator(".message.assistant .content").last.inner_text()
    assert chat.locator("#log .problem").all_inner_texts() == ["", ""]
    expect(chat.locator(".stopped").last).to_have_text("Stopped by you.")


def test_an_answer_is_marked_at_its_limit(chat: Page) -> None:
    expect(chat.locator("[name=max_tokens]")).to_have_value("1024")
    set_parameters(chat, temperature="0", max_tokens="3")
    send(chat, "Write the numbers from 1 to 1000, one per line.")
    finish(chat)
    expect(chat.locator(".stopped").last).to_have_text("Stopped at the limit of 3 tokens per answer.")
    chat.reload()
    expect(chat.locator("[name=max_tokens]")).to_have_value("3")
    expect(chat.locator(".stopped").last).to_have_text("Stopped at the limit of 3 tokens per answer.")


def test_the_rest_of_the_context_limits_an_answer_with_a_higher_limit(chat: Page) -> None:
    chat.expected_problems.append("400")  # type: ignore[attr-defined]
    set_parameters(chat, temperature="0", max_tokens="999999")
    send(chat, "What is the capital of France?")
    assert "Paris" in finish(chat)


def test_a_full_context_offers_the_last_turns_or_a_new_conversation(chat: Page) -> None:
    sent = list[list[str]]()
    answer_with(chat, "Yes.")
    send(chat, "First")
    expect(chat.get_by_role("button", name="Regenerate")).to_be_visible()

    def respond(route: Route) -> None:
        sent.append([message["content"] for message in route.request.post_data_json["messages"]])
        if len(sent[-1]) == 1:
            route.fallback()
        else:
            error = {"message": "The prompt is too long.", "code": "context_length_exceeded", "param": "messages"}
            route.fulfill(status=400, json={"error": error})

    chat.expected_problems.append("400")  # type: ignore[attr-defined]
    chat.route("**/v1/chat/completions", respond)
    send(chat, "Second")
    chat.get_by_role("button", name="Continue with the last turns").click()
    expect(chat.locator(".message.assistant .content").last).to_have_text("Yes.")
    expect(chat.locator(".cut")).to_have_text("The messages above are no longer sent to the model.")
    assert sent == [["First", "Yes.", "Second"], ["Second"]]
    send(chat, "Third")
    chat.get_by_role("button", name="Begin a new conversation").click()
    expect(chat.locator("#log")).to_contain_text("Send a message to begin.")


def test_an_answer_that_repeats_itself_is_stopped(chat: Page) -> None:
    answer_with(chat, "It begins. " + "All work and no play. " * 400)
    send(chat, "Hello")
    expect(chat.locator(".stopped").last).to_have_text("Stopped: the answer repeats itself.")
    expect(chat.locator(".message.assistant .content")).to_contain_text("It begins. All work")
    assert len(chat.locator(".message.assistant .content").inner_text()) < 1000
    assert chat.locator("#log .problem").all_inner_texts() == ["", ""]


@pytest.mark.parametrize(
    ("text", "is_repeating"),
    [
        ("ab " * 134, True),
        ("ab " * 133, False),
        ("x" + "0123456789" * 30 * 6, True),
        ("\n".join(map(str, range(1000))), False),
        ("ab " * 200 + "end", False),
        ("", False),
    ],
)
def test_repetitions(modules_page: Page, text: str, is_repeating: bool) -> None:
    script = 'async text => (await import("/page/repetition.js")).isRepeating(text)'
    assert modules_page.evaluate(script, text) is is_repeating


def test_waits_are_grouped_by_their_reason(modules_page: Page) -> None:
    spans = [("seats", 0.0, 2.0, "of 2"), ("memory", 2.0, 3.5, "of 3"), ("seats", 3.5, 6.5, "of 8")]
    wait = {"spans": [dict(zip(("reason", "start", "end", "text"), span, strict=True)) for span in spans]}
    script = 'async waits => (await import("/page/format.js")).waitsByReason(waits)'
    assert modules_page.evaluate(script, [wait]) == ["5.0 s: of 8", "1.5 s: of 3"]


def test_regenerate_edit_and_the_history_after_a_reload(chat: Page, server: RunningServer) -> None:
    set_parameters(chat, temperature="0", max_tokens="8", system="You answer in one word.")
    send(chat, "Say hello.")
    first = finish(chat)
    chat.get_by_role("button", name="Regenerate").click()
    assert finish(chat) == first
    assert chat.locator(".message").count() == 2
    chat.reload()
    assert chat.locator(".message .content").all_inner_texts() == ["Say hello.", first]
    expect(chat.locator("#settings [name=system]")).to_have_value("You answer in one word.")
    chat.get_by_role("button", name="Edit").click()
    expect(chat.locator("#input")).to_have_value("Say hello.")
    assert chat.locator(".message").count() == 0
    send(chat, "Say goodbye.")
    finish(chat)
    chat.get_by_role("button", name="New conversation").click()
    expect(chat.locator("#conversations button")).to_have_count(2)
    expect(chat.locator("#log")).to_contain_text("Send a message to begin.")
    chat.get_by_role("button", name="Say goodbye.").click()
    chat.once("dialog", lambda dialog: dialog.accept())
    chat.get_by_role("button", name="Delete this conversation").click()
    expect(chat.locator("#conversations button")).to_have_count(1)


def test_another_conversation_can_be_chosen_during_an_answer(chat: Page, server: RunningServer) -> None:
    set_parameters(chat, max_tokens="4")
    send(chat, "First")
    finish(chat)
    chat.get_by_role("button", name="New conversation").click()
    set_parameters(chat, temperature="0", max_tokens="2000")
    send(chat, "Write the numbers from 1 to 1000, one per line.")
    expect(chat.locator(".message.assistant .content").last).to_contain_text(re.compile(r"\w"))
    chat.get_by_role("button", name="First").click()
    expect(chat.get_by_role("button", name="Regenerate")).to_be_visible()
    wait_for(lambda: not server.llm.num_unfinished)


def test_a_reload_during_an_answer_keeps_the_message_and_the_part_that_was_received(chat: Page) -> None:
    set_parameters(chat, temperature="0", max_tokens="2000")
    send(chat, "Write the numbers from 1 to 1000, one per line.")
    expect(chat.locator(".message.assistant .content").last).to_contain_text(re.compile(r"\w"))
    chat.reload()
    expect(chat.locator(".message.user .content")).to_have_text("Write the numbers from 1 to 1000, one per line.")
    expect(chat.locator(".message.assistant .content")).to_contain_text(re.compile(r"\w"))


def test_two_tabs_keep_the_conversations_of_each_other(browser: Browser, server: RunningServer) -> None:
    with browser.new_context() as context:
        context.set_default_timeout(AMPLE_MILLISECONDS)
        tabs = [context.new_page() for _ in range(2)]
        for tab in tabs:
            tab.goto(f"{server.url}/chat")
        for number, tab in enumerate(tabs):
            # A tab saves its list, and learns of what the other one has saved a little later.
            expect(tab.locator("#conversations button")).to_have_count(1 + number)
            set_parameters(tab, max_tokens="4")
            send(tab, f"In tab {number}")
            finish(tab)
        tabs[0].reload()
        expect(tabs[0].locator("#conversations button")).to_have_count(2)


def test_an_answer_without_an_end_is_an_error(chat: Page) -> None:
    answer_with(chat, "A part", finish_reason=None)
    send(chat, "Hello")
    expect(chat.locator("#log .problem").last).to_contain_text("The connection was lost")
    expect(chat.locator(".message.assistant .content")).to_have_text("A part")
    expect(chat.get_by_role("button", name="Try again")).to_be_visible()


def test_an_error_is_shown_at_the_answer_and_can_be_tried_again(chat: Page) -> None:
    chat.expected_problems.append("400")  # type: ignore[attr-defined]
    set_parameters(chat, top_p="9", max_tokens="4")
    send(chat, "Hello")
    expect(chat.locator("#log .problem").last).to_contain_text("top_p")
    set_parameters(chat, top_p="1")
    chat.get_by_role("button", name="Try again").click()
    assert finish(chat)
    assert chat.locator(".message").count() == 2


def test_a_key_is_asked_for(page: Page, guarded: RunningServer) -> None:
    page.expected_problems.append("401")  # type: ignore[attr-defined]
    page.goto(f"{guarded.url}/chat")
    page.get_by_role("textbox", name="Key").fill(SECRETS["own"])
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#model")).to_have_value("tiny")


HOSTILE = """<script>window.wasExecuted = 1</script>

<img src="x" onerror="window.wasExecuted = 2"> <svg onload="window.wasExecuted = 3"></svg>

[a](javascript:window.wasExecuted=4) [b](data:text/html,<script>1</script>) [c](JaVaScRiPt:alert(1)) <javascript:x>
![d](javascript:window.wasExecuted=5) [e]( javascript:alert(1)) [f](//attacker.example) [g](vbscript:x)

| <img src=x onerror=window.wasExecuted=6> |
|---|
| <b onclick="window.wasExecuted=7">cell</b> |

- <iframe src="javascript:window.wasExecuted=8"></iframe>

```html
<script>window.wasExecuted = 9</script>
```
"""


def answer_with(page: Page, text: str, finish_reason: str | None = "stop") -> None:
    """Let the server answer with a text, in small chunks."""

    def respond(route: Route) -> None:
        parts = [text[start : start + 7] for start in range(0, len(text), 7)]
        chunks = [{"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {"content": part}}]} for part in parts]
        chunks.append({"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.expected_problems.append("404")  # type: ignore[attr-defined]
    page.route("**/v1/chat/completions", respond)


def test_html_and_scripts_in_an_answer_are_only_text(chat: Page) -> None:
    answer_with(chat, HOSTILE)
    send(chat, HOSTILE)
    expect(chat.locator(".message.assistant .content").last).to_contain_text("window.wasExecuted = 9")
    expect(chat.locator("#send")).to_be_visible()
    chat.wait_for_timeout(300)
    assert chat.evaluate("window.wasExecuted") is None
    for name in ("script", "img", "svg", "iframe", "b", "[onclick]", "[onerror]"):
        assert chat.locator(f"#log {name}").count() == 0, name
    assert chat.locator("#log .content a").count() == 0
    chat.reload()
    expect(chat.locator(".message.user .content")).to_contain_text("<script>")
    assert chat.evaluate("window.wasExecuted") is None


def render(page: Page, text: str) -> Any:
    """The nodes of a text as nested lists: a name and children, or a string."""
    return page.evaluate(
        """async text => {
          const {renderMarkdown} = await import("/page/markdown.js");
          const view = node => node.nodeType === 3 ? node.textContent
            : [node.nodeName.toLowerCase(), ...[...node.childNodes].map(view)];
          return [...renderMarkdown(text).childNodes].map(view);
        }""",
        text,
    )


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("a *b* **c**", [["p", "a ", ["em", "b"], " ", ["strong", "c"]]]),
        ("`a*b*` ~~c~~", [["p", ["code", "a*b*"], " ", ["del", "c"]]]),
        ("# One\ntext", [["h3", "One"], ["p", "text"]]),
        ("- a\n  - b\n- c", [["ul", ["li", "a", ["ul", ["li", "b"]]], ["li", "c"]]]),
        ("- a\n\n1. b\n2. c", [["ul", ["li", "a"]], ["ol", ["li", "b"], ["li", "c"]]]),
        ("> a\n> b", [["blockquote", ["p", "a", ["br"], "b"]]]),
        ("snake_case_name 2 * 3 * 4", [["p", "snake_case_name 2 * 3 * 4"]]),
        ("[a](https://x.example/)", [["p", ["a", "a"]]]),
        ("![a](https://x.example/i.png)", [["p", ["a", "a"]]]),
        ("a\n---\nb", [["p", "a"], ["hr"], ["p", "b"]]),
        ("[a](https://x.example/b_(c))", [["p", ["a", "a"]]]),
        ("***a***", [["p", ["strong", ["em", "a"]]]]),
        (r"\*a\*", [["p", "*", "a", "*"]]),
        ("**open", [["p", "**open"]]),
        ("", []),
    ],
)
def test_markdown(modules_page: Page, text: str, nodes: list[Any]) -> None:
    assert render(modules_page, text) == nodes


def test_code_and_tables(modules_page: Page) -> None:
    (code,) = render(modules_page, "```py\na = 1\n\nb = 2\n```")
    assert code[-1] == ["pre", ["code", "a = 1\n\nb = 2"]]
    (table,) = render(modules_page, "| a | b |\n|---|:-:|\n| 1 | *2* |")
    _, head, body = table[1]
    assert head == ["thead", ["tr", ["th", "a"], ["th", "b"]]]
    assert body == ["tbody", ["tr", ["td", "1"], ["td", ["em", "2"]]]]


def test_a_table_below_a_paragraph_and_a_bar_within_a_cell(modules_page: Page) -> None:
    paragraph, table = render(modules_page, "Here:\n| a \\| b | c |\n|---|---|\n| 1 | 2 |")
    assert paragraph == ["p", "Here:"]
    assert table[1][1] == ["thead", ["tr", ["th", "a ", "|", " b"], ["th", "c"]]]


def test_long_texts_take_linear_time(modules_page: Page) -> None:
    """No pattern makes a text of 200,000 characters take more than 20 seconds; linear ones take 0.6 seconds, and
    quadratic ones would take minutes."""
    patterns = ["[", "*a ", "**a", "`", "``a", "<", "_a ", "[a](", "> ", "- ", "~~a", "1. ", "\\\\", "![", "[a](b"]
    slow = modules_page.evaluate(
        """async patterns => {
          const {renderMarkdown} = await import("/page/markdown.js");
          return patterns.filter(pattern => {
            const start = performance.now();
            renderMarkdown(pattern.repeat(200000 / pattern.length));
            return performance.now() - start > 20000;
          });
        }""",
        [*patterns, "|a"],
    )
    assert slow == []
