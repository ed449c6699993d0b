"""Checks that the limits in SECURITY.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from chairlift import sampling_params, structured_outputs
from chairlift.grammar import checker, compiler
from chairlift.loading.text import template_sandbox
from chairlift.options import declared_options
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.api import tokenization
from chairlift.server.batch import batch_files
from chairlift.server.http import http_protocol
from chairlift.server.protocol import base
from chairlift.system.memory_amounts import format_memory

POLICY = Path(__file__).parent.parent / "SECURITY.md"
SOURCE = POLICY.parent / "src" / "chairlift"
MARK = "<!-- item limits -->"
ROW = re.compile(r"^\| `([\w.-]+)` \| (.*?) \|", re.MULTILINE)

CONSTANTS: dict[ModuleType, tuple[str, ...]] = {
    sampling_params: ("MAX_N", "MAX_LOGPROBS", "MAX_STOP_STRINGS", "MAX_LOGIT_BIAS", "MAX_BAD_WORDS"),
    structured_outputs: tuple(name for name in vars(structured_outputs) if name.startswith("MAX_")),
    compiler: ("COMPILE_SECONDS", "QUEUE_SECONDS", "MAX_WAITING_PER_TENANT", "MAX_CACHED", "MAX_MASK_SECONDS"),
    http_protocol: ("MAX_HEADER_BYTES", "MAX_PIPELINED", "WRITE_SECONDS"),
    checker: ("MEMORY_BYTES",),
    template_sandbox: ("CPU_SECONDS", "MAX_OUTPUT_CHARACTERS"),
    batch_files: ("MAX_LINE_BYTES", "MAX_LINES"),
}

ITEM_CONSTANTS: dict[ModuleType, tuple[str, ...]] = {
    base: tuple(name for name in vars(base) if name.startswith("MAX_")),
    sampling_params: ("MAX_TOKEN_IDS", "MAX_STOP_CHARACTERS", "MAX_BAD_WORD_CHARACTERS", "MAX_LOGPROB_ENTRIES"),
    tokenization: ("MAX_CONTEXTS",),
}


def shown(name: str, value: Any) -> str:
    """A limit in the form of the document; the unit follows from its name."""
    if "BYTES" in name.upper():
        return format_memory(value)
    if re.search("SECONDS|TIMEOUT", name.upper()):
        return f"{value:g} s"
    return f"{value:,}"


def expected() -> dict[str, str]:
    limits = {name: getattr(ServerLimits(), name) for name in declared_options(ServerLimits)}
    options = {
        f"--{name.replace('_', '-')}": shown(name, value)
        for name, value in limits.items()
        if not isinstance(value, bool)
    }
    return options | values_of(CONSTANTS)


def values_of(constants: dict[ModuleType, tuple[str, ...]]) -> dict[str, str]:
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": shown(name, getattr(module, name))
        for module, names in constants.items()
        for name in names
    }


def documented() -> tuple[dict[str, str], dict[str, str]]:
    """The limits of the server and of the items in a request."""
    section = POLICY.read_text(encoding="utf-8").partition("\n## Limits\n")[2].partition("\n## ")[0]
    limits, _, items = section.partition(MARK)
    return dict(ROW.findall(limits)), dict(ROW.findall(items))


def test_the_tables_of_limits_are_those_of_the_code() -> None:
    assert documented()[0] == expected()
    assert documented()[1] == values_of(ITEM_CONSTANTS)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("max_body_bytes", 8 << 20, "8 MiB"), ("drain_timeout", 60.0, "60 s"), ("MAX_LINES", 1 << 20, "1,048,576")],
)
def test_units_come_from_names(name: str, value: float, text: str) -> None:
    assert shown(name, value) == text


def test_the_policy_is_short() -> None:
    assert len(POLICY.read_text(encoding="utf-8").splitlines()) <= 150


def promises() -> list[list[str]]:
    """The rows of the table of promises: the promise, what keeps it, and the tests that show it."""
    section = POLICY.read_text(encoding="utf-8").partition("\n## Promises\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_every_promise_names_what_keeps_it_and_tests_that_show_it() -> None:
    rows = promises()
    assert rows
    for promise, keepers, tests in rows:
        packages = [name for name in re.findall(r"`([\w/.]+)`", keepers) if name.islower()]
        assert packages or keepers.strip(), promise
        assert [name for name in packages if not (SOURCE / name).exists()] == [], promise
        shown_by = re.findall(r"`(tests/[\w/.]+)`", tests)
        assert shown_by, promise
        assert [name for name in shown_by if not (POLICY.parent / name).exists()] == [], promise
