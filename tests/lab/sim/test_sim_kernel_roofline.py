"""The roofline of each kernel of a step, compared with arithmetic by hand and with the roofline of layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import DEVICES, Device
from chairlift.lab.sim.kernel_roofline import OVERHEAD, KernelCost, KernelRoofline, device_roofline
from chairlift.lab.sim.model_shape import ModelShape, model_shape
from chairlift.lab.sim.roofline import Roofline
from chairlift.models.registry import read_hf_config

A100, H100 = DEVICES["A100-80GB"], DEVICES["H100-SXM"]
LLAMA = model_shape("llama-3-8b")
DECODE = StepShape(64, 64, 64, 64 * 2048, 64 * 2048)
SHAPES = st.builds(StepShape, *[st.integers(1, 10**5)] * 5)


def costs(cost_model: KernelRoofline, shape: StepShape = DECODE) -> dict[str, KernelCost]:
    return {cost.name: cost for cost in cost_model.costs(shape)}


def test_bytes_and_operations_of_a_decode_step() -> None:
    found = costs(KernelRoofline(LLAMA, H100))
    kv_bytes = 64 * 2048 * 131_072
    assert found["attention"].num_bytes == kv_bytes + 32 * 64 * 2 * 4096 * 2
    assert found["attention"].num_flops == 32 * 4 * 64 * 2048 * 4096
    assert found["gate_up"].num_bytes == 32 * (4096 * 28_672 + 64 * (4096 + 28_672)) * 2
    assert found["down"].num_bytes == 32 * (4096 * 14_336 + 64 * (14_336 + 2 * 4096)) * 2, "residual rows are read"
    assert found["K and V"].num_bytes == 32 * 64 * 2 * (6144 + 4096 + 2048)
    assert (found["norms"].num_calls, found["norms"].num_bytes) == (65, 65 * 64 * 2 * 4096 * 2)
    assert found["sampler"].num_bytes == 64 * 128_256 * 2
    weights = sum(found[name].num_bytes for name in ("qkv", "output", "gate_up", "down", "LM head"))
    assert weights == pytest.approx(LLAMA.weight_bytes, rel=0.03)
    assert found["attention"].seconds == pytest.approx(found["attention"].num_bytes / (0.8 * 3350e9))
    assert found[OVERHEAD].seconds == pytest.approx(1e-3 + 32 * 40e-6)


@given(SHAPES)
def test_kernels_together_take_the_step_and_at_least_the_roofline_of_layers(shape: StepShape) -> None:
    cost_model = KernelRoofline(LLAMA, A100)
    seconds = cost_model.seconds(shape)
    assert sum(cost.seconds for cost in cost_model.costs(shape)) == pytest.approx(seconds)
    assert seconds >= Roofline(LLAMA, A100).seconds(shape)


def test_a_decode_step_takes_hardly_longer_than_by_layers() -> None:
    for device in (A100, H100):
        by_layers = Roofline(LLAMA, device).seconds(DECODE)
        assert by_layers < KernelRoofline(LLAMA, device).seconds(DECODE) < 1.03 * by_layers


def test_a_step_without_sampled_rows_has_no_head() -> None:
    found = costs(KernelRoofline(LLAMA, H100), StepShape(512, 1, 0, 512, 512 * 513 // 2))
    assert {"LM head", "sampler"} & found.keys() == set()
    assert found["norms"].num_calls == 64
    assert found["gate_up"].seconds == pytest.approx(found["gate_up"].num_flops / (0.6 * 989e12)), (
        "limited by computing"
    )


def test_several_devices_share_products_and_heads() -> None:
    one, four = (costs(KernelRoofline(LLAMA, H100, count)) for count in (1, 4))
    assert four["attention"].num_bytes == one["attention"].num_bytes / 4
    assert four["down"].num_flops == one["down"].num_flops / 4
    assert four["norms"] == one["norms"]
    assert four[OVERHEAD].seconds > one[OVERHEAD].seconds


def test_chosen_experts_are_read() -> None:
    config = read_hf_config(
        {
            "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
            "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": True,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
        },
        source="config.json",
    )  # fmt: skip
    cost_model = KernelRoofline(ModelShape("experts", config), H100)
    one, two = (costs(cost_model, StepShape(tokens, 1, 1, 8, 8))["experts"].num_bytes for tokens in (1, 2))
    rows = 2 * (2 * 64 + 3 * 32) * 2
    assert one == 2 * 3 * 64 * 32 * 2 + rows
    assert two - one == pytest.approx(0.75 * (one - rows) + rows), "the second token chooses another expert of four"


def test_a_calibrated_cpu_has_the_roofline_of_layers() -> None:
    cpu = Device("cpu", 1e12, 1e11, 10**9, "measured", 4)
    assert type(device_roofline(LLAMA, cpu)) is Roofline
    assert type(device_roofline(LLAMA, H100)) is KernelRoofline
    assert device_roofline(LLAMA, replace(H100, step_overhead=0.0)).seconds(DECODE) < 0.015
