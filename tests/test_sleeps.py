"""Every sleep of a test has a reason, and none of them makes a test depend on the speed of the machine."""

from __future__ import annotations

import ast
from pathlib import Path

POLLS = "between two looks at a condition, within AMPLE_SECONDS or the life of the process"
ENDLESS = "longer than any test: the task is cancelled, or the process is killed"
STEPS = "steps that take time, so that a request is not answered before the test acts on it"
ABSENCE = "nothing may happen meanwhile: a slow machine can hide a fault, but not report one"
MOMENTS = "random moments: any outcome of theirs is allowed"
PACKETS = "a client or a producer that pauses, of which the result does not depend"

SLEEPS = {
    "fake_engine_process": {STEPS: 1},
    "faulty_engine": {POLLS: 1, STEPS: 1, ENDLESS: 1},
    "in_process_cluster": {POLLS: 1, PACKETS: 1},
    "late_engine_process": {PACKETS: 1},
    "running_server": {POLLS: 1, STEPS: 1},
    "scripted_engine": {STEPS: 1},
    "stuck_server": {ENDLESS: 2},
    "test_async_llm": {STEPS: 1},
    "test_batch_command": {ENDLESS: 1},
    "test_cluster_client": {POLLS: 1, ABSENCE: 2},
    "test_disk_block_store": {POLLS: 1},
    "test_explain_access": {STEPS: 1},
    "test_grammar_compiler": {PACKETS: 1},
    "test_http_protocol": {PACKETS: 1},
    "test_lora_engine": {STEPS: 1},
    "test_model_manager": {ABSENCE: 4, MOMENTS: 3},
    "test_process_client": {ABSENCE: 2},
    "test_process_kills": {MOMENTS: 2},
    "test_pull_command": {PACKETS: 1},
    "test_ray_cluster": {MOMENTS: 1},
    "test_route_work": {STEPS: 1},
    "test_server_limits": {PACKETS: 1},
    "test_shutdown": {POLLS: 1},
    "test_streaming": {PACKETS: 1, ENDLESS: 2},
    "waiting": {POLLS: 2},
}
"""The sleeps in files of the tests, by their reasons. Those of core have none."""

SHORT_LIMITS = {
    "test_admission": "a deadline in virtual time",
    "test_models_server": "a deadline of a request that passes while the test keeps its model from being loaded",
    "test_server_limits": "deadlines of requests that pass because the steps are slow or the engine hangs",
}
"""Arguments `timeout` below 60 s, which must pass; longer ones must not."""


def nodes(file: Path, text: str) -> list[ast.AST]:
    """The syntax tree of a file, or nothing if it does not contain a text."""
    source = file.read_text(encoding="utf-8")
    return list(ast.walk(ast.parse(source))) if text in source else []


def num_sleeps(file: Path) -> int:
    """The number of calls of a function `sleep` for more than 0 s."""
    calls = [node for node in nodes(file, "sleep(") if isinstance(node, ast.Call)]
    sleeps = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "sleep"]
    return sum(ast.unparse(call.args[0]) != "0" for call in sleeps)


def short_limits(file: Path) -> int:
    """The number of arguments `timeout` below 60 s."""
    values = [node.value for node in nodes(file, "timeout=") if isinstance(node, ast.keyword) and node.arg == "timeout"]
    return sum(isinstance(value, ast.Constant) and value.value is not None and value.value < 60 for value in values)


def test_every_sleep_and_every_short_limit_has_a_reason() -> None:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    found = {file.stem: count for file in files if (count := num_sleeps(file))}
    assert found == {name: sum(reasons.values()) for name, reasons in SLEEPS.items()}
    files = sorted(Path(__file__).parent.rglob("*.py"))
    assert {file.stem for file in files if short_limits(file)} == {*SHORT_LIMITS}
