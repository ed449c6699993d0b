"""Servers and a browser for the tests of the pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from chairlift import AsyncLLM
from chairlift.lab.lesson import page_data as data_module
from chairlift.lab.lesson import summary
from chairlift.lab.lesson.page import write_page
from chairlift.lab.lesson.page_data import page_data
from chairlift.server.access.keys import KeyRing, key_record, parse_key
from support.running_server import MODEL, RunningServer, run_server
from support.tiny_lesson import tiny_lesson
from support.waiting import AMPLE_SECONDS

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SECRETS = {"admin": "sk-admin-admin-admin", "own": "sk-own-own-own-own-own", "other": "sk-other-other-other-other"}
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
AMPLE_MILLISECONDS = 1000 * AMPLE_SECONDS
expect.set_options(timeout=AMPLE_MILLISECONDS)  # The default of 5 seconds is too short for an answer of a real model.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", action="store_true", help="Write the screenshots of docs/images.")


@pytest.fixture(scope="session")
def server(smollm2_gguf: Path) -> Iterator[RunningServer]:
    """The default model without keys, with bursts."""
    options = {"num_kv_blocks": 1000, "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    llm = AsyncLLM(model=str(smollm2_gguf), **options)
    with run_server(llm, MODEL, page_control=True) as running:
        yield running


@pytest.fixture(scope="session")
def live(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    """A tiny model without keys, with bursts, for tests of pages that show no text."""
    folder = tiny_model_dir("llama", max_position_embeddings=1024)
    options = {"num_kv_blocks": 1000, "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    llm = AsyncLLM(model=str(folder), skip_tokenizer_init=True, **options)
    with run_server(llm, "tiny", page_control=True) as running:
        yield running


@pytest.fixture(scope="session")
def recurrent(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    """A tiny model with recurrent layers."""
    llm = AsyncLLM(
        model=str(tiny_model_dir("lfm2")), num_kv_blocks=60, skip_tokenizer_init=True, num_threads=1, max_num_seqs=4
    )
    with run_server(llm, "tiny") as running:
        yield running


@pytest.fixture(scope="session")
def guarded(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    """A tiny model with keys, read-only."""
    llm = AsyncLLM(
        model=str(tiny_model_dir("llama")), num_kv_blocks=60, skip_tokenizer_init=True, num_threads=1, max_num_seqs=1
    )
    keys = [parse_key(key_record(secret, name=name, admin=name == "admin"), name) for name, secret in SECRETS.items()]
    with run_server(llm, "tiny", keys=KeyRing(keys)) as running:
        yield running


@pytest.fixture(scope="session")
def lesson_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a lesson on a tiny model."""
    folder = tmp_path_factory.mktemp("tiny-model", numbered=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_module, "MAX_EXPLORED", 8)
        patch.setattr(summary, "NUM_SIMULATED", 40)
        write_page(page_data(tiny_lesson(folder)), folder / "lesson.html")
    return (folder / "lesson.html").as_uri()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    assert path is not None, "Chromium is missing: run the tests with `make test-pages`"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A new page; messages of its console that are errors or warnings fail the test. A parameter is the language of the
    browser."""
    page = browser.new_page(viewport=DESKTOP, locale=getattr(request, "param", "en-US"))
    page.set_default_timeout(AMPLE_MILLISECONDS)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.expected_problems = []  # type: ignore[attr-defined]
    yield page
    expected: list[str] = page.expected_problems  # type: ignore[attr-defined]
    page.close()
    assert [text for text in problems if not any(part in text for part in expected)] == []


@pytest.fixture(scope="session")
def modules_page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    """A page in which tests call functions of the modules, and which they leave as it is."""
    page = browser.new_page()
    page.set_default_timeout(AMPLE_MILLISECONDS)
    page.goto(f"{server.url}/chat")
    yield page
    page.close()


@pytest.fixture
def check_page(page: Page, request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Check the open page for accessibility in light and dark, on a desktop and on a phone; write screenshots."""

    def check(name: str) -> None:
        for scheme in ("light", "dark"):
            for device, size in (("desktop", DESKTOP), ("phone", PHONE)):
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size(size)
                page.evaluate("scrollTo(0, 0)")
                page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
                assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], "it scrolls sideways"
                if request.config.getoption("--screenshots"):
                    page.screenshot(path=IMAGES / f"{name}-{device}-{scheme}.png")
            found = Axe().run(page).response["violations"]
            serious = [entry for entry in found if entry["impact"] in ("serious", "critical")]
            assert [(entry["id"], [node["html"] for node in entry["nodes"]]) for entry in serious] == []
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(DESKTOP)

    return check
