"""The reason why the prefix cache had no more of a prompt, over prompts with known faults."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from chairlift.core.engine_core import EngineCore
from chairlift.core.kv import prefix_misses
from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.events import EventList, PrefixMatched
from chairlift.outputs import EngineCoreOutput, PrefixMatch
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from support.fakes import CheckingExecutor, make_engine, make_request

BLOCK_SIZE = 16
MAX_TOKENS = 20


def text(name: str, count: int = 40) -> list[int]:
    """The token ids of a text, which differ from those of texts with other names."""
    return random.Random(name).choices(range(900), k=count)


HEAD, RULES = text("You are a helpful assistant", 10), text("Answer in one sentence", 70)
MORNING, NOON = [901, 902, 903], [911, 912, 913]
SEARCH, READ, WRITE = text("search", 50), text("read", 45), text("write", 60)
TOOLS = SEARCH + READ + WRITE
FIRST, SECOND, THIRD = text("first turn", 60), text("second", 75), text("the third one", 64)
QUESTION, OTHER_QUESTION = text("why", 35), text("how come", 38)
SYSTEM = HEAD + RULES


class FastExecutor(CheckingExecutor):
    """Samples tokens as its base class, and does not check the slots."""

    def _write(self, request_id: str, count: int) -> None:
        self.computed[request_id] += count

    def _check(self, request_id: str, count: int) -> None:
        return


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    salt: str | None = None
    tenant: str = ""
    lora_id: int = 0
    logprobs: int | None = None


@dataclass(frozen=True)
class Case:
    """A prompt after earlier ones, and the reason of its first miss.

    Attributes:
        shown: the reason that the caller may know; None if it is the same.
    """

    name: str
    earlier: Sequence[Prompt]
    prompt: Prompt
    reason: str | None
    position: int | None = None
    shown: str | None = None
    options: dict[str, object] = field(default_factory=dict)


def changed(name: str, before: list[int], after: list[int], position: int) -> Case:
    return Case(name, [Prompt(before)], Prompt(after), "differs", position)


def used(prompt: list[int], answer: int = MAX_TOKENS) -> list[int]:
    """The prompt and the answer that the fake model gives to it."""
    core, _, _, _ = make_engine_of_cases()
    core.add(make_request("used", prompt, answer))
    tokens = list(prompt)
    while core.has_work:
        tokens += [token for output in core.step() for token in output.new_token_ids]
    return tokens


def make_engine_of_cases(**options: object) -> tuple[EngineCore, object, object, EventList]:
    defaults: dict[str, object] = {"num_blocks": 400, "max_num_batched_tokens": 512, "max_model_len": 2048}
    engine = make_engine(block_size=BLOCK_SIZE, **{**defaults, **options})  # type: ignore[arg-type]
    engine[2].__class__ = FastExecutor
    return engine


ALL = SYSTEM + TOOLS + FIRST + SECOND + THIRD + QUESTION
DIFFERENCES = [
    changed("time stamp at the beginning", MORNING + ALL, NOON + ALL, 0),
    changed("time stamp behind the first words", HEAD + MORNING + RULES + TOOLS, HEAD + NOON + RULES + TOOLS, 10),
    changed("time stamp behind the system text", SYSTEM + MORNING + TOOLS, SYSTEM + NOON + TOOLS, 80),
    changed("time stamp behind the tools", SYSTEM + TOOLS + MORNING + FIRST, SYSTEM + TOOLS + NOON + FIRST, 235),
    changed("seconds of a time stamp", [*HEAD, 901, 1, *RULES], [*HEAD, 901, 2, *RULES], 11),
    changed("two time stamps", HEAD + MORNING + RULES + MORNING + TOOLS, HEAD + NOON + RULES + NOON + TOOLS, 10),
    changed("a longer name of the user", [*HEAD, 5, *RULES], [*HEAD, 6, 7, *RULES], 10),
    changed("a token before the system text", ALL, [999, *ALL], 0),
    changed("the first two tools reordered", SYSTEM + SEARCH + READ + WRITE, SYSTEM + READ + SEARCH + WRITE, 80),
    changed("the last two tools reordered", SYSTEM + SEARCH + READ + WRITE, SYSTEM + SEARCH + WRITE + READ, 130),
    changed("the last tool first", SYSTEM + SEARCH + READ + WRITE, SYSTEM + WRITE + SEARCH + READ, 80),
    changed("a changed tool", SYSTEM + TOOLS, SYSTEM + SEARCH[:20] + [998] + SEARCH[21:] + READ + WRITE, 100),
    changed("a new first tool", SYSTEM + READ + WRITE, SYSTEM + SEARCH + READ + WRITE, 80),
    changed("a tool removed", SYSTEM + TOOLS, SYSTEM + SEARCH + WRITE, 130),
    changed("dropped tools", ALL, SYSTEM + FIRST + SECOND + THIRD + QUESTION, 80),
    changed("tools again", SYSTEM + FIRST + SECOND, SYSTEM + TOOLS + FIRST + SECOND + THIRD, 80),
    changed("the first turn trimmed", ALL, SYSTEM + TOOLS + SECOND + THIRD + QUESTION + OTHER_QUESTION, 235),
    changed("two turns trimmed", ALL, SYSTEM + TOOLS + THIRD + QUESTION + OTHER_QUESTION, 235),
    changed("a turn in the middle trimmed", ALL, SYSTEM + TOOLS + FIRST + THIRD + QUESTION, 295),
    changed("a summary of the first turn", ALL, SYSTEM + TOOLS + text("sum", 20) + SECOND + THIRD, 235),
    changed("a token before a periodic text", [5, 6] * 100, [7, *[5, 6] * 100], 0),
    changed("an edited message", ALL, SYSTEM + TOOLS + FIRST[:30] + [997] + FIRST[31:] + SECOND, 265),
]
OTHERS = [
    Case("the first prompt", [], Prompt(ALL), "never_seen"),
    Case("an unrelated prompt", [Prompt(ALL)], Prompt(text("something else", 90)), "never_seen"),
    Case("another question", [Prompt(SYSTEM + QUESTION)], Prompt(SYSTEM + OTHER_QUESTION), "never_seen"),
    Case("the next turn", [Prompt(SYSTEM + FIRST)], Prompt(used(SYSTEM + FIRST) + SECOND), "never_seen"),
    Case("the same prompt", [Prompt(ALL)], Prompt(ALL), None),
    Case("a short prompt", [], Prompt(HEAD), None),
    Case("another adapter", [Prompt(ALL, lora_id=1)], Prompt(ALL, lora_id=2), "other_adapter"),
    Case("no adapter", [Prompt(ALL, "s", "a", 1)], Prompt(ALL, "s", "a"), "other_adapter"),
    Case("another salt", [Prompt(ALL, "1:a:x", "a")], Prompt(ALL, "1:a:y", "a"), "other_salt", shown="never_seen"),
    Case("another key", [Prompt(ALL, "1:a:", "a")], Prompt(ALL, "1:b:", "b"), "other_salt", shown="never_seen"),
    Case("another key, changed", [Prompt(MORNING + ALL, "1:a:", "a")], Prompt(NOON + ALL, "1:b:", "b"), "never_seen"),
    Case("another key without salts", [Prompt(MORNING + ALL, None, "a")], Prompt(NOON + ALL, None, "b"), "never_seen"),
    Case(
        "changed as that of another key",
        [Prompt(NOON + ALL, "1:a:", "a"), Prompt(MORNING + ALL, "1:b:", "b")],
        Prompt(NOON + ALL, "1:b:", "b"),
        "differs",
        0,
    ),
    Case(
        "changed as that of another key without salts",
        [Prompt(NOON + ALL, None, "a"), Prompt(MORNING + ALL, None, "b"), Prompt(text("many other tokens", 500))],
        Prompt(NOON + ALL, None, "b"),
        "differs",
        0,
        options={"num_blocks": 34},
    ),
    Case("logprobs of the prompt", [Prompt(ALL)], Prompt(ALL, logprobs=0), "prompt_logprobs"),
    Case(
        "evicted",
        [Prompt(ALL), Prompt(text("many other tokens", 500))],
        Prompt(ALL),
        "evicted",
        options={"num_blocks": 34},
    ),
    Case(
        "the answer with other reasoning",
        [Prompt(SYSTEM + FIRST), Prompt(used(SYSTEM + FIRST) + SECOND + THIRD)],
        Prompt(SYSTEM + FIRST + used(SYSTEM + FIRST)[155:] + SECOND + THIRD),
        "differs",
        140,
    ),
    Case(
        "evicted prompt of another key without salts",
        [Prompt(ALL, None, "a"), Prompt(text("many other tokens", 500), None, "a")],
        Prompt(ALL, None, "b"),
        "evicted",
        shown="never_seen",
        options={"num_blocks": 34},
    ),
    Case(
        "evicted prompt of another key with the same shared salt",
        [Prompt(ALL, "0::x", "a"), Prompt(text("many other tokens", 500), "0::x", "a")],
        Prompt(ALL, "0::x", "b"),
        "evicted",
        shown="never_seen",
        options={"num_blocks": 34},
    ),
    Case(
        "no recurrent state",
        [Prompt(ALL)],
        Prompt(ALL[:200] + text("something else", 90)),
        "checkpoint_missing",
        options={"checkpoints": CheckpointPlan(64, 1024)},
    ),
]


def request_of(name: str, prompt: Prompt) -> Request:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, prompt_logprobs=prompt.logprobs)
    return Request(
        name, prompt.token_ids, params, MAX_TOKENS, tenant=prompt.tenant, cache_salt=prompt.salt, lora_id=prompt.lora_id
    )


def run(core: EngineCore, request: Request) -> list[EngineCoreOutput]:
    core.add(request)
    outputs = []
    while core.has_work:
        core._clock.advance(1.0)  # type: ignore[attr-defined]
        outputs += core.step()
    return outputs


def matches(events: EventList) -> dict[str, PrefixMatched]:
    return {event.request_id: event for event in events.events if isinstance(event, PrefixMatched)}


@pytest.mark.parametrize("case", DIFFERENCES + OTHERS, ids=lambda case: case.name)
def test_the_reason_of_the_first_miss_is_named(case: Case) -> None:
    core, _, _, events = make_engine_of_cases(**case.options)
    for index, prompt in enumerate(case.earlier):
        run(core, request_of(f"earlier{index}", prompt))
    outputs = run(core, request_of("r", case.prompt))
    found = matches(events)["r"]
    assert (found.reason, found.position) == (case.reason, case.position)
    shown = next(output.prefix for output in outputs if output.prefix is not None)
    assert shown.reason == (case.shown or case.reason)
    assert (shown.position, shown.other_id, shown.evicted_time, shown.is_own) == (case.position, None, None, True)
    if case.reason == "differs":
        assert 0 < found.num_repeated_tokens <= len(case.prompt.token_ids)
        assert found.other_id is not None
        assert found.other_id.startswith("earlier")


def test_the_tokens_from_memory_and_the_evicting_request_are_known() -> None:
    core, _, _, events = make_engine_of_cases(num_blocks=34)
    run(core, request_of("a", Prompt(ALL)))
    run(core, request_of("again", Prompt(ALL)))
    run(core, request_of("b", Prompt(text("many other tokens", 500))))
    run(core, request_of("c", Prompt(ALL)))
    found = matches(events)
    limit = (len(ALL) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert (found["a"].num_memory_tokens, found["again"].num_memory_tokens) == (0, limit)
    evicted = found["c"]
    assert evicted.other_id == "b"
    assert evicted.evicted_time is not None
    assert evicted.idle_seconds is not None
    assert 0 < evicted.idle_seconds < evicted.evicted_time
    assert evicted.for_caller().idle_seconds == evicted.idle_seconds


def test_a_prompt_that_is_being_computed_is_not_reported_as_new() -> None:
    core, _, _, events = make_engine_of_cases(max_num_batched_tokens=64)
    core.add(request_of("a", Prompt(ALL)))
    core.step()
    core.add(request_of("b", Prompt(ALL)))
    core.step()
    assert matches(events)["b"].reason == "in_progress"
    assert matches(events)["b"].num_memory_tokens > 0


def test_of_the_prompts_with_another_salt_the_one_with_most_of_the_same_tokens_is_named() -> None:
    core, _, _, events = make_engine_of_cases()
    for name, rest in (("short", OTHER_QUESTION), ("same", TOOLS + FIRST), ("other", [999, *QUESTION])):
        run(core, request_of(name, Prompt(SYSTEM + rest, "1:a:x", "a")))
    run(core, request_of("r", Prompt(SYSTEM + TOOLS + FIRST, "1:a:y", "a")))
    found = matches(events)["r"]
    assert (found.reason, found.other_id) == ("other_salt", "same")
    assert found.num_repeated_tokens == len(SYSTEM + TOOLS + FIRST)


def test_a_running_prompt_is_remembered_beside_an_equal_one() -> None:
    core, manager, _, _ = make_engine_of_cases()
    core.add(make_request("a", ALL, 40))
    core.add(make_request("b", ALL, 20))
    while core.has_work:
        core.step()
    remembered = manager.misses._prompts  # type: ignore[attr-defined]
    assert [(name, len(prompt.marks)) for name, prompt in remembered.items()] == [("a", len(ALL) + 39)]


def test_removed_and_replaced_text_are_told_apart() -> None:
    core, _, _, events = make_engine_of_cases()
    run(core, request_of("a", Prompt(ALL)))
    run(core, request_of("trimmed", Prompt(SYSTEM + TOOLS + SECOND + THIRD + QUESTION)))
    run(core, request_of("replaced", Prompt([*SYSTEM[:40], 996, *SYSTEM[41:], *TOOLS])))
    found = matches(events)
    assert found["trimmed"].num_moved_tokens == len(FIRST)
    assert found["replaced"].num_moved_tokens == 0


def test_the_remembered_prompts_and_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_misses, "MAX_PROMPTS", 8)
    monkeypatch.setattr(prefix_misses, "MAX_MARKS", 400)
    monkeypatch.setattr(prefix_misses, "MAX_EVICTED", 16)
    core, manager, _, _ = make_engine_of_cases(num_blocks=30)
    misses = manager.misses  # type: ignore[attr-defined]
    for index in range(40):
        run(core, request_of(f"r{index}", Prompt(text(f"prompt {index}", 100 + index), salt=str(index % 3))))
        assert len(misses._prompts) == len(misses._sorted) <= 8
        assert sum(len(prompt.marks) for prompt in misses._prompts.values()) == misses._num_marks <= 400
        assert len(misses._evicted) <= 16
        assert misses._sorted == sorted(misses._sorted)
    run(core, request_of("long", Prompt(text("longer than all that is kept", 450))))
    assert not misses._prompts


def test_no_match_is_recorded_without_a_prefix_cache() -> None:
    core, _, _, events = make_engine_of_cases(enable_prefix_caching=False)
    outputs = run(core, request_of("a", Prompt(ALL)))
    assert not matches(events)
    assert all(output.prefix is None for output in outputs)


def test_what_a_caller_may_not_know_is_left_out() -> None:
    match = PrefixMatch(
        reason="evicted", is_own=False, num_repeated_tokens=5, other_id="b", evicted_time=3.0, idle_seconds=2.0
    )
    assert match.for_caller() == PrefixMatch(reason="never_seen")
