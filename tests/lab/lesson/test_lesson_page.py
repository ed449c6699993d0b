"""The page of the lesson: its data are those of the runs and of the simulator, and it is one file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docs.palette import TEXTS

from chairlift.errors import ConfigError
from chairlift.events import SLOT_KINDS, RequestArrived, RequestFinished, Step
from chairlift.lab.lesson import page_data as data_module
from chairlift.lab.lesson import summary
from chairlift.lab.lesson.page import EXPORT, FOLDERS, IMPORT, inline_modules, render_page, write_page
from chairlift.lab.lesson.page_data import (
    EXPLORED,
    LIMITS,
    MAX_STEPS,
    ORDERS,
    POLICIES,
    SEATS,
    SPREADS,
    first_steps,
    num_results,
    page_data,
    sharing_events,
)
from chairlift.lab.lesson.runs import VOCAB_SIZE, Lesson
from chairlift.lab.lesson.summary import Message
from support.tiny_lesson import tiny_lesson


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    return tiny_lesson(tmp_path_factory.mktemp("lesson"))


@pytest.fixture(scope="module")
def counted() -> list[str]:
    """An entry for each result that `page_data` reported for `data`."""
    return []


@pytest.fixture(scope="module")
def data(lesson: Lesson, counted: list[str]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_module, "MAX_EXPLORED", 8)
        patch.setattr(summary, "NUM_SIMULATED", 40)
        return page_data(lesson, lambda: counted.append("result"))


def test_the_first_steps_have_the_true_lengths(lesson: Lesson) -> None:
    for policy in POLICIES:
        run, events = lesson.runs[policy.name], lesson.events[policy.name]
        shown = list(first_steps(run, events))
        steps = [event for event in shown if isinstance(event, Step)]
        originals = [event for event in events if isinstance(event, Step)]
        assert len(steps) == min(MAX_STEPS, len(originals))
        assert steps == run.true_steps[:MAX_STEPS]
        assert [step.request_ids for step in steps] == [step.request_ids for step in originals[:MAX_STEPS]]
        arrivals = [event for event in shown if isinstance(event, RequestArrived)]
        assert len(arrivals) == 96
        assert all(event.max_tokens == event.output_len for event in arrivals)


def test_the_prefix_of_the_sharing_run_is_stored_once() -> None:
    events = sharing_events()
    steps = [event for event in events if isinstance(event, Step)]
    cached = {event.request_id: event.num_cached_tokens for event in events if isinstance(event, RequestFinished)}
    assert cached == {"A": 0, "B": 12, "C": 12, "D": 12}
    assert max(step.saved for step in steps) >= 2 * 12
    assert max(len(step.request_ids) for step in steps) == 4


def test_the_explorer_has_a_result_for_every_position(data: dict[str, Any], counted: list[str]) -> None:
    explorer = data["explorer"]
    for seats in SEATS:
        for spread in SPREADS:
            for policy in EXPLORED:
                others = ORDERS if policy == "paged" else [""]
                for limit in LIMITS if policy in explorer["declaring"] else others:
                    values = explorer["results"][f"{policy}|{seats}|{spread}|{limit}"]
                    assert sum(values[kind] for kind in SLOT_KINDS) == pytest.approx(1, abs=1e-3)
                    assert values["busy"] <= values["seats"] + 1e-3 <= seats + 1e-2
    assert len(counted) == len(explorer["results"]) == num_results()


def test_the_explorer_shows_what_the_scheduler_does(data: dict[str, Any]) -> None:
    results = data["explorer"]["results"]
    assert results["exact|32|none|true length"]["internal"] < results["exact|32|none|all that fits"]["internal"]
    assert results["static/exact|8|none|100"]["busy"] == pytest.approx(results["static/exact|8|none|100"]["seats"], 0.1)
    wide = results["static/exact|8|large|100"]
    assert wide["busy"] < 0.7 * wide["seats"]


def test_no_two_policies_have_the_same_result_at_the_first_position(data: dict[str, Any]) -> None:
    """The sliders start at 16 seats, large spread and max_tokens=100."""
    explorer = data["explorer"]
    assert (explorer["seats"][2], explorer["spreads"][2], explorer["limits"][2]) == (16, "large", "100")
    names = [
        "static/exact|16|large|100",
        "exact|16|large|100",
        "max|16|large|",
        "pow2|16|large|",
        "paged|16|large|fcfs",
    ]
    rows = [{name: explorer["results"][key][name] for name in (*SLOT_KINDS, "seats")} for key in names]
    assert all(one != other for index, one in enumerate(rows) for other in rows[:index])


def test_short_requests_first_have_a_lower_median(data: dict[str, Any]) -> None:
    results = data["explorer"]["results"]
    assert results["paged|4|large|srpt"]["p50"] < results["paged|4|large|fcfs"]["p50"]


def test_a_result_is_that_of_a_simulation(lesson: Lesson, data: dict[str, Any]) -> None:
    paged = POLICIES[-1]
    options = replace(lesson.options, num_prompts=8, output_len=SPREADS["large"])
    run = lesson.simulate(paged, options.workload(VOCAB_SIZE, token_round=1), max_num_seqs=4)
    shown = data["explorer"]["results"]["paged|4|large|fcfs"]
    assert shown["seats"] == pytest.approx(run.metrics.mean_batch_size, rel=1e-3)
    assert shown["token_states"] == pytest.approx(run.waste().shares["token_states"], rel=1e-3)


def test_the_page_is_one_file_without_links_to_others(data: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "lesson.html"
    write_page({**data, "sources": "</script><b>"}, path)
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\{\{\w+\}\}", text)
    assert not re.search(r"^\s*(?:import|export) ", text, re.MULTILINE)
    assert not re.search(r"(?:src|href)=\"(?!#)|@import|url\(|fetch\(", text)
    found = re.search(r'<script type="application/json" id="lesson-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    embedded = json.loads(found[1])
    assert embedded["sources"] == "</script><b>"
    assert embedded["rows"] == data["rows"]
    assert text == render_page({**data, "sources": "</script><b>"})


def test_the_page_has_the_language_of_the_command(data: dict[str, Any], tmp_path: Path) -> None:
    for lang, head in ((None, "<html lang="), ("en", '<html data-lang="en" '), ("zh-TW", '<html data-lang="zh-TW" ')):
        write_page(data, tmp_path / "lesson.html", lang)
        assert head in (tmp_path / "lesson.html").read_text(encoding="utf-8")


def test_every_text_of_the_data_has_a_translation(data: dict[str, Any]) -> None:
    messages = [data["load"], data["machine"], *data["reasons"]]
    messages += [value for message in messages for value in message.values.values() if isinstance(value, Message)]
    titled = [*data["policies"], *data["bars"], *data["explorer"]["policies"]]
    texts = {data["sources"], *(message.text for message in messages), *(each["title"] for each in titled)}
    texts |= {row["label"] for row in data["rows"]} | {*data["explorer"]["spreads"], *data["explorer"]["limits"]}
    texts |= {text for row in data["rows"] for text in row["published"]}
    words = {text for text in texts if re.search("[a-z]", text)}
    assert len(words) > 30
    assert words <= {row["en"] for row in TEXTS}, "add rows to docs/texts.json, and run `python -m docs.palette`"


def test_modules_of_all_pages_import_what_others_export() -> None:
    """The lesson imports modules of the live page."""
    sources = {
        Path(str(file)).name: file.read_text(encoding="utf-8")
        for folder in FOLDERS
        for file in folder.iterdir()
        if file.is_file()
    }
    imports = [(name, *found) for name, source in sources.items() for found in IMPORT.findall(source)]
    assert len(imports) > 20
    for name, imported, module in imports:
        wanted = set(re.findall(r"(\w+)(?: as \w+)?", imported.strip("{}")))
        assert wanted <= set(EXPORT.findall(sources[module])), f"{name} imports from {module}"


def test_a_module_is_inlined_once_and_after_what_it_imports() -> None:
    script = inline_modules("lesson.js")
    order = re.findall(r'^modules\["(\w+\.js)"\] = ', script, re.MULTILINE)
    assert len(order) == len(set(order))
    assert order[-1] == "lesson.js"
    assert order.index("engine_state.js") < order.index("stage.js") < order.index("seats.js")


def test_a_page_that_cannot_be_written_is_an_error(data: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output=.*create the folder"):
        write_page(data, tmp_path / "missing" / "lesson.html")
