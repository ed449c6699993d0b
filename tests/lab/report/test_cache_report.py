"""`chairlift explain-cache`: the needless changes of prompts in an event log, and what they cost."""

from __future__ import annotations

import random
from pathlib import Path

from chairlift.lab.report.cache_report import TOOLS_BEHIND, CacheReport, Change, explain_cache
from chairlift.observability.event_log import encode_event
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from support.command_runner import invoke
from support.tracked_engine import TrackedEngine

RULES, TOOLS, FIRST, SECOND, THIRD = (random.Random(name).choices(range(900), k=64) for name in "abcde")
BEHIND = len(RULES) + 1
"""The position of tools behind a system text with a time."""


class Log:
    """The events of requests that an engine answers one after the other."""

    def __init__(self, num_blocks: int = 400) -> None:
        self.engine = TrackedEngine(num_blocks=num_blocks, block_size=16, max_model_len=1024)

    def add(self, prompt: list[int], client: str, tools_start: int | None = None, lora_id: int = 0) -> None:
        engine = self.engine
        engine.count += 1
        params = SamplingParams(temperature=0, max_tokens=2, tools_start=tools_start)
        salt = f"{len(client)}:{client}:"
        name = f"r{engine.count}"
        engine.core.add(Request(name, prompt, params, 2, tenant=client, cache_salt=salt, lora_id=lora_id))
        engine.to_end()

    def report(self) -> CacheReport:
        assert self.engine.tracker.started is not None
        return explain_cache([self.engine.tracker.started, *self.engine.log.events])


def changes(log: Log) -> dict[tuple[str, str], int]:
    return {(change.client, change.text): cost.num_requests for change, cost in log.report().changes.items()}


def test_a_time_stamp_is_named_with_its_client_its_position_and_its_cost() -> None:
    log = Log()
    for time in range(5):
        log.add([*RULES[:20], 990 + time, *RULES[20:], *FIRST], "web")
        log.add([*TOOLS, *(SECOND if time % 2 else THIRD)], "quiet")
    (change,) = log.report().changes
    cost = log.report().changes[change]
    assert change == Change("fake", "web", "other text at tokens 16 to 31")
    assert cost.num_requests == 4
    assert 4 * 80 <= cost.num_tokens <= 4 * 128
    assert cost.example.startswith("r9 after r")


def test_a_template_that_writes_tools_behind_the_system_text_is_named() -> None:
    log = Log()
    for time in range(3):
        log.add([*RULES, 990 + time, *TOOLS, *FIRST], "agent", BEHIND)
    assert changes(log) == {("agent", TOOLS_BEHIND): 2}
    assert "The chat template of fake writes tools behind text that changes." in log.report().parts()


def test_tools_in_front_of_the_system_text_are_not_named() -> None:
    log = Log()
    for time in range(3):
        log.add([*TOOLS, *RULES, 990 + time, *FIRST], "agent", 0)
    assert changes(log) == {("agent", "other text at tokens 128 to 143"): 2}


def test_a_request_that_drops_its_tools_for_one_turn_is_named() -> None:
    log = Log()
    log.add([*RULES, *TOOLS, *FIRST, *SECOND], "agent", len(RULES))
    log.add([*RULES, *FIRST, *SECOND, *THIRD], "agent")
    log.add([*RULES, *TOOLS, *FIRST, *SECOND, *THIRD], "agent", len(RULES))
    assert changes(log) == {("agent", "drops the tools"): 1}


def test_a_trimmed_history_and_another_adapter_are_named() -> None:
    log = Log()
    log.add([*RULES, *FIRST, *SECOND, *THIRD], "chat")
    log.add([*RULES, *SECOND, *THIRD], "chat")
    log.add([*RULES, *FIRST, *SECOND, *THIRD], "chat", lora_id=1)
    assert changes(log) == {("chat", "removes earlier text"): 1, ("chat", "another LoRA adapter"): 1}


def test_evicted_prefixes_are_counted_by_reason_and_are_no_change() -> None:
    log = Log(num_blocks=20)
    log.add([*RULES, *FIRST], "a")
    log.add(random.Random(1).choices(range(900), k=300), "a")
    log.add([*RULES, *FIRST], "a")
    report = log.report()
    assert not report.changes
    assert report.missed["evicted"]["requests"] == 1
    assert (report.num_requests, report.num_tokens) == (3, 556)
    assert report.num_memory_tokens + sum(counts["tokens"] for counts in report.missed.values()) <= report.num_tokens


def test_the_command_prints_the_report(tmp_path: Path) -> None:
    log = Log()
    for time in range(2):
        log.add([990 + time, *RULES, *FIRST], "web")
    path = tmp_path / "events.jsonl"
    assert log.engine.tracker.started is not None
    path.write_bytes(b"\n".join(map(encode_event, [log.engine.tracker.started, *log.engine.log.events])))
    shown = invoke(["explain-cache", str(path)]).stdout
    assert "2 requests, 258 prompt tokens: 0.0% from memory, 0.0% from disk, 100.0% computed" in shown
    assert "other text at tokens 0 to 15" in shown
    path.write_text("nothing\n")
    assert f"not an event log: {path}, line 1" in str(invoke(["explain-cache", str(path)]).exception)


def test_a_log_without_a_prefix_cache_has_nothing_to_explain() -> None:
    assert explain_cache([]).parts() == ["No prompt was searched in a prefix cache."]
