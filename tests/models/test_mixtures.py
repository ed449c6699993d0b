"""Models with mixtures of experts: their declarations, files with several layouts, and the plans derived from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf_parity import assert_logits_of_transformers, load
from transformers import AutoModelForCausalLM

from chairlift import EngineConfig
from chairlift.engine.startup.weight_plan import plan_weights, step_weight_bytes
from chairlift.errors import ModelLoadError
from chairlift.kernels.cpu.formats import matrix_bytes
from chairlift.kernels.kernel_memory import total
from chairlift.kernels.kernel_set import find_kernel_set
from chairlift.kernels.routing import ExpertRouting
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.model_shape import ExpertCost, ModelShape
from chairlift.lab.sim.roofline import Roofline
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.matrix_spec import EXPERTS, ROUTER
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.decoder import build_model
from chairlift.models.registry import read_hf_config
from chairlift.models.torch_operations import torch_operations
from support.native import needs_native

TinyModelDir = Callable[..., Path]
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""The shape of Qwen3-30B-A3B with the fields of its published config.json."""


def qwen(**changes: Any) -> ModelConfig:
    return read_hf_config({**QWEN3_30B_A3B, **changes}, source="config.json")


def routings(config: ModelConfig) -> list[ExpertRouting | None]:
    routers = [layer.feed_forward.router for layer in config.layers]
    return [None if router is None else router.routing for router in routers]


def test_qwen3_30b_a3b() -> None:
    config = qwen()
    assert routings(config) == [ExpertRouting(8, "chosen")] * 48
    assert sum(matrix.num_weights for matrix in config.matrices) == 30_531_911_680
    experts = [matrix for matrix in config.layers[3].matrices if matrix.group == EXPERTS]
    assert len(experts) == 2 * 128
    assert experts[-2].parts == (
        ("model.layers.3.mlp.experts.127.gate_proj", 768),
        ("model.layers.3.mlp.experts.127.up_proj", 768),
    )
    (router,) = [matrix for matrix in config.layers[3].matrices if matrix.group == ROUTER]
    assert router.parts == (("model.layers.3.mlp.gate", 128),)


def test_layers_with_experts_are_declared_by_step_and_list() -> None:
    assert [r is not None for r in routings(qwen(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))] == [
        False, True, False, False, False, True,
    ]  # fmt: skip
    config = qwen(num_hidden_layers=2, mlp_only_layers=[0], norm_topk_prob=None)
    assert routings(config) == [None, ExpertRouting(8, "all")]
    assert config.layers[0].feed_forward.inner_size == 6144
    assert config.layers[1].feed_forward.inner_size == 768


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok must be an integer between 1 and 128, got 129"),
        ({"num_local_experts": 64}, "num_local_experts is 64, which is not supported: num_experts is 128"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers must be an integer between 0 and 47, got 48"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layer numbers, got 3"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer between 1"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"shared_expert_intermediate_size": 5632}, "shared_expert_intermediate_size is 5632, and the qwen3-moe"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', and the qwen3-moe architecture does not declare"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        qwen(**changes)


def test_both_names_of_the_number_of_experts() -> None:
    assert routings(qwen(num_local_experts=128)) == routings(qwen(num_experts=None, num_local_experts=128))


def test_clipped_olmoe_is_rejected(tiny_model_dir: TinyModelDir) -> None:
    config = json.loads((tiny_model_dir("olmoe") / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=r"clip_qkv is 8.0, which is not supported"):
        read_hf_config({**config, "clip_qkv": 8.0}, source="config.json")


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "qwen2_moe": [
        ({"qkv_bias": False}, "qkv_bias is False, which is not supported: query, key and value must have biases"),
        ({"attention_bias": False}, "attention_bias is False, which is not supported"),
        ({"max_window_layers": -1}, "max_window_layers must be an integer between 0"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
    ],
    "cohere2_moe": [
        ({"expert_selection_fn": "softplus"}, "expert_selection_fn is 'softplus'.*supported: sigmoid, softmax"),
        ({"shared_expert_combination_strategy": "max"}, "shared_expert_combination_strategy is 'max'"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types must hold 5 of dense and sparse"),
        ({"sliding_window": 0}, "sliding_window must be an integer between 1"),
        ({"use_parallel_block": False}, "use_parallel_block is False"),
    ],
    "hunyuan": [({"num_experts": 8}, "num_experts is 8, which is not supported: models of this class have no router")],
    "hunyuan_moe": [
        ({"num_experts": [6, 5]}, "num_experts differs between layers"),
        ({"moe_topk": [7, 7]}, "moe_topk must be an integer between 1 and 6, got 7"),
        ({"moe_intermediate_size": [40, 48]}, "moe_intermediate_size is .*the size of an expert is intermediate_size"),
        ({"num_shared_expert": 2}, "num_shared_expert is 2, which is not supported: hunyuan_v1_moe models"),
        ({"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe is False"),
        ({"moe_layer_num_skipped": 1}, "moe_layer_num_skipped is 1"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
    ],
    "mellum": [
        ({"use_sliding_window": False}, "use_sliding_window is False"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers is .*mellum models are computed with"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types must hold 4 of dense and sparse"),
    ],
    "ernie4_5_moe": [
        ({"moe_gate": "sinkhorn"}, "moe_gate is 'sinkhorn', which is not supported: ernie4_5_moe models are computed"),
        ({"use_bias": True}, "use_bias is True, which is not supported: transformers has a bias in the LM head"),
        ({"moe_use_aux_free": False}, "moe_use_aux_free is False"),
        ({"moe_k": 7}, "moe_k must be an integer between 1 and 6, got 7"),
        ({"moe_layer_interval": 0}, "moe_layer_interval must be an integer between 1"),
        ({"moe_norm_min": 0}, "moe_norm_min must be a number above 0"),
        ({"moe_num_experts": None}, "moe_num_experts is missing"),
    ],
    "granitemoeshared": [({"shared_intermediate_size": -1}, "shared_intermediate_size must be an integer between 0")],
}


@pytest.mark.parametrize("arch", REFUSED)
def test_what_is_not_computed_is_refused(arch: str, tiny_model_dir: TinyModelDir) -> None:
    config = json.loads((tiny_model_dir(arch) / "config.json").read_text())
    config.pop("layer_types", None)
    for changes, message in REFUSED[arch]:
        with pytest.raises(ModelLoadError, match=message):
            read_hf_config({**config, **changes}, source="config.json")


@pytest.mark.parametrize("arch", ["mixtral", "olmoe", "gpt_oss", "granitemoe"])
def test_a_size_of_experts_that_the_architecture_does_not_read_is_rejected(
    arch: str, tiny_model_dir: TinyModelDir
) -> None:
    config = json.loads((tiny_model_dir(arch) / "config.json").read_text())
    same = {**config, "moe_intermediate_size": config["intermediate_size"]}
    assert read_hf_config(same, source="config.json") == read_hf_config(config, source="config.json")
    with pytest.raises(ModelLoadError, match=r"moe_intermediate_size is 7, .* the size of an expert is intermediate_s"):
        read_hf_config({**config, "moe_intermediate_size": 7}, source="config.json")


def test_native_kernels_compute_all_layers_of_mixtures() -> None:
    assert torch_operations(qwen(num_hidden_layers=1)) == []


def load_all(folder: Path) -> None:
    files = resolve_model(str(folder))
    config = files.config()
    weights = files.weights(config, torch.float32, torch.device("cpu"))
    build_model(config, weights, dtype=torch.float32, device="cpu")


def test_a_tensor_with_another_number_of_experts_is_rejected(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir("granitemoe"), tmp_path, dirs_exist_ok=True)
    name, tensors = "model.layers.1.block_sparse_moe.input_linear.weight", load_file(tmp_path / "model.safetensors")
    more = torch.cat([tensors[name], tensors[name][:1]])
    save_file({**tensors, name: more}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"input_linear.weight has the shape \(6, 80, 64\).* requires \(5, 80, 64\)"
    ):
        load_all(tmp_path)


def test_quantized_experts_in_one_tensor_are_rejected(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir("granitemoe"), tmp_path, dirs_exist_ok=True)
    module, tensors = "model.layers.0.block_sparse_moe.input_linear", load_file(tmp_path / "model.safetensors")
    tensors |= {
        f"{module}.weight": tensors[f"{module}.weight"].to(torch.float8_e4m3fn),
        f"{module}.weight_scale_inv": torch.ones(5, 1, 1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=f"tensor {module}.weight holds the quantized experts of a layer"):
        load_all(tmp_path)


@pytest.mark.parametrize(
    "arch", ["mixtral", "qwen2_moe", "glm4_moe", "hunyuan_moe", "mellum", "cohere2_moe", "ernie4_5_moe"]
)
def test_the_experts_of_a_layer_may_be_in_two_tensors(arch: str, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """transformers writes its own names on request, and those of published files otherwise."""
    folder = tiny_model_dir(arch)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    assert_logits_of_transformers(load(tmp_path), folder)


def test_a_file_of_mellum_without_rotary_embeddings_has_those_of_transformers(tiny_model_dir: TinyModelDir) -> None:
    config = json.loads((tiny_model_dir("mellum") / "config.json").read_text())
    read = read_hf_config({**config, "rope_parameters": None}, source="config.json")
    assert [layer.attention.rope.theta for layer in read.layers] == [5e5, 1e4, 1e4, 5e5]


def test_numbers_of_experts_may_be_lists(tiny_model_dir: TinyModelDir) -> None:
    """As in the published files of Hunyuan-A13B."""
    config = json.loads((tiny_model_dir("hunyuan_moe") / "config.json").read_text())
    lists = {"num_experts": [6, 6], "moe_topk": [3, 3], "moe_intermediate_size": [40, 40], "num_shared_expert": [1, 1]}
    assert read_hf_config({**config, **lists}, source="config.json") == read_hf_config(config, source="config.json")


def test_a_missing_expert_is_named(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir("mixtral"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.4.w2.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"tensor {name} is missing"):
        load_all(tmp_path)


def test_routers_keep_the_format_of_the_file() -> None:
    config = qwen(num_hidden_layers=1)
    memory = find_kernel_set("native").memory("float32", "cpu", "int8")
    items = {item.name: item.num_bytes for item in plan_weights(config, memory, lambda name: "bf16")}
    assert items["router"] == matrix_bytes("bf16", 128, 2048)
    assert items["experts"] == 128 * (matrix_bytes("int8", 1536, 2048) + matrix_bytes("int8", 2048, 768))
    read = step_weight_bytes(config, memory, lambda name: "bf16")
    assert read == items["router"] + items["experts"] + items["attention"] + items["LM head"]


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_of_random_weights_is_planned_to_the_byte(tmp_path: Path, quantization: str | None) -> None:
    from chairlift.engine.startup.loaded_model import load_model
    from support.parameter_memory import parameter_bytes

    small = {"num_hidden_layers": 2, "num_experts": 12, "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_30B_A3B, **small, "moe_intermediate_size": 96}))
    config = EngineConfig(
        str(tmp_path), load_format="dummy", skip_tokenizer_init=True, num_threads=1, quantization=quantization
    )
    loaded = load_model(config)
    assert parameter_bytes(loaded.model) == total(loaded.planned_weights)


PLAIN = Device(
    "plain", 1000.0, 100.0, 10**6, "made up", flops_efficiency=1.0, bandwidth_efficiency=1.0, step_overhead=0.0,
    layer_overhead=0.0,
)  # fmt: skip


def test_cost_model_reads_the_experts_that_tokens_choose() -> None:
    """The device computes 1000 FLOPs per second and reads 100 bytes per second."""
    config = qwen(num_hidden_layers=1, num_experts=4, num_experts_per_tok=1)
    shape = ModelShape("experts", config)
    expert = 3 * 768 * 2048
    dense = 2048 * 128 * (2 * 32 + 2 * 4) + 4 * 2048
    experts = ExpertCost.from_layer(config.layers[0])
    assert experts == ExpertCost(4, 1, expert)
    assert shape.weight_bytes == 2 * (dense + 4 * expert + 151936 * 2048)
    assert experts.num_read(1) == 1
    assert experts.num_read(2) == pytest.approx(2 - 1 / 4)
    assert experts.num_read(10_000) == pytest.approx(4)
    model = Roofline(shape, PLAIN)
    for num_tokens, num_read in ((1, 1.0), (2, 1.75)):
        seconds = model.seconds(StepShape(num_tokens, 0, 0, 0, 0))
        assert seconds == pytest.approx(2 * (dense + num_read * expert) / 100)
    seconds = model.seconds(StepShape(1000, 0, 0, 0, 0))
    assert seconds == pytest.approx(1000 * 2 * (dense + expert) / 1000)


def test_layers_without_experts_cost_as_before() -> None:
    """A dense layer reads its feed-forward network instead of the router and the experts of a token."""
    mixed, experts = (qwen(num_hidden_layers=2, mlp_only_layers=dense) for dense in ([0], []))
    assert ExpertCost.from_layer(mixed.layers[0]) is None
    token = StepShape(1, 0, 0, 0, 0)
    seconds = [Roofline(ModelShape("mixed", config), PLAIN).seconds(token) for config in (mixed, experts)]
    router_and_experts = 128 * 2048 + 8 * 3 * 768 * 2048
    assert seconds[0] - seconds[1] == pytest.approx(2 * (3 * 6144 * 2048 - router_and_experts) / 100)


def test_declarations_of_experts_are_small_and_can_be_sent_to_other_processes() -> None:
    """The names of experts are a pattern, so a layer with 128 experts is as small as a dense one."""
    config = qwen()
    message = msgspec.msgpack.encode(config)
    dense = msgspec.msgpack.encode(qwen(mlp_only_layers=list(range(config.num_layers))))
    assert len(message) < 1.5 * len(dense)
    assert msgspec.msgpack.decode(message, type=ModelConfig) == config
    assert len(list(config.layers[0].feed_forward.experts)) == 128
