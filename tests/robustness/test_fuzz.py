"""The short run of the fuzz targets with one seed. The long run is `make fuzz`."""

from __future__ import annotations

import pytest
from tools.fuzz_models import model_targets
from tools.fuzz_settings import settings_targets
from tools.fuzz_targets import Target, run_cases
from tools.fuzz_wire import wire_targets

SEED = 20260701


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    folder = tmp_path_factory.mktemp("fuzz")
    return {target.name: target for target in (*model_targets(folder), *settings_targets(folder), *wire_targets())}


NAMES = (
    "GGUF, damaged",
    "GGUF, odd values",
    "safetensors",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "adapter_config.json",
    "adapter tensors",
    "key files",
    "option files",
    "prefix cache on disk",
    "batch lines",
)


def test_all_targets_are_run(targets: dict[str, Target]) -> None:
    assert tuple(targets) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_target_accepts_or_rejects_every_input(targets: dict[str, Target], name: str) -> None:
    target = targets[name]
    run_cases(target, target.num_short, SEED)
    assert len(target.outcomes) > 1, f"all cases have the same outcome: {target.outcomes}"
