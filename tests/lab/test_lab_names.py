"""The names of `chairlift.lab`, and the page that lists them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from docs.reference import reference_page

import chairlift.lab
from chairlift.core.queues.request_queue import RequestQueue
from chairlift.lab.sim.simulator import simulate

ROOT = Path(__file__).parents[2]


def test_names_are_those_of_their_modules() -> None:
    assert chairlift.lab.simulate is simulate
    assert chairlift.lab.RequestQueue is RequestQueue
    with pytest.raises(AttributeError, match=r"module 'chairlift\.lab' has no attribute 'simulation'"):
        chairlift.lab.simulation  # noqa: B018


def test_names_are_loaded_at_their_first_use_and_without_torch() -> None:
    code = "import sys, chairlift.lab; assert 'chairlift.lab.public' not in sys.modules; chairlift.lab.simulate"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


def test_the_reference_is_the_one_of_the_docstrings() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == reference_page(), "run `python -m docs.reference > docs/reference.md`"
