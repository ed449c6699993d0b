"""GGUF files: header, metadata, every quantization, factors, and errors for damaged files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.errors import ModelLoadError
from chairlift.loading.gguf_file import GGUFFile
from chairlift.loading.gguf_weights import GGUFWeights, dequantize
from chairlift.loading.model_source import GGUFSource
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.model_config import ModelConfig
from support.gguf_files import HIDDEN, INTERMEDIATE, finish, gguf_name, write_gguf

CPU = torch.device("cpu")
Q = gguf.GGMLQuantizationType
QUANTIZABLE = [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0]


def open_gguf(path: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, GGUFWeights]:
    files = GGUFSource(path, "test")
    config = files.config()
    weights = files.weights(config, dtype, CPU)
    assert isinstance(weights, GGUFWeights)
    return config, weights


def test_metadata_of_every_type_equals_gguf_reader(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kinds = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "uint64", "int64", "float64"]
    for number, kind in enumerate(kinds):
        getattr(writer, f"add_{kind}")(f"a.{kind}", number + 0.5 if kind.startswith("float") else number)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "Ski lift 🚡")
    arrays: dict[str, list[Any]] = {"ints": [1, -2], "floats": [0.5], "bools": [True, False], "strings": ["", "ü"]}
    for name, values in arrays.items():
        writer.add_array(f"a.{name}", values)
    writer.add_custom_alignment(64)
    writer.add_tensor("blk.0.ffn_up.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("output_norm.weight", np.arange(5, dtype=np.float32))
    ours, oracle = GGUFFile(finish(writer, path)), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {name: (t.offset, t.num_bytes, t.shape) for name, t in ours.tensors.items()} == {
        t.name: (t.data_offset, t.n_bytes, tuple(t.shape[::-1])) for t in oracle.tensors
    }
    assert np.array_equal(dequantize(ours, "output_norm.weight"), np.arange(5))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_rows_of_other_architectures_keep_their_order(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, arch: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir(arch))
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    key_length = {f"{arch}.attention.key_length": 16, f"{arch}.attention.value_length": 16}
    path = write_gguf(tmp_path / "m.gguf", {gguf_name(n): t for n, t in state.items()}, arch=arch, metadata=key_length)
    config, weights = open_gguf(path)
    attention = config.layers[0].attention
    assert attention.qkv.has_bias is (arch == "qwen2")
    assert (attention.head_norm is not None) is (arch == "qwen3")
    for name, tensor in state.items():
        assert torch.equal(weights.tensor(name, tuple(tensor.shape)), tensor), name
    assert weights.unused() == []


@pytest.mark.parametrize("quantization", QUANTIZABLE, ids=lambda kind: kind.name)
def test_quantizations_equal_the_gguf_package(tmp_path: Path, quantization: gguf.GGMLQuantizationType) -> None:
    tensor = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": tensor}, quantization=quantization)
    (stored,) = gguf.GGUFReader(path).tensors
    oracle = gguf.dequantize(stored.data, stored.tensor_type).reshape(96, 64)
    assert np.array_equal(dequantize(GGUFFile(path), "blk.0.ffn_up.weight"), oracle)
    _, weights = open_gguf(path, torch.bfloat16)
    ours = weights.tensor("model.layers.0.mlp.up_proj.weight", (96, 64))
    assert torch.equal(ours, torch.from_numpy(oracle.copy()).to(torch.bfloat16))


@pytest.mark.parametrize("quantization", QUANTIZABLE, ids=lambda kind: kind.name)
def test_packed_rows_dequantize_to_the_tensor(tmp_path: Path, quantization: gguf.GGMLQuantizationType) -> None:
    """Rows of query and key projections are returned in the order of Hugging Face, in every format."""
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "ffn_down": (64, 96)}
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}
    tensors = {f"blk.0.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    _, weights = open_gguf(write_gguf(tmp_path / "m.gguf", tensors, quantization=quantization))
    for name, shape in shapes.items():
        ours = f"model.layers.0.{names[name]}.weight"
        packed = weights.packed(ours, shape)
        assert packed.format == quantization.name.lower()
        floats = packed.to_floats(packed.rows[3:7])
        assert np.array_equal(floats, weights.tensor(ours, shape)[3:7].numpy())
        with pytest.raises(ModelLoadError, match=rf"tensor blk\.0\.{name}\.weight has the shape"):
            weights.packed(ours, (shape[0], 32))
    assert weights.unused() == []


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_XS, Q.IQ2_XXS], ids=lambda k: k.name)
def test_k_quants_equal_the_gguf_package(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    _, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (12, 3 * bytes_per_block), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    file = GGUFFile(finish(writer, tmp_path / "m.gguf"))
    oracle = gguf.dequantize(raw, kind)
    assert np.array_equal(dequantize(file, "blk.0.ffn_up.weight"), oracle, equal_nan=True)


def test_error_names_an_unsupported_quantization(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 4, 292), dtype=np.uint8)[0], raw_dtype=Q.Q8_K)
    file = GGUFFile(finish(writer, tmp_path / "m.gguf"))
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor blk\.0\.ffn_up\.weight has type Q8_K"):
        dequantize(file, "blk.0.ffn_up.weight")


def test_errors_name_wrong_shape_and_missing_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": torch.zeros(30, 64)})
    _, weights = open_gguf(path)
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor blk\.0\.attn_q\.weight has the shape \(30, 64\)"):
        weights.tensor("model.layers.0.self_attn.q_proj.weight", (64, 64))
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor output_norm\.weight is missing"):
        weights.tensor("model.norm.weight", (64,))


def test_unused_lists_tensors_that_were_not_read(tmp_path: Path) -> None:
    tensors = {name: torch.ones(8) for name in ("output_norm.weight", "blk.0.surprise.weight", "rope_freqs.weight")}
    config, weights = open_gguf(write_gguf(tmp_path / "m.gguf", tensors))
    weights.tensor("model.norm.weight", (8,))
    assert weights.unused() == ["blk.0.surprise.weight"]
    rope = config.layers[0].attention.rope
    assert rope is not None
    assert rope.freq_factors == (1.0,) * 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    tensors = {"token_embd.weight": torch.zeros(8, 64), "output_norm.weight": torch.zeros(64)}
    return write_gguf(path, tensors, metadata={"tokenizer.ggml.tokens": ["a", "b"], "x.ids": [1, 2, 3]}).read_bytes()


def test_truncation_at_every_byte_is_an_error_that_names_the_file(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 900, 7), *range(900, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf: (truncated|the file is empty)"):
            _ = GGUFFile(path).tensors
    path.write_bytes(whole)
    assert list(GGUFFile(path).tensors) == ["token_embd.weight", "output_norm.weight"]


def test_truncated_default_model(smollm2_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    with smollm2_gguf.open("rb") as source:
        path.write_bytes(source.read(5_000_000))
    with pytest.raises(ModelLoadError, match=r"half\.gguf: truncated: tensor \S+ at byte \d+ needs \d+ bytes"):
        _ = GGUFFile(path).tensors


@pytest.mark.parametrize(
    ("at", "value", "problem"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, b"\x01\x00\x00\x00", "version 1 is not supported"),
        (4, b"\x00\x00\x00\x03", "version 50331648 is not supported"),
        (8, b"\xff" * 8, "damaged|truncated"),
        (16, b"\xff" * 8, "damaged|truncated"),
        (24, b"\xff" * 8, "truncated"),
        (32, b"\xff", "not UTF-8"),
        (52, b"\x63", "unknown type 99"),
        (52, struct.pack("<IIQ", 9, 9, 1), "is an array of arrays, which is not supported"),
    ],
)
def test_damaged_headers_are_errors(whole: bytes, tmp_path: Path, at: int, value: bytes, problem: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(whole[:at] + value + whole[at + len(value) :])
    with pytest.raises(ModelLoadError, match=rf"bad\.gguf: .*({problem})"):
        _ = GGUFFile(path).tensors


@given(at=st.integers(0, 700), junk=st.binary(min_size=1, max_size=9))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damaged_header_is_read_or_rejected(whole: bytes, tmp_path: Path, at: int, junk: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
    with suppress(ModelLoadError):
        GGUFSource(path, "bad").config()


def test_error_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none\.gguf: cannot be read"):
        GGUFFile(tmp_path / "none.gguf")


UP, GATE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
SHAPE = (INTERMEDIATE, HIDDEN)


def nvfp4_blocks() -> tuple[Any, Any]:
    """Return random blocks of 64 inputs with all bytes as scales, and their values by the definition of ggml."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (INTERMEDIATE, 36), dtype=np.uint8)
    blocks[:64, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    scales, pairs = blocks[:, :4], blocks[:, 4:].reshape(-1, 4, 8)
    floats = torch.from_numpy(scales & 0x7F).view(torch.float8_e4m3fn).float().numpy()  # The sign is ignored,
    floats = np.where(scales == 0x7F, 0, np.where(scales == 0xFF, 480, floats))  # and NaN is 0, or 480 with a sign.
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate((pairs & 15, pairs >> 4), axis=2)
    values = np.concatenate((table, -table))[numbers] * floats[..., None]
    return blocks, values.reshape(SHAPE).astype(np.float32)


def open_weights(path: Path) -> GGUFWeights:
    files = resolve_model(str(path))
    weights = files.weights(files.config(), torch.float32, CPU)
    assert isinstance(weights, GGUFWeights)
    return weights


def test_nvfp4_has_the_values_of_its_blocks_times_the_factor(tmp_path: Path) -> None:
    blocks, values = nvfp4_blocks()
    vectors = {"blk.0.ffn_up.scale": torch.tensor([0.37]), "blk.0.ffn_up.input_scale": torch.tensor([0.02])}
    rows = {"blk.0.ffn_up.weight": (Q.NVFP4, blocks), "blk.0.ffn_gate.weight": (Q.NVFP4, blocks)}
    path = write_gguf(tmp_path / "model.gguf", vectors, blocks=rows)
    weights, source = open_weights(path), resolve_model(str(path))
    for name, factor in ((UP, np.float32(0.37)), (GATE, np.float32(1))):
        packed = weights.packed(name, SHAPE)
        assert packed.format == "nvfp4" == source.formats(source.config())(name)
        assert np.array_equal(packed.to_floats(packed.rows), values * factor)
        assert np.array_equal(packed.to_floats(packed.rows[5:7]), values[5:7] * factor)
        assert np.array_equal(weights.tensor(name, SHAPE).numpy(), values * factor)
    assert weights.unused() == []
    assert weights.notes() == ["skipped 1 tensors *.input_scale: only weights are quantized as in the file"]


@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0])
def test_matrices_of_other_types_with_a_factor_become_floats(kind: Any, tmp_path: Path) -> None:
    values = torch.randn(SHAPE)
    tensors = {"blk.0.ffn_up.weight": values, "blk.0.ffn_up.scale": torch.tensor([2.0])}
    path = write_gguf(tmp_path / "model.gguf", tensors, quantization=kind)
    expected = 2 * gguf.dequantize(gguf.quantize(values.numpy(), kind), kind)
    weights, source = open_weights(path), resolve_model(str(path))
    packed = weights.packed(UP, SHAPE)
    assert packed.format == "f32" == source.formats(source.config())(UP)
    assert np.array_equal(packed.to_floats(packed.rows), expected)
    assert np.array_equal(weights.tensor(UP, SHAPE).numpy(), expected)


@pytest.mark.parametrize("factor", [[1.0, 2.0], [float("nan")]])
def test_errors_name_a_wrong_factor(factor: list[float], tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_up.weight": torch.randn(SHAPE), "blk.0.ffn_up.scale": torch.tensor(factor)}
    weights = open_weights(write_gguf(tmp_path / "model.gguf", tensors))
    with pytest.raises(ModelLoadError, match=r"tensor blk\.0\.ffn_up\.scale must have 1 finite numbers"):
        weights.tensor(UP, SHAPE)


def test_a_factor_without_a_matrix_is_an_error(tmp_path: Path) -> None:
    weights = open_weights(write_gguf(tmp_path / "model.gguf", {"blk.0.ffn_up.scale": torch.tensor([2.0])}))
    assert weights.unused() == ["blk.0.ffn_up.scale"]
