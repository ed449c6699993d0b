"""Multi-head latent attention: what is kept for a token, the matrices of files, and wrong fields."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf_parity import GGUF_FIELDS, assert_logits_of_transformers, load, write_gguf
from test_published_configs import read

from chairlift.config import EngineConfig
from chairlift.engine.startup.loaded_model import load_model
from chairlift.engine.startup.pool_plan import kv_slot_bytes
from chairlift.errors import ModelLoadError
from chairlift.kernels.attention import AttentionShape
from chairlift.kernels.kernel_memory import total
from chairlift.kernels.torch_attention import TorchAttention
from chairlift.loading.block_rows import QuantizedMatrix
from chairlift.loading.quantized_tensors import QuantizedReader
from chairlift.loading.resolve import resolve_model
from chairlift.loading.safetensors_weights import SafetensorsWeights
from chairlift.models.declaration.matrix_spec import EXPERTS
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.registry import read_gguf_config, read_hf_config
from chairlift.models.torch_operations import torch_operations
from chairlift.worker.disk_block_store import cache_tensors
from support.native import needs_native
from support.parameter_memory import parameter_bytes


@pytest.mark.parametrize(
    ("name", "num_weights", "slot_bytes"),
    [
        ("GLM-4.7-Flash", 29_943_136_256, 47 * 576 * 2),
        ("DeepSeek-V2-Lite-Chat", 15_706_357_760, 27 * 576 * 2),
        ("Moonlight-16B-A3B", 15_959_982_080, 27 * 576 * 2),
        ("DeepSeek-V3", 671_025_397_760, 61 * 576 * 2),
        ("Mistral-Small-4-119B-2603", 118_972_481_536, 36 * 320 * 2),
        ("Youtu-LLM-2B", 1_961_361_408, 32 * 576 * 2),
        ("MiniCPM3-4B", 4_073_492_480, 62 * 288 * 2),
    ],
)
def test_published_sizes(name: str, num_weights: int, slot_bytes: int) -> None:
    config = read(name)
    assert sum(matrix.num_weights for matrix in config.matrices) == num_weights
    assert kv_slot_bytes(config, "bfloat16") == slot_bytes
    assert kv_slot_bytes(config, "int8") == slot_bytes // 2 + 4 * config.num_layers
    assert torch_operations(config) == []


def test_scores_of_a_longer_context_are_scaled() -> None:
    (scale,) = {spec.scale for spec in read("DeepSeek-V3").attention_specs.values()}
    assert scale == pytest.approx((0.1 * 1.0 * 3.6888794541139363 + 1) ** 2 / 192**0.5)
    (plain,) = {spec.scale for spec in read("GLM-4.7-Flash").attention_specs.values()}
    assert plain == 1 / 16


def test_keys_that_are_the_values_are_kept_once() -> None:
    shape = AttentionShape(4, 1, 40, 1.0, torch.float32, torch.device("cpu"), keys_are_values=True)
    cache = TorchAttention(shape).allocate(3, 16)
    assert cache.value is cache.key
    assert [tensor.shape for tensor in cache_tensors(cache)] == [(4, 1, 16, 40)]


OLDER: dict[str, Any] = {
    "attention.head_count_kv": 4,
    "attention.key_length": 24,
    "attention.value_length": 20,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
    "expert_gating_func": None,
}


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("arch", ["deepseek_v2", "deepseek_v3"])
def test_older_gguf_files_have_keys_and_values_in_one_matrix(
    arch: str, kernels: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model_dir(arch)
    path = write_gguf(folder, arch, tmp_path / "model.gguf", splits_latent=False, **OLDER)
    assert_logits_of_transformers(load(path, kernels), folder)


@needs_native
def test_blocks_of_transposed_keys_become_floats(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """The values of a head keep the format of the file, and the memory of both is planned to the byte."""
    folder, path = tiny_model_dir("deepseek_v3"), tmp_path / "model.gguf"
    writer_types = {"attn_kv_b.weight": gguf.GGMLQuantizationType.Q8_0}
    write_gguf(folder, "deepseek_v3", path, splits_latent=False, types=writer_types, **OLDER)
    formats = resolve_model(str(path)).formats(resolve_model(str(path)).config())
    head = "model.layers.0.self_attn.heads.2"
    assert (formats(f"{head}.kv_b_keys.weight"), formats(f"{head}.kv_b_values.weight")) == ("f32", "q8_0")
    assert formats(f"{head}.q_b_rotated.weight") == "f32"
    loaded = load_model(EngineConfig(str(path), skip_tokenizer_init=True, num_threads=1, kernels="native"))
    assert parameter_bytes(loaded.model) == total(loaded.planned_weights)


@pytest.fixture
def fp8_folders(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A folder, and one with the same values in FP8 with a scale for each block of 128 rows and inputs, in which
    DeepSeek-V3 is published."""
    whole, quantized = (Path(shutil.copytree(tiny_model_dir("deepseek_v3"), tmp_path / name)) for name in "ab")
    tensors = load_file(whole / "model.safetensors")
    names = [name for name in tensors if name.endswith(("q_b_proj.weight", "mqa.weight", "kv_b_proj.weight"))]
    scales = {f"{name}_scale_inv": torch.rand(-(-len(tensors[name]) // 128), 1) for name in names}
    blocks = {name: (tensors[name] * 16).to(torch.float8_e4m3fn) for name in names}
    for name in names:
        by_row = scales[f"{name}_scale_inv"].repeat_interleave(128, 0)[: len(tensors[name])]
        tensors[name] = blocks[name].float() * by_row
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    save_file({**tensors, **blocks, **scales}, quantized / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((quantized / "config.json").read_text())
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (quantized / "config.json").write_text(json.dumps({**fields, "quantization_config": method}))
    return whole, quantized


def test_quantized_matrices_are_converted_once_for_all_parts(
    fp8_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert, converted = QuantizedReader.matrix, list[QuantizedReader]()

    def matrix(reader: QuantizedReader) -> QuantizedMatrix:
        converted.append(reader)
        return convert(reader)

    monkeypatch.setattr(QuantizedReader, "matrix", matrix)
    layers = resolve_model(str(fp8_folders[1])).config().num_layers
    load(fp8_folders[1])
    assert len(converted) == 3 * layers


def test_parts_of_quantized_matrices_have_the_values_of_the_whole(fp8_folders: tuple[Path, Path]) -> None:
    whole, quantized = fp8_folders
    configs = [resolve_model(str(folder)).config() for folder in (whole, quantized)]
    expected, found = (
        SafetensorsWeights(folder, config, torch.float32, torch.device("cpu"))
        for folder, config in zip((whole, quantized), configs, strict=True)
    )
    formats = resolve_model(str(quantized)).formats(configs[1])
    for matrix in configs[0].layers[0].attention.matrices:
        for name, (_, out) in zip(matrix.weight_names, matrix.parts, strict=True):
            shape = out, matrix.in_features
            packed = found.packed(name, shape)
            assert packed.format == formats(name)
            torch.testing.assert_close(found.tensor(name, shape), expected.tensor(name, shape))
            torch.testing.assert_close(torch.from_numpy(packed.to_floats(packed.rows)), expected.tensor(name, shape))


def test_a_missing_matrix_has_the_name_of_files(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model_dir("deepseek_v3"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.kv_b_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.0\.self_attn\.kv_b_proj\.weight is missing"):
        load(folder)


def test_layers_that_predict_further_tokens_are_not_read(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(tiny_model_dir("glm4_moe_lite"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    last = [name for name in tensors if name.startswith("model.layers.2.")]
    further = {name.replace(".2.", ".3.", 1): tensors[name].clone() for name in last}
    save_file({**tensors, **further}, folder / "model.safetensors", metadata={"format": "pt"})
    config = EngineConfig(str(folder), skip_tokenizer_init=True, num_threads=1, kernels="torch")
    with pytest.raises(ModelLoadError, match=r"model\.layers\.3\."):
        load_model(config)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": 1}))
    with caplog.at_level("INFO", "chairlift"):
        load_model(config)
    assert f"skipped {len(further)} tensors model.layers.3.*" in caplog.text


def test_experts_of_layers(tiny_model_dir: Callable[..., Path]) -> None:
    config = read("GLM-4.7-Flash", mlp_layer_types=["sparse", *["dense"] * 46])
    groups = [{matrix.group for matrix in layer.matrices} for layer in config.layers]
    assert [EXPERTS in group for group in groups] == [True, *[False] * 46]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk_method": "greedy"}, "topk_method is 'greedy', which is not supported; supported: noaux_tc"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', .*: topk_method noaux_tc requires 'sigmoid'"),
    ],
)
def test_wrong_choices_of_experts_are_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read("DeepSeek-V3", **fields)


@pytest.mark.parametrize("name", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_sparse_attention_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ModelLoadError, match="its attention is sparse: an indexer chooses the keys of a query"):
        read_hf_config({"architectures": [name]}, source="config.json")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("attention.value_length", 40, ""),
        ("attention.key_length_mla", 8, ""),
        ("attention.kv_lora_rank", None, ""),
        ("expert_gating_func", 3, r" is 3; supported: 1 \(softmax\) and 2 \(sigmoid\)"),
        ("expert_group_used_count", 5, ""),
        ("attention.temperature_scale", -0.1, " must be a number above 0"),
    ],
)
def test_wrong_gguf_fields_are_refused_by_name(field: str, value: Any, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=f"deepseek2.{field}{problem}"):
        read_gguf({field: value})


def read_gguf(changes: dict[str, Any]) -> ModelConfig:
    fields = {
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "vocab_size": 256,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **GGUF_FIELDS["deepseek_v3"],
        **changes,
    }
    metadata = {"general.architecture": "deepseek2"}
    metadata |= {f"deepseek2.{key}": each for key, each in fields.items() if each is not None}
    return read_gguf_config(metadata, source="model.gguf")


def test_files_in_mistrals_format_have_the_scale_of_queries() -> None:
    scaled = {"attention.temperature_scale": 0.1, "attention.temperature_length": 8192}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 8192}
    ropes = {spec.rope for spec in read_gguf({**scaled, **yarn}).attention_specs.values()}
    assert {(rope.query_scaling_beta, rope.original_max_position_embeddings) for rope in ropes if rope} == {(0.1, 8192)}
    with pytest.raises(ModelLoadError, match=r"original_context_length is 4096, .*temperature_length is 8192"):
        read_gguf({**scaled, **yarn, "rope.scaling.original_context_length": 4096})


@pytest.mark.parametrize(("count", "groups"), [(256, (8, 4)), (160, (8, 3)), (64, (1, 1))])
def test_groups_of_experts_that_older_gguf_files_lack(count: int, groups: tuple[int, int]) -> None:
    config = read_gguf({"expert_count": count, "expert_group_count": None, "expert_group_used_count": None})
    mixture = config.layers[-1].mixture
    assert mixture is not None
    assert mixture.router is not None
    routing = mixture.router.routing
    assert (routing.num_groups, routing.groups_per_token) == groups
