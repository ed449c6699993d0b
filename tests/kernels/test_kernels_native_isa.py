"""CHAIRLIFT_CPU_ISA selects one of the instruction sets of this CPU, and rejects other names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chairlift.kernels.cpu import load
from native import needs_native, unavailable_reason

ISAS: list[str] = [] if unavailable_reason() else load().available_isas()


def run(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CHAIRLIFT_CPU_ISA": isa}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_each_instruction_set_can_be_selected(isa: str) -> None:
    result = run(isa, "-c", "from chairlift.kernels.cpu import load; print(load().isa())")
    assert result.stdout.strip() == isa, result.stderr


@needs_native
def test_the_best_one_is_the_default() -> None:
    assert run("", "-c", "from chairlift.kernels.cpu import load; print(load().isa())").stdout.strip() == ISAS[0]


@needs_native
def test_other_names_are_rejected() -> None:
    result = run("sse2", "-m", "chairlift", "generate", "hello")
    assert result.returncode != 0
    message = f"CHAIRLIFT_CPU_ISA must be one of {', '.join(ISAS)} on this CPU, got 'sse2'"
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
