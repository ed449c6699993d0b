"""Templates that exceed a limit are stopped, and later requests are not affected."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import RequestError
from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.loading.text.template_process import TemplateProcess
from chairlift.loading.text.template_worker import CPU_SECONDS

USER = [{"role": "user", "content": "hi"}]


def render(text: str, **extra: Any) -> str:
    return ChatTemplate(text, {}).render(USER, **extra)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LOOPS + "{% endfor %}", "stopped after"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        (DOUBLING, "memory|characters"),
        ("{{ 'x' * 10**11 }}", "memory|stopped"),
        ("{{ ('%' ~ 10**10 ~ 'd') % 3 }}", "memory|stopped|characters"),
        ("{{ 'x' | center(10**8) }}", "characters|memory"),
        ("{{ range(10**9) | list }}", "too big|range"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion|compiled"),
    ],
)
def test_template_that_exceeds_a_limit_is_stopped(text: str, problem: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError, match=problem):
        render(text)
    assert time.monotonic() - started < 20 * CPU_SECONDS
    assert render("{{ messages[0].content }}") == "hi"


def test_unresponsive_worker_is_killed_and_restarted() -> None:
    process = TemplateProcess(seconds=0.3)
    assert process.run({"operation": "render", "template": "a", "variables": {}})["text"] == "a"
    first = process._process
    assert first is not None
    with pytest.raises(RequestError, match=r"no answer within 0.3 s"):
        # One operation that no timer of Python's interrupts: a power of 40 million digits.
        process.run({"operation": "render", "template": "{{ 7 ** (5 * 10 ** 7) > 1 }}", "variables": {}})
    assert first.poll() is not None
    assert process.run({"operation": "render", "template": "b", "variables": {}})["text"] == "b"
    process.close()


def test_constants_are_not_evaluated_to_find_variables() -> None:
    started = time.monotonic()
    with contextlib.suppress(RequestError):
        assert ChatTemplate("{{ 'x' * 10**11 }}{{ tools }}", {}).variables <= {"tools"}
    assert time.monotonic() - started < 20 * CPU_SECONDS
    assert ChatTemplate("{{ tools }}{{ messages }}", {}).variables == {"tools", "messages"}


def test_worker_does_not_inherit_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_API_KEY", "secret")
    process = TemplateProcess()
    process.run({"operation": "render", "template": "", "variables": {}})
    assert process._process is not None
    with open(f"/proc/{process._process.pid}/environ", "rb") as environ:
        assert b"CHAIRLIFT_API_KEY" not in environ.read()
    process.close()


def test_worker_starts_in_a_process_with_many_open_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this machine allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    process = TemplateProcess()
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while opened.enter_context(Path(os.devnull).open()).fileno() < 1100:
            pass
        assert process.run({"operation": "render", "template": "a", "variables": {}})["text"] == "a"
    process.close()


def test_requests_of_several_threads_run_one_at_a_time() -> None:
    texts: dict[int, str] = {}

    def one(index: int) -> None:
        texts[index] = render("{{ messages[0].content }} {{ number }}", number=index)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {index: f"hi {index}" for index in range(16)}


def test_long_conversations_pass_through_the_pipe() -> None:
    long = "é" * 3_000_000
    assert render("{{ long }}", long=long) == long
    with pytest.raises(RequestError, match="must contain only JSON values"):
        render("{{ thing }}", thing=os)
