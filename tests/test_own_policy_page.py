"""Builds the policies of docs/guide/own-policies.md as the page says, and compares what the commands print."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import LLM, SamplingParams
from support.command_runner import invoke

PAGE = (Path(__file__).parents[1] / "docs" / "guide" / "own-policies.md").read_text(encoding="utf-8")
FILES = re.findall(r"^Write a file named (\w+\.py).*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```\n\$ chairlift ([^\n]+)\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _files_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def commands(name: str) -> list[tuple[list[str], str]]:
    """The arguments and the shown output of the calls of a command."""
    return [(shlex.split(call), shown) for call, shown in COMMANDS if call.startswith(f"{name} ")]


def test_the_simulations_print_what_the_page_shows(tmp_path: Path) -> None:
    calls = commands("simulate")
    assert len(calls) == len(FILES) == 2
    for call, shown in calls:
        done = invoke(call)
        assert done.exception is None, done.exception
        printed = done.stdout.splitlines()
        missing = [line for line in shown.splitlines() if line not in (*printed, "...")]
        assert not missing, done.stdout
        rows = list(csv.DictReader((tmp_path / call[call.index("--output") + 1]).open(encoding="utf-8")))
        named = call[next(call.index(option) for option in ("--policies", "--kv") if option in call) + 1]
        assert [row["policy"] for row in rows] == named.split(",")


def test_the_engine_runs_them_and_answers_with_the_same_tokens(tiny_model_dir: Callable[..., Path]) -> None:
    model = str(tiny_model_dir("llama", max_position_embeddings=512))
    small = ["--model", model, "--skip-tokenizer-init", "--num-threads", "1", "--num-warmups", "0"]
    ((call, _),) = commands("bench compare")
    for option, value in (("--num-prompts", "6"), ("--repeats", "1")):
        call[call.index(option) + 1] = value
    call[call.index("--policies") + 1] += ",headroom:Headroom"
    done = invoke([*call, *small, "--input-len", "uniform:4..20", "--output-len", "fixed:6"])
    assert done.exit_code == 0, done.output
    assert "same tokens: yes, 6 of 6 requests" in done.stdout


def test_the_page_serves_an_order_that_an_engine_runs(tiny_model_dir: Callable[..., Path]) -> None:
    ((call, _),) = commands("serve")
    options = {"skip_tokenizer_init": True, "num_kv_blocks": 20, "kv": "headroom:Headroom"}
    llm = LLM(str(tiny_model_dir("llama")), scheduling_policy=call[call.index("--scheduling-policy") + 1], **options)
    prompts = [{"prompt_token_ids": [1] * size} for size in (9, 3)]
    answers = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [4, 4]
