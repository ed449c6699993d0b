"""CHAIRLIFT_CPU_ISA selects one of the instruction sets of this CPU, and rejects other names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.native import ISAS, needs_native


def run(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CHAIRLIFT_CPU_ISA": isa}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


REPORT_ERROR = """
from chairlift.errors import ChairliftError
from chairlift.kernels.cpu import load
try:
    load()
except ChairliftError as error:
    print(error)
"""


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
    """The error is one of the user, which the command line prints without a traceback. A command would import torch."""
    result = run("sse2", "-c", REPORT_ERROR)
    message = f"CHAIRLIFT_CPU_ISA must be one of {', '.join(ISAS)} on this CPU, got 'sse2'"
    assert message in result.stdout, result.stderr


def test_sets_that_change_another_one_keep_its_loops() -> None:
    """Attention of sets with other products of integers, and sampling and recurrences of sets with other products, are
    not tested again."""
    folder = Path(__file__).parents[2] / "src" / "chairlift" / "kernels" / "cpu" / "csrc" / "runtime"
    changed = {
        name: set(re.findall(r"\b(?:changed|table)\.(linear|attention\.\w+|\w+)", (folder / name).read_text()))
        for name in ("isa_vnni.inl", "isa_avx512_bf16.cpp", "isa_tiles.inl")
    }
    assert changed["isa_vnni.inl"] == {"name", "linear", "ceilings"}
    with_tiles = {"name", "linear", "attention.prepare", "attention.attend", "ceilings"}
    assert changed["isa_avx512_bf16.cpp"] == changed["isa_tiles.inl"] == with_tiles
    attention = (folder.parent / "attention" / "attention_bf16.inl").read_text()
    for name in ("prepare", "attend"):
        of_base = rf"KVType::f32\)\s*return CHAIRLIFT_BASE\.attention\.{name}\("
        assert re.search(of_base, attention), "float32 has no tiles"
