"""Holds a conversation in Open WebUI over a running server, in Chromium, and writes a screenshot of it.

    python -m venv open-webui && open-webui/bin/pip install open-webui
    chairlift serve --api-key SECRET
    python -m tools.open_webui --open-webui open-webui/bin/open-webui --api-key SECRET

Open WebUI runs on a free port with SETTINGS, which docs/guide/open-webui.md has too, and its data is in a temporary
folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from playwright.sync_api import Page

QUESTIONS: Final = ("What is the capital of France?", "And of Italy?")
CHROMIUM_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_SECONDS: Final = 300.0
STOP_SECONDS: Final = 30.0
ANSWER_SECONDS: Final = 300.0

SETTINGS: Final = {
    "ENABLE_OLLAMA_API": "False",
    "DEFAULT_MODEL_METADATA": '{"capabilities": {"builtin_tools": false}}',
    "ENABLE_TITLE_GENERATION": "False",
    "ENABLE_TAGS_GENERATION": "False",
    "ENABLE_FOLLOW_UP_GENERATION": "False",
}
"""The settings of Open WebUI for a small model, besides the address and the key of the server."""

FOR_ONE_RUN: Final = {"WEBUI_AUTH": "False", "OFFLINE_MODE": "True", "RAG_EMBEDDING_ENGINE": "openai"}
"""No accounts, and no access to other hosts."""


@contextmanager
def running(command: str, url: str, api_key: str) -> Iterator[str]:
    """Run Open WebUI; yields its URL when it answers. Raises TimeoutError if it does not."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    own, address = {"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": api_key}, f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [os.path.abspath(shutil.which(command) or command), "serve", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **SETTINGS, **FOR_ONE_RUN, **own, "DATA_DIR": folder},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until_healthy(process, address)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health"):
                return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"Open WebUI does not answer at {address} (exit status: {process.poll()})")


def converse(page: Page, address: str) -> list[str]:
    """Ask all questions in one chat; returns the answers."""
    page.set_default_timeout(1000 * ANSWER_SECONDS)
    page.goto(address)
    page.get_by_text("Okay, Let's Go!").click()
    answers = page.locator(".chat-assistant")
    for number, question in enumerate(QUESTIONS, 1):
        page.locator("#chat-input").fill(question)
        page.keyboard.press("Enter")
        page.get_by_label("Regenerate").nth(number - 1).wait_for()  # It appears when the answer is complete.
    return answers.all_inner_texts()


def main() -> None:
    """Print the answers, and write the screenshot."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open-webui", default="open-webui", help="the program of Open WebUI")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--output", type=Path, default=Path("open-webui.png"))
    options = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    with running(options.open_webui, options.url, options.api_key) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 640})
        for question, answer in zip(QUESTIONS, converse(page, address), strict=True):
            print(f"{question}\n    {answer}")
        page.screenshot(path=options.output)
        browser.close()


if __name__ == "__main__":
    main()
