"""The benchmark of shared prefixes measures both ways to compute their keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import shared_prefixes
from chairlift.errors import ConfigError
from support.native import needs_native

pytestmark = needs_native


def run(model: Path, prefixes: str) -> None:
    sizes = ["--prefixes", prefixes, "--batch-sizes", "2,3", "--own", "8", "--steps", "2", "--rounds", "1"]
    shared_prefixes.main(["--model", str(model), "--num-threads", "1", *sizes, "--json"])


def test_each_prefix_and_batch_size_has_times_of_both_ways(
    tiny_model_dir: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_model_dir("llama"), "0,160")
    records = json.loads(capsys.readouterr().out)["results"]
    assert [(record["prefix"], record["requests"]) for record in records] == [(0, 2), (0, 3), (160, 2), (160, 3)]
    for record in records:
        for way in ("each", "once"):
            assert min(record[way][0].values()) > 0


def test_a_prefix_beyond_the_context_is_an_error(tiny_model_dir: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="prefixes must be at most 241 for this model, got 300"):
        run(tiny_model_dir("llama"), "300")
