"""Shapes of models, limits of devices, and the roofline of layers and of kernels, compared with arithmetic by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import DEVICES, Device, find_device
from chairlift.lab.sim.kernel_roofline import OVERHEAD, KernelCost, KernelRoofline, device_roofline
from chairlift.lab.sim.model_shape import MODEL_SHAPES, ModelShape, model_shape
from chairlift.lab.sim.roofline import Roofline
from chairlift.models.reading.llama_sizes import LlamaSizes
from chairlift.models.registry import read_hf_config

TINY = ModelShape(
    "tiny",
    LlamaSizes(
        vocab_size=100,
        hidden_size=8,
        intermediate_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=2,
        max_position_embeddings=64,
    ).declare(),
)
"""Weights of a layer: 8 * 2 * 2 * (4 + 2) + 3 * 8 * 16 = 576; LM head 800; K and V of a token and layer 16 bytes."""

PLAIN = Device(
    "plain", 1000.0, 100.0, 10**6, "made up", link_bandwidth=50.0, flops_efficiency=0.5, bandwidth_efficiency=1.0,
    step_overhead=3.0, layer_overhead=1.0, all_reduce_latency=0.25,
)  # fmt: skip

SHAPES = st.builds(StepShape, *[st.integers(0, 10**6)] * 5)


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("opt-13b", 12.84, 819_200),
        ("llama-13b", 12.85, 819_200),
        ("llama-2-7b", 6.607, 524_288),
        ("opt-66b", 65.7, 2_359_296),
        ("opt-175b", 174.6, 4_718_592),
        ("gpt3-175b", 174.6, 4_718_592),
        ("llama-3-8b", 7.50, 131_072),
        ("mistral-7b", 7.11, 131_072),
        ("yi-34b", 33.93, 245_760),
        ("falcon-180b", 178.6, 163_840),
        ("smollm2-135m", 0.1345, 23_040),
    ],
)
def test_shapes_have_the_published_sizes(name: str, billions: float, kv_bytes: int) -> None:
    """The weights that a step reads are the published number, without an untied embedding."""
    shape = model_shape(name)
    assert shape.weight_bytes / 2e9 == pytest.approx(billions, rel=0.01)
    assert shape.kv_bytes_per_slot == kv_bytes


def test_shapes_are_checked_and_have_published_sizes_of_kv() -> None:
    (parameters,) = [mark for mark in test_shapes_have_the_published_sizes.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert {row[0] for row in parameters.args[1]} == set(MODEL_SHAPES)
    # Kwon et al., SOSP'23, section 3: 800 KiB a token; 12 GiB hold 15,728.
    assert model_shape("opt-13b").kv_bytes_per_slot == 800 * 1024
    assert (12 << 30) // model_shape("opt-13b").kv_bytes_per_slot == 15_728


def test_shape_from_a_config() -> None:
    config = {
        "architectures": ["OPTForCausalLM"], "vocab_size": 50272, "hidden_size": 5120, "ffn_dim": 20480,
        "num_hidden_layers": 40, "num_attention_heads": 40, "max_position_embeddings": 2048, "dtype": "float16",
    }  # fmt: skip
    read = read_hf_config(config, source="config.json")
    assert ModelShape("opt-13b", read) == model_shape("opt-13b")
    assert ModelShape("x", read, 4, 4).kv_bytes_per_slot == 2 * 819_200


def test_seconds_of_known_steps() -> None:
    """A second of compute is 500 FLOPs, and of memory 100 bytes."""
    cost = Roofline(TINY, PLAIN)
    decode = StepShape(num_tokens=1, num_seqs=1, num_sampled=1, num_context=5, num_pairs=5)
    linear = max(2 * 576 / 500, 2 * 576 / 100)
    attention = max(4 * 5 * 4 * 2 / 500, 5 * 16 / 100)
    head = max(2 * 800 / 500, 2 * 800 / 100)
    assert cost.seconds(decode) == pytest.approx(2 * (linear + attention + 1) + head + 3)
    prefill = StepShape(num_tokens=40, num_seqs=1, num_sampled=0, num_context=40, num_pairs=820)
    assert cost.seconds(prefill) == pytest.approx(2 * (40 * 2 * 576 / 500 + 4 * 820 * 8 / 500 + 1) + 3)


def test_tensor_parallelism_divides_work_and_adds_all_reduces() -> None:
    shape = StepShape(40, 1, 1, 40, 820)
    exchange = 2 * (0.25 + 2 * (1 / 2) * 40 * 8 * 2 / 50)
    layer = (40 * 2 * 576 / 500 + 4 * 820 * 8 / 500) / 2 + 1 + exchange
    assert Roofline(TINY, PLAIN, 2).seconds(shape) == pytest.approx(2 * layer + 16 / 2 + 3)
    reading = StepShape(1, 1, 0, 1000, 1000)
    four = Roofline(TINY, replace(PLAIN, link_bandwidth=1e30, all_reduce_latency=0.0), 4).seconds(reading)
    assert four == pytest.approx(2 * (2 * 576 / 100 / 4 + 1000 * 16 / 100 / 2 + 1) + 3), "two KV heads, four devices"


@given(SHAPES, st.integers(0, 4), st.integers(0, 10**5))
def test_more_work_never_takes_less_time(shape: StepShape, field: int, more: int) -> None:
    larger = shape._replace(**{shape._fields[field]: shape[field] + more})
    for cost in (Roofline(TINY, PLAIN), Roofline(TINY, PLAIN, 2)):
        assert cost.seconds(larger) >= cost.seconds(shape) >= PLAIN.step_overhead


def test_invalid_tensor_parallel_sizes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 must divide the 4 heads"):
        Roofline(TINY, PLAIN, 3)
    with pytest.raises(ConfigError, match="has no link"):
        Roofline(TINY, replace(PLAIN, link_bandwidth=0.0), 2)


def test_constants_name_device_and_efficiency() -> None:
    constants = dict(Roofline(TINY, PLAIN, 2).constants())
    assert constants["flops_efficiency"] == "0.5"
    assert constants["tensor_parallel_size"] == "2"
    assert "made up" in constants["device"]


def test_devices_by_name_and_from_a_file(tmp_path: Path) -> None:
    assert find_device("H200").bandwidth == 4.8e12
    assert DEVICES["A100-40GB"].peak_flops == 312e12
    path = tmp_path / "device.json"
    path.write_text(json.dumps(asdict(PLAIN)))
    assert find_device(str(path)) == PLAIN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_flops": 0}, "peak_flops must be positive, got 0"),
        ({"flops_efficiency": 1.5}, "flops_efficiency must be at most 1"),
        ({"layer_overhead": -1.0}, "layer_overhead must be at least 0"),
        ({"bandwidth": float("inf")}, "bandwidth must be positive, got inf"),
        ({"bytes_per_value": 3}, "bytes_per_value must be 1, 2 or 4"),
        ({"bandwidth": "fast"}, "Expected `float`, got `str` - at `.*bandwidth`"),
        ({"memory_bytes": True}, "Expected `int`, got `bool` - at `.*memory_bytes`"),
        ({"memory_bytes": 1.5}, "Expected `int`, got `float` - at `.*memory_bytes`"),
        ({"colour": "red"}, "unknown fields colour"),
    ],
)
def test_wrong_fields_of_device_files_are_rejected(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps({**asdict(PLAIN), **change}))
    with pytest.raises(ConfigError, match=message):
        find_device(str(path))


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "Expected `object`, got `array`"), ("{", "Expecting"), ('{"name": "x"}', "missing")]
)
def test_invalid_device_files_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "device.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_device(str(path))


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(ConfigError, match="the devices are A100-40GB"):
        find_device("TPU")
    with pytest.raises(ConfigError, match="use one of opt-13b"):
        model_shape("gpt-9")


A100, H100 = DEVICES["A100-80GB"], DEVICES["H100-SXM"]
LLAMA = model_shape("llama-3-8b")
DECODE = StepShape(64, 64, 64, 64 * 2048, 64 * 2048)
STEP_SHAPES = st.builds(StepShape, *[st.integers(1, 10**5)] * 5)


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


@given(STEP_SHAPES)
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
