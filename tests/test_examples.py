"""Runs the scripts in examples/ and checks their output."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from chairlift import AsyncLLM
from support.byte_tokenizer import VOCAB_SIZE, with_byte_tokenizer
from support.case_loop import loop_over
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

FROM_VLLM = {
    "basic": r"(.+ \[(\d+(, )?){1,12}\] ['\"].*['\"]\n){3}",
    "beam_search": r"((\[(\d+, )+\d+\]) -\d+\.\d 6 ['\"](The capital of France is|One, two, three,).*['\"]\n){6}",
    "chat": r"(\d+ \[(\d+(, )?){1,16}\] ['\"].*['\"]\n){2}",
    "logprobs": r"(\d+ -\d+\.\d 1 .+\n   \{\d+: .+, \d+: .+\}\n){6}\d+ None\n(\d+ \[.+\]\n)+3 \[True, True, True\]\n",
    "prefix_caching": r"(.*) computed\n(.*) cached\n\1 cached\n\2 cached\n\1 computed\nTrue\n",
    "structured_outputs": r".+ '(good|bad)' stop\n.+ '(19|20)\d\d' stop\n.+ '\[.*\]' stop\n\[(\d\d(, )?){1,3}\]\n",
}
"""Scripts in the shape of vLLM's examples -> what they print."""

FOREIGN = {"langchain_chat"}
"""Scripts whose packages are not in the development environment: `make test-clients` runs them."""


@cache
def run(name: str, url: str = "", *arguments: str) -> str:
    """The output of a script, which runs in this process."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setenv("CHAIRLIFT_URL", url)
        patch.setattr(sys, "argv", [name, *arguments])
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


@loop_over("name", FROM_VLLM)
def test_a_script_for_vllm_runs_with_another_import(
    name: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    folder = with_byte_tokenizer(model, tmp_path)
    assert re.fullmatch(FROM_VLLM[name], run(f"from_vllm/{name}", "", str(folder)))


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
    assert {path.stem for path in EXAMPLES.glob("from_vllm/*.py")} == {*FROM_VLLM}
