"""Calls that are held back until all of them are read are parsed on a thread if they are large."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from chairlift import AsyncLLM
from chairlift.server.api import engine_call
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.tools import tool_parser
from chairlift.server.tools.python_calls import python_calls
from support.case_loop import loop_over
from support.running_server import RunningServer, run_server
from support.scripted_model import write_scripted_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:{{ '\n' }}"
WORDS = ["[f(x='", *(f"<{number}>" for number in range(12)), "')]"]
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
TURNS = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": TURNS, "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": TURNS,
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
        "max_tokens": 100,
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted"), WORDS, TEMPLATE)
    llm = AsyncLLM(model=str(folder), num_kv_blocks=60, num_threads=1, max_num_seqs=2)
    with run_server(llm, "tiny", api=ApiOptions(tool_call_parser="pythonic")) as running:
        yield running


@loop_over("path", BODIES)
def test_large_held_calls_are_parsed_on_a_thread(server: RunningServer, path: str) -> None:
    threads: list[int] = []

    def record(*arguments: Any) -> list[tuple[str, str]]:
        threads.append(threading.get_ident())
        return python_calls(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool_parser, "python_calls", record)
        for limit in (1024, 8):
            patch.setattr(engine_call, "LARGE_OUTPUT", limit)
            answer = server.post(path, {"model": "tiny", "stream": True, **BODIES[path]})
            assert "<11>" in answer.text, answer.text
    loop, other = threads
    assert loop != other
