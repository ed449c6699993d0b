"""Runs the scripts in examples/ and checks their output."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from chairlift import AsyncLLM
from support.running_server import MODEL, RunningServer, run_server

EXAMPLES = Path(__file__).parent.parent / "examples"
CLIENTS = {
    "chat_stream": r"The capital of France is Paris\.\n37 prompt tokens, 8 output tokens\n",
    "structured_output": r"\S.* is \d+ years old\n",
    "tool_call": r"get_weather\(\{'city': '.*'\}\) -> It is sunny in .*\.\n(?s:.+)\n",
}
"""Scripts that call a server -> what they print."""

WITHOUT_SERVER = {
    "offline_batch": r"'The capital of France is' -> ' Paris\.[^']*' \(length\)\n('.*' -> '.*' \(length\)\n){2}",
    "scheduling_policy": r"(\w.+ TTFT p50 +\S+ s, p99 +\S+ s; E2E latency p50 +\S+ s, p99 +\S+ s\n){3}",
    "plan": r"2GiB: (\d+) blocks; \d+ requests .*\n8GiB: (\d+) blocks; \d+ requests .*\n",
    "replay_trace": r"(\d seats: 8 requests, TTFT p99 \S+ s\n){3}",
}
"""The other scripts -> what they print."""

FOREIGN = {"langchain_chat"}
"""Scripts whose packages are not in the development environment: `make test-clients` runs them."""


@cache
def run(name: str, url: str = "") -> str:
    """The output of a script, which runs in this process."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setenv("CHAIRLIFT_URL", url)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    torch.set_num_threads(1)  # Some scripts create an engine.
    return output.getvalue()


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[RunningServer]:
    llm = AsyncLLM(model=str(smollm2_gguf), num_kv_blocks=200, num_threads=1, max_num_seqs=4)
    with run_server(llm, MODEL) as running:
        yield running


@pytest.mark.parametrize("name", CLIENTS)
def test_a_script_that_calls_a_server(name: str, server: RunningServer) -> None:
    assert re.fullmatch(CLIENTS[name], run(name, server.url))


@pytest.mark.parametrize("name", WITHOUT_SERVER)
def test_a_script_without_a_server(name: str, smollm2_gguf: Path) -> None:
    assert re.fullmatch(WITHOUT_SERVER[name], run(name))


def test_seats_shorten_the_wait_for_the_first_token_of_a_replayed_trace(smollm2_gguf: Path) -> None:
    ttft = [float(seconds) for seconds in re.findall(r"TTFT p99 (\S+) s", run("replay_trace"))]
    assert ttft[0] > ttft[2] > 0


def test_shortest_output_first_shortens_the_median_latency() -> None:
    latencies = dict(re.findall(r"^(\w.+?) +TTFT.* E2E latency p50 +(\S+) s", run("scheduling_policy"), re.MULTILINE))
    assert float(latencies["shortest output first"]) < float(latencies["first come, first served"])


@pytest.mark.parametrize("name", FOREIGN)
def test_scripts_with_other_packages_compile_and_are_run_by_make(name: str) -> None:
    compile((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), name, "exec")
    makefile = (EXAMPLES.parent / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"with-clients .* examples/{name}\.py$", makefile, re.MULTILINE)


def test_every_script_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*CLIENTS, *WITHOUT_SERVER, *FOREIGN}
