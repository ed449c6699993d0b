"""Relaxes the grammar of tool calls where llguidance cannot compile the schema of a tool that is not strict.

The grammar has a line `// relaxable NAME` before each rule `RULE: %json SCHEMA` of such a tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

RELAXABLE: Final = re.compile(r"^// relaxable (.+)\n(\w+): (%json .+)$", re.MULTILINE)


def relax_calls(calls: str, can_compile: Callable[[str], bool]) -> tuple[str, list[str]]:
    """Replace each relaxable schema that cannot be compiled by any object.

    Args:
        can_compile: whether a Lark grammar can be compiled.

    Returns:
        The grammar of the calls, and what was left out, as names for `x-chairlift-ignored`.
    """
    ignored: list[str] = []

    def replacement(found: re.Match[str]) -> str:
        name, rule, schema = found.groups()
        if can_compile(f"start: {schema}"):
            return found[0]
        ignored.append(f"tools.{name}.parameters")
        return f'{rule}: %json {{"type": "object"}}'

    return RELAXABLE.sub(replacement, calls), ignored
