"""The facts about the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import chairlift
from chairlift.lab.bench.machine import _cpu, machine_facts, peak_rss_bytes

CPUINFO = """\
processor\t: 0
model name\t: Made Up CPU @ 2.00GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_vnni

processor\t: 1
model name\t: Another CPU
flags\t\t: fpu
"""


def test_facts() -> None:
    facts = machine_facts()
    assert facts.chairlift == chairlift.__version__
    assert facts.num_cores >= 1
    assert facts.memory_bytes > 1 << 28
    assert json.loads(json.dumps(asdict(facts)))["torch"] == facts.torch


def test_the_first_cpu_speaks_for_all(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    assert _cpu(tmp_path / "cpuinfo") == ("Made Up CPU @ 2.00GHz", ["avx2", "avx512f", "avx512_vnni"])


def test_a_system_without_cpuinfo(tmp_path: Path) -> None:
    name, flags = _cpu(tmp_path / "missing")
    assert name
    assert flags == []


PEAK = """
from chairlift.lab.bench.machine import peak_rss_bytes
before = peak_rss_bytes()
ballast = b"x" * (before + (8 << 20))
del ballast
print(before, peak_rss_bytes())
"""


def test_peak_memory_only_grows() -> None:
    """In a process that is small enough to be doubled; what the one that starts it has held is not its own."""
    own = peak_rss_bytes()
    said = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    before, after = map(int, said.split())
    assert before < own, "no torch in there"
    assert after >= before + (8 << 20)
