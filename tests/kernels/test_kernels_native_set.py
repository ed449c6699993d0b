"""The native kernel set: formats, repacking, fused parts, shared tables, result buffers."""

from __future__ import annotations

import importlib
import logging
import re
from dataclasses import replace
from unittest.mock import patch

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.kernels import choice
from chairlift.kernels.choice import choose_kernels
from chairlift.kernels.cpu import load, repacking
from chairlift.kernels.cpu.attention import MAX_HEAD_DIM
from chairlift.kernels.cpu.formats import ROUNDED, matrix_bytes, native_format, packed_parts
from chairlift.kernels.cpu.native_set import NativeKernelSet
from chairlift.kernels.cpu.repacking import RepackingLoss, pack, repacking_notes
from chairlift.kernels.graph_sizes import graph_sizes
from chairlift.kernels.interface import NO_PROLOGUE, Kernels, LinearKernel, Prologue
from chairlift.kernels.kernel_memory import LayerSizes, NetworkSizes, StepSizes
from chairlift.kernels.kernel_set import MAX_THREADS, KernelsUnavailableError, get_kernels
from chairlift.kernels.triton import triton_set
from chairlift.kernels.triton.triton_set import TritonKernelSet
from chairlift.kernels.weight_formats import BYTES_PER_INPUT
from chairlift.kernels.weights import ByteArray, FloatArray, PackedRows, Weights, packed_tensor
from support.case_loop import loop_over
from support.ggml_blocks import random_blocks
from support.native import needs_native
from support.reference_kernels import REFERENCE

Q = gguf.GGMLQuantizationType


class Matrices:
    """A `Weights` over given matrices."""

    def __init__(self, **matrices: PackedRows) -> None:
        self._matrices = matrices

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        part = self._matrices[name.removesuffix(".weight")]
        return torch.from_numpy(part.to_floats(part.rows).copy()).view(shape)

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        return self._matrices[name.removesuffix(".weight")]


def linear(kernels: Kernels, weights: Weights, names: str, sizes: tuple[int, ...], in_features: int) -> LinearKernel:
    """One product with matrices of these names and sizes."""
    parts = list(zip(names.split(), sizes, strict=True))
    return kernels.make_linear(kernels.load_matrix(weights, parts, in_features), None, NO_PROLOGUE)


def blocks(kind: gguf.GGMLQuantizationType, rows: int, in_features: int, seed: int = 0) -> PackedRows:
    """Random rows of ggml blocks; types that the package cannot write are random bytes with scales of normal size."""
    if kind in (Q.Q4_0, Q.Q4_1, Q.Q8_0):
        rng = np.random.default_rng(seed)
        raw = gguf.quantize(rng.standard_normal((rows, in_features), dtype=np.float32), kind)
    else:
        raw = random_blocks(kind, rows, in_features, seed)

    def to_floats(part: ByteArray) -> FloatArray:
        values: FloatArray = gguf.dequantize(part, kind)
        return values

    return PackedRows(kind.name.lower(), raw, in_features, to_floats)


@pytest.fixture
def native() -> Kernels:
    return get_kernels("native")


@loop_over(
    ("found", "expected"),
    [
        (["q4_1"], [("q4_1", 8)]),
        (["q4_k", "q4_k", "q6_k"], [("q4_k", 16), ("q6_k", 8)]),
        (["q4_k", "q6_k", "q4_k"], [("q4_k", 8), ("q6_k", 8), ("q4_k", 8)]),
        (["iq2_xs", "q8_0"], [("q8_0", 16)]),
        (["bf16", "bf16"], [("bf16", 16)]),
        (["bf16", "f16"], [("f32", 16)]),
        (["q8_0", "f16"], [("f16", 16)]),
        (["u4_g128", "u4_g128", "q4_0"], [("u4_g128", 16), ("q4_0", 8)]),
        (["q4_0+order", "q4_0+order"], [("q4_0+order", 16)]),
        (["int8", "int8"], [("int8", 16)]),
        (["f8_e4m3", "f8_e4m3"], [("f8_e4m3", 16)]),
        (["int8", "q8_0"], [("f32", 16)]),
        (["f8_e4m3", "bf16"], [("f32", 16)]),
    ],
)
def test_the_formats_of_matrices_that_are_multiplied_as_one(found: list[str], expected: list[tuple[str, int]]) -> None:
    parts = [(name, 8) for name in found]
    assert packed_parts(parts) == expected
    assert packed_parts(parts, "int8") == [("int8", 8 * len(found))]


def test_every_format_of_ggml_has_a_native_one() -> None:
    assert {native_format(kind.name.lower()) for kind in Q} <= set(BYTES_PER_INPUT)


@needs_native
@given(st.sampled_from(sorted(BYTES_PER_INPUT)), st.integers(1, 70), st.integers(1, 200))
def test_planned_bytes_equal_those_of_the_extension(name: str, out_features: int, in_features: int) -> None:
    in_features *= 1 if name in ROUNDED else 256
    assert load().PackedMatrix(name, out_features, in_features).num_bytes == matrix_bytes(
        name, out_features, in_features
    )


@needs_native
@loop_over(
    ("kind", "target", "bound"),
    [
        (Q.Q4_1, "q8_0", 6e-3),
        (Q.Q4_K, "q8_0", 6e-3),
        (Q.Q8_0, "int8", 2e-2),
        (Q.Q8_0, "f32", 0.0),
    ],
)
def test_the_error_of_repacking(kind: gguf.GGMLQuantizationType, target: str, bound: float) -> None:
    part = blocks(kind, 37, 512)
    matrix = load().PackedMatrix(target, 50, 512)
    pack(matrix, 5, part)
    ours, expected = matrix.unpack(5, 37), part.to_floats(part.rows)
    error = float(np.sqrt(np.square(ours - expected).mean() / np.square(expected).mean()))
    assert error <= bound
    loss = RepackingLoss()
    loss.add(matrix, 5, part)
    assert loss.relative_error == pytest.approx(error, rel=1e-4, abs=1e-9), "37 rows are all measured"
    assert repacking_notes([(("a", "b"), loss)]) == [
        f"1 matrices repacked from a to b: the error is {error:.2%} of the root mean square of the values"
    ]


@needs_native
@loop_over("target", ROUNDED)
@loop_over("dtype", [torch.bfloat16, torch.float16])
def test_half_floats_are_repacked_as_their_floats(
    dtype: torch.dtype, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repacking, "VALUES_AT_ONCE", 500)  # float16 is converted in pieces
    part = packed_tensor(torch.randn(37, 70).to(dtype))
    matrix, expected = (load().PackedMatrix(target, 50, 70) for _ in range(2))
    pack(matrix, 5, part)
    expected.pack_floats(5, part.to_floats(part.rows))
    assert matrix.unpack(5, 37).tobytes() == expected.unpack(5, 37).tobytes()


@needs_native
def test_repacking_is_logged_once_per_model() -> None:
    kernels = get_kernels("native", "q8_0")
    weights = Matrices(q=blocks(Q.Q4_0, 16, 64), k=blocks(Q.Q8_0, 16, 64, seed=1), o=blocks(Q.Q8_0, 16, 64))
    kernels.load_matrix(weights, [("q", 16), ("k", 16)], 64)
    kernels.load_matrix(weights, [("o", 16)], 64)
    (note,) = kernels.notes()
    assert note.startswith("1 matrices repacked from q4_0 to q8_0: the error is 0.")


@needs_native
def test_a_fused_product_is_the_concatenation_of_its_parts(native: Kernels) -> None:
    weights = Matrices(q=blocks(Q.Q4_1, 24, 64), k=blocks(Q.Q4_1, 8, 64, 1), v=blocks(Q.Q4_1, 9, 64, 2))
    x = torch.randn(5, 64)
    fused = linear(native, weights, "q k v", (24, 8, 9), 64)(x).clone()
    parts = [linear(native, weights, name, (out,), 64)(x).clone() for name, out in (("q", 24), ("k", 8), ("v", 9))]
    assert torch.equal(fused, torch.cat(parts, dim=1))
    expected = torch.cat([x @ weights.tensor(f"{n}.weight", (out, 64)).t() for n, out in (("q", 24), ("k", 8))], dim=1)
    torch.testing.assert_close(fused[:, :32], expected, rtol=0.05, atol=0.5)


@needs_native
@loop_over("kind", ["f32", "int8"])
def test_a_tied_head_multiplies_by_the_embedding_table(kind: str) -> None:
    native = get_kernels("native", None if kind == "f32" else kind)
    weights = Matrices(embed=packed_tensor(torch.randn(40, 24)))
    matrix = native.load_matrix(weights, [("embed", 40)], 24)
    embedding, head = native.make_embedding(matrix), native.make_linear(matrix, None, NO_PROLOGUE)
    table = torch.from_numpy(matrix.parts[0].unpack(0, 40))
    assert torch.equal(embedding(torch.tensor([7, 0, 39, 7])), table[[7, 0, 39, 7]])
    hidden = torch.randn(3, 24)
    torch.testing.assert_close(head(hidden), hidden @ table.t(), rtol=1e-5 if kind == "f32" else 0.05, atol=0.2)


@needs_native
def test_a_tied_head_of_the_same_width_does_not_overwrite_its_input(native: Kernels) -> None:
    """Some threads read a row while other threads write its logits."""
    matrix = native.load_matrix(Matrices(embed=packed_tensor(torch.randn(24, 24))), [("embed", 24)], 24)
    embedding, head = native.make_embedding(matrix), native.make_linear(matrix, None, NO_PROLOGUE)
    hidden = embedding(torch.tensor([5, 3]))
    expected = hidden @ torch.from_numpy(matrix.parts[0].unpack(0, 24)).t()
    logits = head(hidden)
    assert logits.data_ptr() != hidden.data_ptr()
    torch.testing.assert_close(logits, expected)


@needs_native
def test_a_residual_must_not_share_memory_with_the_input(native: Kernels) -> None:
    layer = linear(native, Matrices(up=packed_tensor(torch.randn(8, 8))), "up", (8,), 8)
    x = torch.randn(3, 8)
    with pytest.raises(AssertionError, match="x and the result must not share memory"):
        layer(x, residual=x[:])


@needs_native
def test_sums_use_the_memory_of_the_residual_and_other_results_a_shared_buffer(native: Kernels) -> None:
    weights = Matrices(**{"0.up": packed_tensor(torch.randn(8, 8)), "1.up": packed_tensor(torch.randn(8, 8))})
    first, second = (linear(native, weights, f"{i}.up", (8,), 8) for i in range(2))
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    expected = REFERENCE.make_linear(weights.tensor("0.up.weight", (8, 8)), None, NO_PROLOGUE)(x)
    out = first(x)
    torch.testing.assert_close(out, expected)
    before = residual.clone()
    assert first(x, residual) is residual
    torch.testing.assert_close(residual, before + expected)
    assert second(x).data_ptr() == out.data_ptr()
    assert first(x[:2]).data_ptr() == out.data_ptr()
    assert len(first(torch.randn(9, 8))) == 9


@needs_native
@loop_over("kernels", ["torch", "native"])
@loop_over("after", ["none", "rms_norm", "layer_norm"])
@loop_over("of_sum", ["none", "rms_norm", "layer_norm"])
@loop_over("num_rows", [1, 8, 9, 70])
def test_residual_sums(kernels: str, after: str, of_sum: str, num_rows: int) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(4, 37)

    def norm(kind: str, weight: torch.Tensor, bias: torch.Tensor) -> Prologue:
        has_bias = kind == "layer_norm"
        return NO_PROLOGUE if kind == "none" else Prologue(kind, weight, bias if has_bias else None, 1e-3)

    norms = norm(after, vectors[0], vectors[1]), norm(of_sum, vectors[2], vectors[3])
    for factors in ((1.0, 1.0), (0.3, 1.0), (0.3, 0.6)):
        ours, expected = (each.make_residual_sum(*norms, *factors) for each in (get_kernels(kernels), REFERENCE))
        stream, branch = torch.randn(num_rows, 40)[:, 3:], torch.randn(num_rows, 37)
        found = ours(stream.clone(), branch.clone()).clone()
        torch.testing.assert_close(found, expected(stream.clone(), branch.clone()), rtol=1e-4, atol=1e-5)
        alone = [ours(stream[i : i + 1].clone(), branch[i : i + 1].clone()).clone() for i in range(num_rows)]
        assert kernels == "torch" or torch.equal(found, torch.cat(alone))
        torch.testing.assert_close(ours(stream.clone(), None), expected(stream.clone(), None), rtol=1e-4, atol=1e-5)


@needs_native
def test_a_residual_sum_checks_the_size_of_its_norms(native: Kernels) -> None:
    kernel = native.make_residual_sum(Prologue("rms_norm", torch.ones(8), eps=1e-5), NO_PROLOGUE, 1.0, 1.0)
    with pytest.raises(ValueError, match="the weights of the norms must have size values"):
        kernel(torch.ones(2, 9), torch.ones(2, 9))


@needs_native
def test_rows_may_have_a_stride(native: Kernels) -> None:
    weights = Matrices(down=packed_tensor(torch.randn(6, 10)))
    wide, norm = torch.randn(4, 50), Prologue("rms_norm", torch.rand(10), eps=1e-5)
    for prologue, x in ((Prologue("silu_and_mul"), wide[:, 5:25]), (norm, wide[:, 20:30])):
        ours = native.make_linear(native.load_matrix(weights, [("down", 6)], 10), None, prologue)
        expected = REFERENCE.make_linear(weights.tensor("down.weight", (6, 10)), None, prologue)
        torch.testing.assert_close(ours(x), expected(x), rtol=1e-4, atol=1e-4)
        written, other = torch.zeros(4, 9), torch.zeros(4, 9)
        ours(x, out=written[:, 2:8])
        expected(x, out=other[:, 2:8])
        torch.testing.assert_close(written, other, rtol=1e-4, atol=1e-4)


@needs_native
def test_parts_in_several_formats_keep_their_formats(native: Kernels) -> None:
    weights = Matrices(q=blocks(Q.Q4_K, 24, 256), k=blocks(Q.Q4_K, 8, 256, 1), v=blocks(Q.Q6_K, 9, 256, 2))
    matrix = native.load_matrix(weights, [("q", 24), ("k", 8), ("v", 9)], 256)
    assert [(part.format, part.out_features) for part in matrix.parts] == [("q4_k", 32), ("q6_k", 9)]
    x = torch.randn(5, 256)
    fused = native.make_linear(matrix, None, NO_PROLOGUE)(x).clone()
    parts = [linear(native, weights, name, (out,), 256)(x).clone() for name, out in (("q", 24), ("k", 8), ("v", 9))]
    assert torch.equal(fused, torch.cat(parts, dim=1))
    assert native.notes() == []


@needs_native
def test_the_limits_are_those_of_the_extension() -> None:
    with pytest.raises(ValueError, match=f"from 1 to {MAX_THREADS}, got {MAX_THREADS + 1}"):
        load().set_num_threads(MAX_THREADS + 1)
    with pytest.raises(ValueError, match=f"from 4 to {MAX_HEAD_DIM}, got {MAX_HEAD_DIM + 4}"):
        load().PagedAttention(1, 1, MAX_HEAD_DIM + 4, 1.0, "f32", 0.0)


def test_options_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeKernelSet, "check_available", lambda _set: None)
    monkeypatch.setattr(TritonKernelSet, "check_available", lambda _set: None)

    def chosen(**options: object) -> tuple[str, str, str, str | None]:
        settled = choose_kernels(EngineConfig(**options), "bfloat16")  # type: ignore[arg-type]
        return settled.kernels, settled.dtype, settled.kv_cache_dtype, settled.quantization

    assert chosen() == ("native", "float32", "bfloat16", None)
    assert chosen(quantization="q8_0", kv_cache_dtype="int8") == ("native", "float32", "int8", "q8_0")
    assert chosen(dtype="bfloat16") == ("torch", "bfloat16", "bfloat16", None)
    assert chosen(device="cuda") == ("triton", "bfloat16", "bfloat16", None)
    assert chosen(device="cuda", dtype="float16") == ("triton", "float16", "float16", None)
    assert chosen(device="cuda:1", kv_cache_dtype="int8") == ("triton", "bfloat16", "int8", None)
    assert chosen(device="cuda", kernels="torch") == ("torch", "bfloat16", "bfloat16", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert chosen(kernels="triton", kv_cache_dtype="bfloat16") == ("triton", "float32", "bfloat16", None)
    assert chosen(kernels="torch") == ("torch", "float32", "float32", None)


def test_without_the_extension_torch_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_set: NativeKernelSet) -> None:
        raise KernelsUnavailableError("the native kernels are not compiled: install a C++ compiler")

    monkeypatch.setattr(NativeKernelSet, "check_available", fail)
    choice._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="chairlift"):
        assert choose_kernels(EngineConfig(), "float32").kernels == "torch"
        assert choose_kernels(EngineConfig(), "float32").kernels == "torch"
    (message,) = caplog.messages
    assert "not compiled: install a C++ compiler" in message
    for options in ({"quantization": "q8_0"}, {"kv_cache_dtype": "int8"}):
        with pytest.raises(KernelsUnavailableError, match="not compiled"):
            choose_kernels(EngineConfig(**options), "float32")  # type: ignore[arg-type]


def test_without_triton_torch_is_used_on_cuda(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_set, "find_spec", lambda _name: None)
    choice._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="chairlift"):
        assert choose_kernels(EngineConfig(device="cuda"), "bfloat16").kernels == "torch"
    remedy = r"triton is not installed: pip install 'chairlift\[gpu\]'"
    assert re.match(remedy, caplog.messages[0])
    with pytest.raises(KernelsUnavailableError, match=remedy):
        choose_kernels(EngineConfig(device="cuda", kv_cache_dtype="int8"), "bfloat16")
    with pytest.raises(KernelsUnavailableError, match=remedy):
        get_kernels("triton")


def test_triton_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_set, "find_spec", lambda _name: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        KernelsUnavailableError, match="triton kernels need a CUDA device, and torch finds none: choose"
    ):
        get_kernels("triton")
    with pytest.raises(ConfigError, match="kernels=triton needs device=cuda, got cpu: choose"):
        choose_kernels(EngineConfig(kernels="triton"), "bfloat16")


@loop_over(
    ("options", "message"),
    [
        ({"kernels": "native", "device": "cuda"}, "kernels=native cannot be .* device=cuda"),
        ({"kernels": "native", "dtype": "bfloat16"}, "kernels=native cannot be .* dtype=bfloat16"),
        (
            {"quantization": "q8_0", "kernels": "torch"},
            "quantization=q8_0 needs native kernels and cannot be combined with",
        ),
        (
            {"quantization": "q8_0", "device": "cuda"},
            "quantization=q8_0 needs native kernels and cannot be combined with device=cuda",
        ),
        ({"quantization": "q5_0"}, "quantization must be one of int8, q8_0, q4_0, q4_1, got 'q5_0'"),
        ({"kv_cache_dtype": "int8", "kernels": "torch"}, "kv_cache_dtype=int8 needs native or triton kernels"),
        (
            {"quantization": "int8", "kernels": "triton"},
            "quantization=int8 needs native kernels and cannot be combined with kernels=triton",
        ),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be one of auto, bfloat16, float32, int8, got 'fp8'"),
    ],
)
def test_contradictory_options_are_rejected(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("_native"), r"are not compiled: install a C\+\+ compiler"),
        (ImportError("libgomp is missing"), "cannot be loaded: libgomp is missing"),
    ],
)
def test_the_error_names_why_the_extension_cannot_be_loaded(error: ImportError, message: str) -> None:
    load.cache_clear()
    with (
        patch.object(importlib, "import_module", side_effect=error),
        pytest.raises(KernelsUnavailableError, match=message),
    ):
        load()


@pytest.mark.parametrize("num_seqs", [1, 64])
def test_the_memory_of_graphs_is_planned_on_cuda(num_seqs: int) -> None:
    layer = LayerSizes(0, 4, 2, 64, 0.125, None, True, True, (NetworkSizes(512, True),))
    sizes = StepSizes(512, num_seqs, 1024, 16, 256, True, frozenset(), (layer, replace(layer, group=1)))
    on_cpu, on_cuda = (
        {item.name: item.num_bytes for item in TritonKernelSet().memory("bfloat16", device, None).step(sizes)}
        for device in ("cpu", "cuda")
    )
    results, tables = sum(graph_sizes(num_seqs)) * 256 * 2, 2 * num_seqs * 64 * 4
    assert on_cuda.keys() - on_cpu.keys() == {"CUDA graphs", "workspaces of cuBLAS"}
    assert on_cuda["CUDA graphs"] > results + tables + num_seqs * on_cpu["residual stream"] // 512
