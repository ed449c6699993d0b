"""Tests the live page in Chromium, on servers under load."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from chairlift.observability.event_log import encode_event
from chairlift.observability.tracker import RequestTracker
from conftest import DESKTOP, PHONE, SECRETS  # type: ignore[attr-defined]
from support.recorded_logs import HOSTILE, recorded_log
from support.running_server import RunningServer, completion_body
from support.step_gate import StepGate
from support.tracked_engine import TrackedEngine
from support.waiting import wait_for

BURST = {"num_requests": "20", "max_prompt_tokens": "60", "min_output_tokens": "40", "max_output_tokens": "50"}


def open_page(page: Page, server: RunningServer, path: str = "/") -> None:
    page.goto(f"{server.url}{path}")


def send_burst(page: Page, **fields: str) -> None:
    page.evaluate("document.querySelector('#burst-form details').open = true")
    for name, value in {**BURST, **fields}.items():
        page.fill(f"input[name={name}]", value)
    page.evaluate("document.querySelector('#burst-form details').open = false")
    page.get_by_role("button", name="Send the burst").click()
    expect(page.locator("#burst-status")).to_contain_text("sent")


def shown_step(page: Page) -> int:
    """The newest shown step, which the keyboard reaches first."""
    page.locator("#lanes").focus()
    page.keyboard.press("ArrowRight")
    found = re.match(r"step ([\d,]+)", page.inner_text("#cell-status"))
    assert found is not None
    page.locator("#lanes").blur()
    return int(found[1].replace(",", ""))


def shows_tokens_of_a_step(page: Page, gate: StepGate) -> bool:
    """Whether the page shows output tokens, which it counts for 10 seconds, soon after another step."""
    gate.allow(1)
    page.wait_for_timeout(1000)
    return re.search("[1-9]", page.inner_text("#figure-tokens")) is not None


def test_lanes_map_queue_and_figures_follow_a_burst(page: Page, live: RunningServer) -> None:
    open_page(page, live)
    expect(page.locator("#status")).to_have_text("Live")
    with live.hold_steps() as gate:
        send_burst(page)
        gate.allow(4)
        expect(page.locator("#figure-running")).to_have_text("8 / 8")
        wait_for(lambda: shows_tokens_of_a_step(page, gate))
        expect(page.locator("#figure-ttft")).not_to_have_text("–")  # in the last 60 seconds
        reason = re.compile(r"^all 8 seats are taken \(8 running\): \d+ requests?, for up to [\d.]+ m?s$")
        expect(page.locator("#queue th").first).to_have_text(reason)
        expect(page.locator("#map-note")).to_contain_text(re.compile(r"[1-9]\d* blocks of 1,000 in use"))
        page.locator("section > details > summary").click()
        expect(page.locator("#batch tr")).to_have_count(8)
        page.locator("#batch button").nth(3).click()
        expect(page.locator("#facts")).to_contain_text("KV memory")
    wait_for(lambda: not live.llm.num_unfinished)
    expect(page.locator("#figure-running")).to_have_text("0 / 8")
    expect(page.locator("#facts")).to_contain_text("finished (length)")
    assert _num_colors(page, "#lanes") >= 4


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_default_burst_fills_batch_and_queue_where_batch_and_memory_are_in_view(
    page: Page, live: RunningServer, size: dict[str, int]
) -> None:
    page.set_viewport_size(size)  # type: ignore[arg-type]
    open_page(page, live)
    with live.hold_steps() as gate:
        page.get_by_role("button", name="Send the burst").click()
        expect(page.locator("#burst-status")).to_contain_text("16 requests sent: prompts of")
        gate.allow(40)
        expect(page.locator("#figure-running")).to_have_text("8 / 8")
        expect(page.locator("#figure-waiting")).to_have_text("8")
        for part in ("#burst-form button", "#lanes", "#memory-map"):
            box = page.locator(part).bounding_box()
            assert box is not None
            assert 0 <= box["y"] <= box["y"] + box["height"] <= size["height"], part
    page.reload()
    wait_for(lambda: not live.llm.num_unfinished)


def test_recurrent_states_and_checkpoints_are_below_the_blocks(
    page: Page, live: RunningServer, recurrent: RunningServer
) -> None:
    open_page(page, live)
    expect(page.locator("#map-note")).to_contain_text("blocks of 1,000")
    expect(page.locator("#states")).to_be_hidden()
    open_page(page, recurrent)
    body = {"model": "tiny", "prompt": list(range(3, 60)), "max_tokens": 4}
    assert httpx.post(f"{recurrent.url}/v1/completions", json=body).status_code == 200
    note = (
        r"0 of 4 states of requests \(0.0 MiB\) and [1-9]\d* of \d+ checkpoints \(.* MiB\) in use; each takes .* MiB."
    )
    expect(page.locator("#states-note")).to_have_text(re.compile(note))
    assert _num_colors(page, "#states-map") == 3, "checkpoints, free states, and the gaps between them"


def test_the_page_is_accessible_and_fits_on_a_phone(
    page: Page, server: RunningServer, check_page: Callable[[str], None]
) -> None:
    open_page(page, server)
    with server.hold_steps() as gate:
        send_burst(page, num_requests="24", max_prompt_tokens="100", min_output_tokens="16", max_output_tokens="60")
        gate.allow(70)
        wait_for(lambda: not gate.has_steps_left())
        page.wait_for_timeout(1000)
        page.get_by_role("button", name="Pause").click()
    check_page("live")
    wait_for(lambda: not server.llm.num_unfinished)


def _num_colors(page: Page, selector: str) -> int:
    """The number of colours that cover more than a few pixels of a canvas."""
    count: int = page.evaluate(
        """selector => {
          const canvas = document.querySelector(selector);
          const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const counts = new Map();
          for (let i = 0; i < data.length; i += 4) {
            const key = (data[i] << 16) | (data[i + 1] << 8) | data[i + 2];
            counts.set(key, (counts.get(key) ?? 0) + 1);
          }
          return [...counts.values()].filter(count => count > 20).length;
        }""",
        selector,
    )
    return count


def test_a_cell_of_the_lanes_shows_and_selects_its_request(page: Page, live: RunningServer) -> None:
    open_page(page, live)
    with live.hold_steps() as gate:
        send_burst(page, num_requests="8", min_output_tokens="200", max_output_tokens="200")
        gate.allow(4)
        expect(page.locator("#figure-running")).to_have_text("8 / 8")
    expect(page.locator("#figure-running")).to_have_text("0 / 8")
    page.locator("#lanes").scroll_into_view_if_needed()
    box = page.locator("#lanes").bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] - 500, box["y"] + 8
    page.mouse.move(x, y)
    expect(page.locator("#tooltip")).to_contain_text(re.compile(r"step [\d,]+.*before the last one.*seat 0"))
    page.mouse.click(x, y)
    expect(page.locator("#selected-id")).to_have_text(re.compile(r"^burst-[0-9a-f]+-\d+~\d+$"))
    selected = page.inner_text("#selected-id")
    assert page.evaluate("decodeURIComponent(location.hash)") == f"#request={selected}"
    page.keyboard.press("Escape")
    expect(page.locator("#nothing-selected")).to_be_visible()
    page.locator("#lanes").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#cell-status")).to_contain_text("seat 0")
    expect(page.locator("#tooltip")).to_contain_text("seat 0")
    page.locator("#memory-map").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#cell-status")).to_contain_text(re.compile(r"block \d+: free, holds a cached prefix"))
    open_page(page, live, f"/#request={selected.partition('~')[0]}")
    page.reload()
    expect(page.locator("#selected-id")).to_have_text(selected)


def test_the_explanation_of_a_waiting_request_has_its_reason(page: Page, live: RunningServer) -> None:
    open_page(page, live)
    with live.hold_steps() as gate:
        send_burst(page, num_requests="40")
        gate.allow(3)
        expect(page.locator("#queue button")).to_have_count(32)
        button, step = page.locator("#queue button").last.element_handle(), shown_step(page)
        gate.allow(3)
        wait_for(lambda: shown_step(page) > step)
        assert button.evaluate("button => button.isConnected"), "a click between two frames would be lost"
        button.click()
        expect(page.locator("#facts")).to_contain_text("Waits because")
        expect(page.locator("#explanation")).to_contain_text("seats")
    wait_for(lambda: not live.llm.num_unfinished)


def test_a_pause_and_a_replay_show_earlier_states(page: Page, live: RunningServer) -> None:
    open_page(page, live)
    with live.hold_steps() as gate:
        send_burst(page)
        gate.allow(4)
        expect(page.locator("#figure-running")).to_have_text("8 / 8")
        page.get_by_role("button", name="Pause").click()
    wait_for(lambda: not live.llm.num_unfinished)
    page.wait_for_timeout(500)
    expect(page.locator("#figure-running")).to_have_text("8 / 8")
    page.locator("#speed").select_option("16")
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#figure-running")).to_have_text("0 / 8")
    page.locator("#scrubber").fill("999")
    expect(page.locator("#status")).to_have_text("Paused")
    expect(page.locator("#time")).to_contain_text("−")
    first = shown_step(page)
    for name, step in (("Previous step", first - 1), ("Previous step", first - 2), ("Next step", first - 1)):
        page.get_by_role("button", name=name).click()
        wait_for(lambda step=step: shown_step(page) == step)
    page.get_by_role("button", name="Go to now").click()
    expect(page.locator("#time")).to_have_text("now")


def test_an_earlier_page_is_not_needed_for_the_history(page: Page, live: RunningServer) -> None:
    body = completion_body(4, request_id="before-the-page")
    assert live.post("/v1/completions", body).status_code == 200
    open_page(page, live)
    page.goto(f"{live.url}/#request=cmpl-before-the-page")
    page.reload()
    expect(page.locator("#facts")).to_contain_text("finished (length)")


def test_a_request_that_the_page_does_not_know_is_looked_up(page: Page, live: RunningServer) -> None:
    page.expected_problems.append("404")  # type: ignore[attr-defined]
    open_page(page, live, "/#request=unknown")
    expect(page.locator("#selected-id")).to_have_text("unknown")
    expect(page.locator("#facts")).to_contain_text("not known at the shown time")
    expect(page.locator("#explanation")).to_contain_text("unknown")


def test_the_api_page_works_without_another_host(page: Page, live: RunningServer) -> None:
    page.route(lambda url: not url.startswith(live.url), lambda route: route.abort())
    open_page(page, live, "/docs")
    operation = "#operations-Generation_and_embeddings-create_chat_completion_v1_chat_completions_post"
    expect(page.locator(operation)).to_be_visible()
    expect(page.get_by_role("button", name="Authorize")).to_be_visible()
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_class("dark-mode")
    page.emulate_media(color_scheme="light")
    expect(page.locator("html")).not_to_have_class("dark-mode")


def enter_key(page: Page, name: str) -> None:
    page.get_by_role("textbox", name="Key").fill(SECRETS.get(name, name))
    page.get_by_role("button", name="Continue").click()


def test_a_page_asks_for_a_key_and_shows_only_its_requests(page: Page, guarded: RunningServer) -> None:
    page.expected_problems.append("401")  # type: ignore[attr-defined]
    open_page(page, guarded)
    enter_key(page, "wrong")
    expect(page.locator("[data-problem]")).to_contain_text("does not know this API key")
    enter_key(page, "own")
    expect(page.locator("#status")).to_have_text("Live")
    expect(page.locator("#burst-note")).to_contain_text("--page-control")
    for name in ("own", "other"):
        body = completion_body(3, request_id=f"of-{name}")
        assert guarded.post("/v1/completions", body, SECRETS[name]).status_code == 200
    expect(page.locator("#value-throughput")).not_to_have_text("–")
    page.goto(f"{guarded.url}/#request=cmpl-of-own")
    expect(page.locator("#facts")).to_contain_text("finished")
    received = page.evaluate(
        """async () => {
          const {request} = await import("/page/api.js");
          const reader = (await request("v1/page/events")).body.getReader();
          return new TextDecoder().decode((await reader.read()).value);
        }"""
    )
    assert "of-other" not in page.content() + received
    assert page.evaluate("sessionStorage.length") == 1
    assert page.evaluate("localStorage.length") == 0


def test_a_recorded_log_opens_in_the_page(page: Page, live: RunningServer, tmp_path: Path) -> None:
    open_page(page, live)
    page.set_input_files("#log-file", recorded_log(tmp_path))
    expect(page.locator("#status")).to_have_text("Log: run.jsonl")
    expect(page.locator("#model")).to_have_text("fake")
    expect(page.locator("#queue button")).to_have_count(3)
    expect(page.locator("#time")).to_have_text(re.compile(r"^[\d.]+ m?s of [\d.]+ m?s$"))
    expect(page.locator(".about")).to_contain_text("is taken by the next one")
    page.locator("#scrubber").fill("300")
    expect(page.locator("#figure-running")).to_have_text("2 / 2")
    expect(page.locator("#queue")).to_contain_text("all 2 seats are taken")
    page.get_by_role("button", name="Back to the engine").click()
    expect(page.locator("#status")).to_have_text("Live")


def test_the_page_of_a_recorded_log_has_no_engine_to_return_to(page: Page, live: RunningServer, tmp_path: Path) -> None:
    view = {**httpx.get(f"{live.url}/v1/page").json(), "recorded_log": "run.jsonl", "control": False}
    page.route("**/v1/page", lambda route: route.fulfill(json=view))
    page.route("**/v1/page/log", lambda route: route.fulfill(path=recorded_log(tmp_path)))
    open_page(page, live)
    expect(page.locator("#status")).to_have_text("Log: run.jsonl")
    expect(page.locator("#burst-note")).to_contain_text("recorded log")
    expect(page.locator("#to-live")).to_be_hidden()


def test_a_pool_without_blocks_has_no_percentage(page: Page, live: RunningServer, tmp_path: Path) -> None:
    log = recorded_log(tmp_path)
    log.write_text(re.sub(r'"num_blocks": ?20', '"num_blocks":0', log.read_text().splitlines()[0]) + "\n")
    open_page(page, live)
    page.set_input_files("#log-file", log)
    expect(page.locator("#map-note")).to_contain_text("0 blocks of 0 in use, 0 free")
    expect(page.locator("#figure-memory")).to_have_text("–")


def test_all_parts_of_the_page_have_one_definition_of_memory_in_use(
    page: Page, live: RunningServer, tmp_path: Path
) -> None:
    engine = TrackedEngine(num_blocks=16, block_size=2, kv="exact", enable_prefix_caching=False, max_num_seqs=4)
    for _ in range(5):
        engine.add([1, 2, 3], 8)
    engine.steps(3)
    log = tmp_path / "exact.jsonl"
    log.write_bytes(b"".join(encode_event(event) + b"\n" for event in (engine.tracker.started, *engine.log.events)))  # type: ignore[arg-type]
    open_page(page, live)
    page.set_input_files("#log-file", log)
    expect(page.locator("#figure-memory")).to_have_text("63 %")
    note = "10 blocks of 16 in use (63 %), 6 lost to rounding (external), 0 free"
    expect(page.locator("#map-note")).to_contain_text(note)
    expect(page.locator("#memory-map")).to_have_attribute("aria-label", note)
    expect(page.locator("#slots-note")).to_contain_text("12 external fragmentation, 0 free")
    expect(page.locator("#queue th").first).to_contain_text("needs 8 blocks, 0 are free, 6 are lost to rounding")
    expect(page.locator("#rounding-note")).to_be_visible()
    assert page.locator("#lanes").evaluate("canvas => canvas.height") < 4 * 16, "two of four rows were used"
    held = page.evaluate(
        """async text => {
          const {runOfLog} = await import("/page/run_history.js");
          return runOfLog(text).buckets.map(bucket => bucket.held);
        }""",
        log.read_text(),
    )
    assert max(held) == 10 / 16, "the curve"
    page.locator("#memory-map").focus()
    for _ in range(11):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#cell-status")).to_contain_text("lost to rounding for r1 (external fragmentation)")
    page.get_by_role("radio", name="all").check()
    assert _num_colors(page, "#memory-map") >= 4, "two requests, external fragmentation, and the gaps"


def test_a_dropped_file_is_opened_and_a_wrong_one_is_explained(page: Page, live: RunningServer, tmp_path: Path) -> None:
    def drop(name: str, text: str) -> None:
        page.evaluate(
            """([name, text]) => {
              const data = new DataTransfer();
              data.items.add(new File([text], name));
              document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
            }""",
            [name, text],
        )

    open_page(page, live)
    drop("notes.txt", "hello\n")
    expect(page.locator("#notice")).to_contain_text("notes.txt: Line 1 is not an event of an event log.")
    drop("short.jsonl", recorded_log(tmp_path).read_text().replace('"new_blocks"', '"blocks"'))
    expect(page.locator("#notice")).to_contain_text("(step) does not have the fields")
    drop("run.jsonl", recorded_log(tmp_path).read_text())
    expect(page.locator("#status")).to_have_text("Log: run.jsonl")


def test_hostile_ids_are_shown_as_text(page: Page, live: RunningServer, tmp_path: Path) -> None:
    open_page(page, live)
    page.set_input_files("#log-file", recorded_log(tmp_path, HOSTILE))
    expect(page.locator("#status")).to_have_text("Log: run.jsonl")
    page.locator("#scrubber").fill("100")
    page.locator("section > details > summary").click()
    page.locator("#batch button").first.click()
    expect(page.locator("#selected-id")).to_have_text(HOSTILE)
    assert page.evaluate("window.wasExecuted") is None
    assert page.locator("img").count() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 9, "block_size": 2, "max_num_seqs": 3},
        {"num_blocks": 12, "block_size": 2, "max_num_seqs": 3, "steps_ahead": 1},
        {"num_blocks": 16, "block_size": 2, "kv": "exact", "arena": "first-fit", "enable_prefix_caching": False},
        {"num_blocks": 40, "block_size": 2, "batching": "static"},
    ],
    ids=["preemptions", "steps-ahead", "reservations", "static"],
)
def test_the_browser_computes_the_same_state_as_the_server(modules_page: Page, options: dict[str, Any]) -> None:
    engine = TrackedEngine(**options)
    started = engine.tracker.started
    assert started is not None
    for number in range(9):
        engine.add([number % 2, number % 3, *range(number % 4)], 1 + number % 5)
        engine.steps(2)
    engine.to_end()
    tracker, expected = RequestTracker(), []
    tracker.emit(started)
    for event in engine.log.events:
        tracker.emit(event)
        if event.type == "step":
            running = {
                r.request_id: [r.num_computed, r.num_output_tokens, [*r.block_ids]] for r in tracker.batch.values()
            }
            waiting = sorted(r.request_id for r in tracker.unfinished.values() if r.state == "waiting")
            expected.append([running, waiting])
    assert len(expected) > 10
    log = [json.loads(encode_event(event)) for event in (started, *engine.log.events)]
    computed, replayed = modules_page.evaluate(
        """async log => {
          const {RunHistory} = await import("/page/run_history.js");
          const view = state => [
            Object.fromEntries(state.running().map(r => [r.id, [r.computed, r.output, r.blocks.slice()]])),
            state.waiting().map(r => r.id).sort(),
          ];
          const run = new RunHistory();
          const seen = [];
          const times = [];
          for (const event of log) {
            run.add(event);
            if (event.type === "step") { seen.push(view(run.state)); times.push(run.end); }
          }
          return [seen, times.map(time => view(run.stateAt(time)))];
        }""",
        log,
    )
    assert computed == expected
    # A request that arrives later may have waited elsewhere before, so that its arrival is earlier than the step.
    running_at = {event.time: view[0] for event, view in zip(_steps(engine), expected, strict=True)}
    assert [view[0] for view in replayed] == [running_at[event.time] for event in _steps(engine)]


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 9, "block_size": 4, "max_num_seqs": 3},
        {"num_blocks": 30, "block_size": 4, "kv": "exact", "arena": "first-fit", "enable_prefix_caching": False},
        {"num_blocks": 30, "block_size": 4, "kv": "exact", "arena": "buddy", "enable_prefix_caching": False},
        {"num_blocks": 60, "block_size": 4, "batching": "static"},
    ],
    ids=["preemptions", "reservations", "rounding", "static"],
)
def test_the_blocks_of_the_map_add_up_to_the_slots_that_the_engine_counts(
    modules_page: Page, options: dict[str, Any]
) -> None:
    engine = TrackedEngine(**options)
    for number in range(9):
        engine.add([number % 2, number % 3, *range(number)], 1 + number % 5)
        engine.steps(2)
    engine.to_end()
    started = engine.tracker.started
    assert started is not None
    kinds = modules_page.evaluate(
        """async log => {
          const {EngineState} = await import("/page/engine_state.js");
          const {memoryUse} = await import("/page/memory_map.js");
          const state = new EngineState();
          const kinds = [];
          for (const event of log) {
            // Blocks are counted after the schedule of a step, and therefore before its last members leave the lanes.
            const isStep = event.type === "step";
            state.apply(isStep ? {...event, finished: []} : event);
            if (!isStep || event.finished.length || state.leaving.length) continue;
            const {slots} = memoryUse(state);
            kinds.push([slots, Object.fromEntries(Object.keys(slots).map(kind => [kind, event[kind]]))]);
          }
          return kinds;
        }""",
        [json.loads(encode_event(event)) for event in (started, *engine.log.events)],
    )
    assert len(kinds) > 5
    assert any(counted["reserved"] for _, counted in kinds)
    assert [shown for shown, _ in kinds] == [counted for _, counted in kinds]


def test_a_snapshot_corrects_what_a_slow_page_has_missed(modules_page: Page) -> None:
    engine = TrackedEngine(num_blocks=20, block_size=2, max_num_seqs=2)
    for number in range(3):
        engine.add([number, 3, 4], 6)
    engine.steps(3)
    started = engine.tracker.started
    assert started is not None
    shown = modules_page.evaluate(
        """async log => {
          const {EngineState} = await import("/page/engine_state.js");
          const state = new EngineState();
          for (const event of log) state.apply(event);
          const [first, second] = state.running();
          const entry = {arrived: {request_id: second.id}, state: "waiting", num_computed: 0, num_output_tokens: 1,
            num_cached_tokens: 0, num_preemptions: 1, first_scheduled_time: 1, first_token_time: 1, block_ids: [],
            waiting: null};
          state.apply({type: "snapshot", time: state.time, step: 9, requests: [entry]});
          return [state.running().length, state.waiting().map(r => r.id), first.state, state.lanes, second.id];
        }""",
        [json.loads(encode_event(event)) for event in (started, *engine.log.events)],
    )
    assert shown == [0, [shown[4]], "finished", [None, None], shown[4]]


def _steps(engine: TrackedEngine) -> list[Any]:
    return [event for event in engine.log.events if event.type == "step"]
