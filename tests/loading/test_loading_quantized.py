"""Quantized safetensors folders: every method has the values of its definition, in the formats of the kernels."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift.errors import ModelLoadError
from chairlift.kernels.cpu import load
from chairlift.loading.block_rows import mxfp4_rows
from chairlift.loading.quantized_tensors import QuantizedReader
from chairlift.loading.resolve import resolve_model
from chairlift.loading.safetensors_weights import SafetensorsWeights
from chairlift.models.random_weights import RandomWeights
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.quantization_fields import read_quantization
from support.case_loop import loop_over
from support.native import needs_native
from support.quantized_checkpoints import (
    METHODS,
    Method,
    compressed_config,
    quantization_config,
    quantize,
    write_checkpoint,
)

CPU = torch.device("cpu")
WIDE = {"hidden_size": 128, "intermediate_size": 384}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def open_folder(folder: Path) -> SafetensorsWeights:
    files = resolve_model(str(folder))
    weights = files.weights(files.config(), torch.float32, CPU)
    assert isinstance(weights, SafetensorsWeights)
    return weights


@pytest.fixture
def write(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    """Return a function that quantizes a tiny model, and returns its folder and the values of its tensors."""

    def make(method: Method, arch: str = "llama", **options: Any) -> tuple[Path, dict[str, torch.Tensor]]:
        ignored = options.pop("ignored", None)
        folder = tmp_path / "quantized"
        return folder, write_checkpoint(tiny_model_dir(arch, **options), folder, method, ignored)

    return make


@pytest.mark.parametrize("name", METHODS)
def test_matrices_have_the_values_of_their_method(name: str, write: Callable[..., Any]) -> None:
    folder, values = write(METHODS[name], **WIDE)
    files = resolve_model(str(folder))
    config = files.config()
    weights, formats = open_folder(folder), files.formats(config)
    for matrix in config.matrices:
        for parameter in matrix.weight_names:
            shape = tuple(values[parameter].shape)
            packed = weights.packed(parameter, (shape[0], shape[1]))
            assert packed.format == formats(parameter)
            assert torch.equal(torch.from_numpy(packed.to_floats(packed.rows)), values[parameter]), parameter
            assert np.array_equal(packed.to_floats(packed.rows[3:5]), values[parameter][3:5])
            assert torch.equal(weights.tensor(parameter, shape), values[parameter])
    for norm in config.norm_names:
        weights.tensor(f"{norm}.weight", tuple(values[f"{norm}.weight"].shape))
    assert weights.unused() == []
    assert weights.notes() == []


@pytest.mark.parametrize("group_size", [32, 64, None])
@pytest.mark.parametrize("name", ["w4a16", "w4a16-asymmetric", "awq", "gptq", "gptq-act-order", "gptq-8", "fp8"])
def test_other_groups_and_sizes_that_are_no_multiples_of_them(
    name: str, group_size: int | None, write: Callable[..., Any]
) -> None:
    folder, values = write(replace(METHODS[name], group_size=group_size), hidden_size=192, intermediate_size=320)
    weights = open_folder(folder)
    for parameter in (f"{Q_PROJ}.weight", "model.layers.1.mlp.down_proj.weight"):
        packed = weights.packed(parameter, tuple(values[parameter].shape))
        assert np.array_equal(packed.to_floats(packed.rows), values[parameter])


@needs_native
@pytest.mark.parametrize("name", [name for name in METHODS if name != "nvfp4"])  # It is converted to Q8_0.
def test_memory_is_at_most_about_a_tenth_more_than_the_file(name: str) -> None:
    """Native matrices have exactly the values of the file."""
    method = METHODS[name]
    tensors, values = quantize(torch.randn(768, 1024) * 0.1, method, "x.q_proj")
    matrix = read_matrix(tensors, method, (768, 1024))
    packed = matrix.packed()
    native = load().PackedMatrix(matrix.format, 768, 1024)
    native.pack_blocks(0, packed.rows)
    if packed.input_order is not None:
        native.set_input_order(packed.input_order.tolist())
    assert np.array_equal(native.unpack(0, 768), values.numpy())
    assert native.num_bytes <= 1.1 * sum(tensor.nbytes for tensor in tensors.values())


def read_matrix(tensors: dict[str, torch.Tensor], method: Method, shape: tuple[int, int]) -> Any:
    options = json.loads(json.dumps(quantization_config(method, [])))
    fields = ConfigFields({"quantization_config": options}, "config.json")
    quantization = read_quantization(fields)
    assert quantization is not None
    scheme = quantization.scheme("x.q_proj")
    assert scheme is not None
    return QuantizedReader(
        tensors.get, lambda name, problem: ModelLoadError(f"{name} {problem}"), scheme, shape
    ).matrix()


def test_scales_that_are_no_float16_are_reported(write: Callable[..., Any]) -> None:
    folder, values = write(replace(METHODS["w4a16"], scale_dtype=torch.float32), **WIDE)
    weights = open_folder(folder)
    found, expected = weights.tensor(f"{Q_PROJ}.weight", (128, 128)), values[f"{Q_PROJ}.weight"]
    assert 0 < float((found - expected).norm() / expected.norm()) < 2**-11
    (note,) = weights.notes()
    assert "scales of 1 quantized matrices are rounded to float16" in note
    assert Q_PROJ in note


def test_modules_that_are_not_quantized_keep_their_floats(write: Callable[..., Any]) -> None:
    name = "model.layers.1.mlp.down_proj"
    for method in ("w8a8", "fp8", "awq"):
        folder, values = write(METHODS[method], ignored=[name], **WIDE)
        weights = open_folder(folder)
        assert weights.packed(f"{name}.weight", (128, 384)).format == "f32"
        assert torch.equal(weights.tensor("lm_head.weight", (256, 128)), values["lm_head.weight"])
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_biases_of_zeros_that_autogptq_adds_are_ignored(write: Callable[..., Any]) -> None:
    folder, _ = write(METHODS["gptq"], **WIDE)
    change(folder, lambda tensors: tensors.update({f"{Q_PROJ}.bias": torch.zeros(128)}))
    assert f"{Q_PROJ}.bias" not in open_folder(folder).unused()
    change(folder, lambda tensors: tensors.update({f"{Q_PROJ}.bias": torch.ones(128)}))
    assert f"{Q_PROJ}.bias" in open_folder(folder).unused()


@loop_over(
    ("name", "edit"),
    [
        ("gptq", lambda t: t[f"{Q_PROJ}.qzeros"].fill_(-0x77777778)),  # 8 in the layout that stores 7.
        ("gptq", lambda t: t[f"{Q_PROJ}.qzeros"].zero_()),
        ("gptq", lambda t: t.pop(f"{Q_PROJ}.qzeros")),
        ("gptq-8", lambda t: t[f"{Q_PROJ}.qzeros"].fill_(-0x7F7F7F80)),
        ("awq-symmetric", lambda t: t[f"{Q_PROJ}.qzeros"].zero_()),
        ("awq-symmetric", lambda t: t.pop(f"{Q_PROJ}.qzeros")),
        ("w4a16", lambda t: t.update({f"{Q_PROJ}.weight_zero_point": torch.zeros(16, 1, dtype=torch.int32)})),
    ],
)
def test_symmetric_means_the_middle_whatever_is_stored(name: str, edit: Any, write: Callable[..., Any]) -> None:
    folder, values = write(METHODS[name], **WIDE)
    change(folder, edit)
    weights = open_folder(folder)
    assert torch.equal(weights.tensor(f"{Q_PROJ}.weight", (128, 128)), values[f"{Q_PROJ}.weight"])
    has_zeros = any(
        f"{Q_PROJ}.{end}" in load_file(folder / "model.safetensors") for end in ("qzeros", "weight_zero_point")
    )
    assert [note for note in weights.notes() if f"are ignored ({Q_PROJ})" in note] != [] or not has_zeros
    assert not [unread for unread in weights.unused() if unread.startswith(Q_PROJ)]
    shutil.rmtree(folder)


@loop_over(
    ("name", "scales"),
    [
        ("fp8", ["q_proj.input_scale"]),  # AutoFP8
        ("fp8", ["q_proj.activation_scale"]),  # Mistral
        ("fp8-tensor", ["q_proj.input_scale", "q_proj.input_zero_point", "k_scale", "v_scale"]),  # compressed-tensors
        ("fp8-tensor", ["q_proj.input_scale", "k_proj.output_scale", "kv_scale"]),  # older writers
        ("nvfp4", ["q_proj.input_global_scale"]),
    ],
)
def test_scales_of_activations_and_caches_are_skipped_and_named(
    name: str, scales: list[str], write: Callable[..., Any]
) -> None:
    folder, values = write(METHODS[name], **WIDE)
    attention = Q_PROJ.rpartition(".")[0]
    change(folder, lambda tensors: tensors.update({f"{attention}.{scale}": torch.tensor(0.5) for scale in scales}))
    weights = open_folder(folder)
    assert torch.equal(weights.tensor(f"{Q_PROJ}.weight", (128, 128)), values[f"{Q_PROJ}.weight"])
    assert not {f"{attention}.{scale}" for scale in scales}.intersection(weights.unused())
    ends = {f"skipped 1 tensors *.{scale.rpartition('.')[2]}: only weights are" for scale in scales}
    assert {note.partition(" quantized")[0] for note in weights.notes()} == ends
    shutil.rmtree(folder)


def test_scales_of_activations_belong_to_quantized_checkpoints(write: Callable[..., Any]) -> None:
    folder, _ = write(METHODS["fp8"], **WIDE)
    change(folder, lambda tensors: tensors.update({f"{Q_PROJ}.input_scale": torch.tensor(0.5)}))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert f"{Q_PROJ}.input_scale" in open_folder(folder).unused()


def test_scales_of_e8m0(write: Callable[..., Any]) -> None:
    """transformers stores scales of FP8 as powers of two if scale_fmt is ue8m0."""
    folder, _ = write(METHODS["fp8"], **WIDE)
    name, scales = f"{Q_PROJ}.weight_scale_inv", torch.tensor([[2.0**-9]]).to(torch.float8_e8m0fnu)
    numbers = load_file(folder / "model.safetensors")[f"{Q_PROJ}.weight"].float()
    change(folder, lambda tensors: tensors.update({name: scales}))
    assert torch.equal(open_folder(folder).tensor(f"{Q_PROJ}.weight", (128, 128)), numbers * 2.0**-9)


def test_configuration_in_a_file_of_its_own(write: Callable[..., Any]) -> None:
    """AutoGPTQ's first versions write quantize_config.json only."""
    folder, values = write(METHODS["gptq"], **WIDE)
    config = json.loads((folder / "config.json").read_text())
    options = config.pop("quantization_config")
    del options["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(options))
    assert torch.equal(open_folder(folder).tensor(f"{Q_PROJ}.weight", (128, 128)), values[f"{Q_PROJ}.weight"])


def test_bits_of_some_modules(write: Callable[..., Any]) -> None:
    """A folder with two layouts, as GPTQModel writes it with `dynamic`."""
    down, rows = "model.layers.0.mlp.down_proj", (128, 384)
    folder, _ = write(METHODS["gptq"], **WIDE)
    tensors, values = quantize(torch.randn(*rows), METHODS["gptq-8"], down)
    change(folder, lambda found: found.update({f"{down}.{end}": part.contiguous() for end, part in tensors.items()}))
    change_config(folder, dynamic={r"+:.*layers\.0\..*down_proj": {"bits": 8}})
    weights = open_folder(folder)
    assert torch.equal(weights.tensor(f"{down}.weight", rows), values)
    assert weights.packed(f"{down}.weight", rows).format == "q8_0"
    assert weights.packed("model.layers.1.mlp.down_proj.weight", rows).format == "q4_0"


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.name == "compressed-tensors"])
def test_layout_of_the_compressed_tensors_package(name: str) -> None:
    """The package decompresses the tensors to the same values."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    method = replace(METHODS[name], scale_dtype=torch.float32)
    if method.act_order:
        pytest.skip("the package reorders inputs elsewhere")
    config = compressed_config(method, [])
    group = config["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], weights=group["weights"])
    tensors, values = quantize(torch.randn(256, 384), method, "x.q_proj")
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    found = compressor.decompress(dict(tensors), scheme)["weight"]
    # The package rounds NVFP4 to bfloat16.
    torch.testing.assert_close(found.float(), values, rtol=2**-8 if name == "nvfp4" else 1e-6, atol=1e-7)


def test_mxfp4_rows_are_the_blocks_of_ggml() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 48, 2, 16), dtype=np.uint8)
    scales = rng.integers(118, 132, (3, 48, 2), dtype=np.uint8)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    numbers = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(3, 48, 2, 32)
    expected = (table[numbers] * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(3, 48, 64)
    rows = mxfp4_rows(blocks, scales)
    assert rows.shape == (3, 48, 34)
    assert np.array_equal(gguf.dequantize(rows, gguf.GGMLQuantizationType.MXFP4), expected)


@needs_native
def test_mxfp4_rows_can_be_packed() -> None:
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (48, 2, 16), dtype=np.uint8), rng.integers(118, 132, (48, 2), dtype=np.uint8)
    rows, matrix = mxfp4_rows(blocks, scales), load().PackedMatrix("mxfp4", 48, 64)
    matrix.pack_blocks(0, rows)
    assert np.array_equal(matrix.unpack(0, 48), gguf.dequantize(rows, gguf.GGMLQuantizationType.MXFP4))


@needs_native
def test_scale_255_of_mxfp4_in_gguf_files_is_a_power_of_two() -> None:
    """It means NaN in the specification, and 2^128 in ggml, where every block of zeros may have it."""
    codes = np.tile(np.array([0, 1, 8, 9], np.uint8), (16, 8)).reshape(16, 1, 32)
    rows = np.concatenate((np.full((16, 1), 255, np.uint8), (codes[..., :16] | codes[..., 16:] << 4)[:, 0]), axis=1)
    matrix, kind = load().PackedMatrix("mxfp4", 16, 32), gguf.GGMLQuantizationType.MXFP4
    matrix.pack_blocks(0, rows)
    expected = np.ldexp(np.array([0, 0.5, 0, -0.5], np.float32), 128)[codes % 4 % 2 + codes // 8 * 2].reshape(16, 32)
    assert np.array_equal(gguf.dequantize(rows, kind), expected)
    assert np.array_equal(matrix.unpack(0, 16), expected)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **options: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(options)
    (folder / "config.json").write_text(json.dumps(config))


EDITS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing tensor": ("awq", lambda t: t.pop(f"{Q_PROJ}.qzeros"), r"q_proj\.qzeros is missing"),
    "wrong shape": (
        "awq",
        lambda t: t.update({f"{Q_PROJ}.scales": torch.ones(2, 128)}),
        r"scales is torch.float32 \(2, 128\), but the configuration requires \(1, 128\) \(awq with 4 bits",
    ),
    "NaN in a scale": (
        "nvfp4",
        lambda t: t[f"{Q_PROJ}.weight_scale"].view(torch.uint8).fill_(0x7F),
        r"weight_scale contains infinite numbers or NaN",
    ),
    "NaN in an exponent": ("mxfp4", lambda t: t[f"{Q_PROJ}.weight_scale"].fill_(255), r"weight_scale contains NaN"),
    "factor of zero": (
        "nvfp4",
        lambda t: t[f"{Q_PROJ}.weight_global_scale"].zero_(),
        r"weight_global_scale contains infinite numbers or NaN",
    ),
    "no factor": ("nvfp4", lambda t: t.pop(f"{Q_PROJ}.weight_global_scale"), r"weight_global_scale is missing"),
    "order": (
        "gptq",
        lambda t: t.update({f"{Q_PROJ}.g_idx": torch.arange(128, dtype=torch.int32).flip(0)}),
        r"g_idx reorders the inputs.* set desc_act to true",
    ),
    "groups": (
        "gptq-act-order",
        lambda t: t[f"{Q_PROJ}.g_idx"].fill_(3),
        r"g_idx must assign 128 inputs to each of 1 groups",
    ),
    "no order": ("gptq-act-order", lambda t: t.pop(f"{Q_PROJ}.g_idx"), r"g_idx is missing, but .* order of their own"),
    "NaN": (
        "fp8",
        lambda t: t.update({f"{Q_PROJ}.weight": torch.full((128, 128), math.nan).to(torch.float8_e4m3fn)}),
        r"q_proj\.weight contains NaN",
    ),
    "infinite scale": (
        "w8a8",
        lambda t: t[f"{Q_PROJ}.weight_scale"].fill_(math.inf),
        r"weight_scale contains infinite numbers",
    ),
    "large scale": ("w4a16", lambda t: t[f"{Q_PROJ}.weight_scale"].fill_(1e6), r"scales exceed the range of float16"),
    "float8 without a scale": (
        "fp8",
        lambda t: t.pop(f"{Q_PROJ}.weight_scale_inv"),
        r"q_proj\.weight has type F8_E4M3, but no scales",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_errors_name_the_tensor(case: str, write: Callable[..., Any]) -> None:
    method, edit, message = EDITS[case]
    folder, _ = write(METHODS[method], **WIDE)
    change(folder, edit)
    with pytest.raises(ModelLoadError, match=message):
        open_folder(folder).packed(f"{Q_PROJ}.weight", (128, 128))


def test_group_size_that_does_not_fit(write: Callable[..., Any]) -> None:
    folder, _ = write(METHODS["awq"], **WIDE)
    change_config(folder, group_size=96)
    with pytest.raises(ModelLoadError, match=r"groups of 96 inputs, but the matrix has 128 inputs"):
        open_folder(folder).packed(f"{Q_PROJ}.weight", (128, 128))


def test_quantized_tensors_without_a_configuration(write: Callable[..., Any]) -> None:
    folder, _ = write(METHODS["w8a8"], **WIDE)
    change_config(folder, ignore=[Q_PROJ])
    with pytest.raises(ModelLoadError, match=r"q_proj has tensors of a quantized layer, but .* does not name it"):
        open_folder(folder).tensor(f"{Q_PROJ}.weight", (128, 128))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"quantization_config in config.json is missing"):
        open_folder(folder).tensor(f"{Q_PROJ}.weight", (128, 128))


def test_random_weights_are_not_quantized(write: Callable[..., Any]) -> None:
    folder, _ = write(METHODS["awq"], **WIDE)
    config = resolve_model(str(folder)).config()
    with pytest.raises(ModelLoadError, match=r"random weights are not quantized.*\(awq\)"):
        RandomWeights(config, torch.float32, CPU)
