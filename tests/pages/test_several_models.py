"""Tests the pages of a server with two models in Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from chairlift import AsyncLLM
from chairlift.server.application import create_models_app
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.models.served_model import ModelService, ServedModel
from chairlift.server.preparation.api_options import ApiOptions
from support.running_server import open_options, run_app
from support.waiting import wait_for


@pytest.fixture(scope="module")
def url(tiny_model_dir: Callable[..., Path]) -> Iterator[str]:
    """A server with two models that are loaded already, which have different numbers of seats."""
    models = []
    for name, arch, seats in (("first", "llama", 2), ("second", "qwen3", 3)):
        folder = str(tiny_model_dir(arch))
        llm = AsyncLLM(
            model=folder, num_kv_blocks=60, skip_tokenizer_init=True, num_threads=1, max_num_seqs=seats, block_size=16
        )
        model = ServedModel(ModelSpec(name), llm.events)
        model.set_service(ModelService(llm, ApiOptions()))
        models.append(model)
    app = create_models_app(ModelManager(models), open_options(page_control=True))
    with run_app(app) as (address, _server):
        yield address


def newest_cell(page: Page) -> str:
    """The description of the newest cell of the lanes, which the keyboard reaches first."""
    page.locator("#lanes").focus()
    page.keyboard.press("ArrowRight")
    return page.inner_text("#cell-status")


def test_the_live_page_shows_the_chosen_model(page: Page, url: str, check_page: Callable[[str], None]) -> None:
    page.goto(url)
    expect(page.locator("#choose-model")).to_have_value("first")
    expect(page.locator("#figure-running")).to_have_text("0 / 2")
    page.select_option("#choose-model", "second")
    page.wait_for_url("**/?model=second")
    expect(page.locator("#choose-model")).to_have_value("second")
    expect(page.locator("#figure-running")).to_have_text("0 / 3")
    page.evaluate("document.querySelector('#burst-form details').open = true")
    for name, value in (("max_prompt_tokens", "20"), ("max_output_tokens", "40"), ("num_requests", "6")):
        page.fill(f"input[name={name}]", value)
    page.get_by_role("button", name="Send the burst").click()
    expect(page.locator("#burst-status")).to_contain_text("6 requests sent")
    expect(page.locator("#lanes")).to_have_attribute("aria-label", "Batch lanes. 0 requests running, 0 waiting.")
    wait_for(lambda: newest_cell(page).startswith("step "))
    check_page("several-models")
    page.goto(url)
    expect(page.locator("#figure-running")).to_have_text("0 / 2")
    assert not newest_cell(page).startswith("step ")


def test_the_chat_page_lists_the_models(page: Page, url: str) -> None:
    page.goto(f"{url}/chat")
    expect(page.locator("#model option")).to_have_text(["first", "second"])
