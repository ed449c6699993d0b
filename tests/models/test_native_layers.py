"""Native kernels compute all layers of every architecture, so that decode steps of each can be recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from test_models_parity import run
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift.kernels.attention import StepContext
from chairlift.kernels.interface import Layer, run_in_order
from chairlift.models.decoder import build_model
from chairlift.models.random_weights import RandomWeights
from chairlift.models.registry import read_hf_config
from chairlift.models.torch_operations import torch_operations
from support.case_loop import loop_over
from support.native import needs_native
from support.packed_steps import Tables
from support.tiny_models import TINY_MODELS, make_tiny_config


class ComputedByTorch(TorchDispatchMode):
    """Notes the operations of torch that compute or copy values. Views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def watch_layers(names: list[str]) -> Callable[[Sequence[Layer], torch.Tensor, StepContext], torch.Tensor]:
    def run_layers(layers: Sequence[Layer], x: torch.Tensor, step: StepContext) -> torch.Tensor:
        with ComputedByTorch() as mode:
            result = run_in_order(layers, x, step)
        names.extend(mode.names)
        return result

    return run_layers


@needs_native
@loop_over("arch", TINY_MODELS)
def test_torch_computes_no_part_of_a_layer(arch: str) -> None:
    model_class, fields = make_tiny_config(arch)
    content = {**fields.to_diff_dict(), "architectures": [model_class.__name__]}
    config = read_hf_config(content, source="config.json")
    assert torch_operations(config) == []
    weights = RandomWeights(config, torch.float32, torch.device("cpu"))
    names: list[str] = []
    model = build_model(config, weights, dtype=torch.float32, device="cpu", kernels="native")
    model.allocate_kv_cache(num_blocks=8, block_size=8)
    model.allocate_states(num_slots=4)
    model._run_layers = watch_layers(names)
    tables = Tables(8, 8)
    for work in ([(3, 0, 5)], [(3, 5, 6)]):
        run(model, tables, work)
    assert names == []
