"""Shapes of models, limits of devices, and the roofline of both, compared with arithmetic by hand."""

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


def test_every_shape_is_checked() -> None:
    (parameters,) = [mark for mark in test_shapes_have_the_published_sizes.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert {row[0] for row in parameters.args[1]} == set(MODEL_SHAPES)


def test_opt_13b_has_the_published_kv_size() -> None:
    """Kwon et al., SOSP'23, section 3: 800 KiB a token; 12 GiB hold 15,728."""
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
