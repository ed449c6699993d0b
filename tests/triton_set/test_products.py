"""Triton's products with matrices in the formats of files equal products of floats, whatever the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from chairlift.errors import ModelLoadError
from chairlift.kernels.interface import NO_PROLOGUE, LoadedMatrix, Mixture, Prologue, RowKernel
from chairlift.kernels.lora import AdaptedLinear, LoraAdapters
from chairlift.kernels.routing import ExpertRouting
from chairlift.kernels.triton import adapters, experts, matrices, products
from chairlift.kernels.triton.formats import FORMATS, weight_bytes
from chairlift.kernels.weights import PackedRows, packed_tensor
from chairlift.loading.block_rows import decode_mxfp4, decode_rows
from support.case_loop import loop_over
from support.ggml_blocks import random_rows
from support.reference_kernels import ReferenceMixture, apply_prologue

GGML = ("q4_1", "q4_k", "q6_k", "q5_k")
CPU = torch.device("cpu")


def make_prologue(prologue: Prologue) -> RowKernel:
    return partial(apply_prologue, prologue=prologue)


def packed_rows(name: str, out: int, inputs: int, seed: int = 0) -> PackedRows:
    if name in ("bf16", "f32"):
        tensor = torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed))
        return packed_tensor(tensor.bfloat16() if name == "bf16" else tensor)
    if name == "int8":
        rng = np.random.default_rng(seed)
        numbers = rng.integers(0, 256, (out, inputs), dtype=np.uint8)
        scales = rng.uniform(-1e-2, 1e-2, (out, 1)).astype(np.float32)
        rows = np.concatenate((numbers, scales.view(np.uint8)), axis=1)
    else:
        rows = random_rows(name, out, inputs, seed)
    if name in GGML:
        kind = gguf.GGMLQuantizationType[name.upper()]
        return PackedRows(name, rows, inputs, lambda rows: gguf.dequantize(rows, kind).astype(np.float32))
    if name == "mxfp4":
        return PackedRows(name, rows, inputs, decode_mxfp4)
    return PackedRows(name, rows, inputs, partial(decode_rows, name=name, in_features=inputs, input_order=None))


class Parts:
    """A `Weights` of matrices by name, in float32."""

    dtype, device = torch.float32, CPU

    def __init__(self, rows: dict[str, PackedRows]) -> None:
        self._rows = rows

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        found = self._rows[name.removesuffix(".weight")]
        assert (len(found.rows), found.in_features) == shape
        return found

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        raise NotImplementedError


def load(*rows: PackedRows) -> tuple[matrices.Matrix, torch.Tensor, matrices.DeviceMatrixLoader]:
    """Matrices that are multiplied as one, and their values as floats."""
    loader = matrices.DeviceMatrixLoader()
    named = {f"m{i}": each for i, each in enumerate(rows)}
    parts = [(name, len(each.rows)) for name, each in named.items()]
    matrix = loader.load(Parts(named), parts, rows[0].in_features)
    return matrix, torch.cat([torch.from_numpy(each.to_floats(each.rows)) for each in rows]), loader


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def make_linear(matrix: matrices.Matrix, bias: torch.Tensor | None, prologue: Prologue = NO_PROLOGUE) -> Any:
    return products.make_linear(matrix, bias, prologue, make_prologue)


def check_product(rows: list[PackedRows], num_rows: int) -> None:
    """Compare a product with and without a bias, a residual and `out` with the product of floats."""
    matrix, weight, _ = load(*rows)
    out, inputs = weight.shape
    x, bias, residual = random(num_rows, inputs), random(out, seed=1), random(num_rows, out, seed=2)
    product = x @ weight.t()
    if num_rows % 2:
        result = torch.empty(num_rows, out + 3)[:, 3:]
        assert make_linear(matrix, bias)(x, out=result) is result
        assert_close(result, product + bias)
    else:
        result = residual.clone()
        assert make_linear(matrix, None)(x, result) is result
        assert_close(result, product + residual)


@pytest.mark.parametrize("name", FORMATS)
def test_products_equal_those_of_floats(name: str) -> None:
    for num_rows in (1, 3, 16, 40):
        check_product([packed_rows(name, 72, 256)], num_rows)
    check_product([packed_rows(name, 130, 512, seed=1)], 17)


@loop_over(("name", "inputs"), [("u4_g32", 64), ("q4_0", 96), ("mxfp4", 352), ("int8", 72), ("f8_e4m3", 200)])
def test_inputs_are_padded(name: str, inputs: int) -> None:
    check_product([packed_rows(name, 10, inputs)], 6)


@loop_over("num_rows", [2, 65])
def test_sums_of_long_rows_are_split(num_rows: int) -> None:
    check_product([packed_rows("q8_0", 72, 1024)], num_rows)


def test_parts_in_several_formats_are_one_product() -> None:
    names = ["q4_k", "q4_k", "bf16", "q6_k", "f32", "q5_k"]
    rows = [packed_rows(name, 24 + i, 256, seed=i) for i, name in enumerate(names)]
    matrix, _, loader = load(*rows)
    assert [products.kind_of(part) for part in matrix.parts] == ["q4_k", "float", "q6_k", "float"]
    assert loader.notes() == [
        "1 matrices converted from q5_k to float32: the set triton has no products for their format"
    ]
    for num_rows in (2, 3):
        check_product(rows, num_rows)


def test_inputs_may_have_an_order() -> None:
    order = np.random.default_rng(0).permutation(128).astype(np.int32)
    rows = replace(packed_rows("q4_0", 40, 128), format="q4_0+order", input_order=order)
    decode = partial(decode_rows, name="q4_0", in_features=128, input_order=order)
    check_product([replace(rows, to_floats=decode), packed_rows("q4_0", 24, 128)], 3)


@loop_over("kind", ["rms_norm", "silu_and_mul"])
def test_prologues_precede_products(kind: str) -> None:
    matrix, weight, _ = load(packed_rows("q4_1", 72, 128))
    prologue = Prologue(kind, torch.linspace(0.5, 2, 128) if kind == "rms_norm" else None, eps=1e-5)
    x = random(5, 128 if kind == "rms_norm" else 256)
    assert_close(make_linear(matrix, None, prologue)(x), apply_prologue(x, prologue) @ weight.t())


@loop_over("name", [*FORMATS, "f32"])
def test_embeddings_are_rows(name: str) -> None:
    matrix, weight, _ = load(packed_rows(name, 70, 512))
    ids = torch.tensor([69, 0, 64, 3])
    torch.testing.assert_close(products.make_embedding(matrix)(ids), weight[ids], rtol=1e-6, atol=1e-9)


@loop_over("name", [*FORMATS, "q4_0+order", "bf16", "q5_k"])
def test_sizes_of_matrices_are_known_before(name: str) -> None:
    rows = [packed_rows(name.removesuffix("+order"), out, 512, seed=out) for out in (70, 10)]
    if name.endswith("+order"):
        order = np.arange(512, dtype=np.int32)
        rows = [replace(each, format=name, input_order=order) for each in rows]
    matrix, _, _ = load(*rows)
    tensors = [getattr(part, each, None) for part in matrix.parts for each in matrices.DeviceMatrix.__slots__]
    tensors += [part for part in matrix.parts if isinstance(part, torch.Tensor)]
    found = sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
    assert found == weight_bytes([(name, 70), (name, 10)], 512, 4)


@loop_over("name", ["mxfp4", "f8_e4m3"])
def test_scales_that_overflow_are_an_error(name: str) -> None:
    rows = packed_rows(name, 4, 128)
    if name == "mxfp4":
        rows.rows[2, 0] = 129
    else:
        rows.rows[2, 128:] = np.array([-129.0], np.float32).view(np.uint8)
    with pytest.raises(ModelLoadError, match=r"m0\.weight in .* has a scale above .* use --kernels torch"):
        load(rows)


@loop_over(("inputs", "num_rows"), [(96, 3), (300, 20)])
def test_floats_may_have_own_products(inputs: int, num_rows: int) -> None:
    matrix, weight, _ = load(packed_rows("f32", 70, inputs))
    layer = products.make_linear(matrix, None, NO_PROLOGUE, make_prologue, has_fixed_order=True)
    x = random(num_rows, inputs)
    assert_close(layer(x), x @ weight.t())
    assert torch.equal(layer(x[1:2]), layer(x)[1:2])


def assert_rows_do_not_depend_on_the_batch(layer: Any, x: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Compare the bits of rows in all, alone, and in random batches of the sizes."""
    rng = np.random.default_rng(0)
    expected = layer(x)
    batches = [torch.tensor([row]) for row in rng.choice(len(x), 3, replace=False)]
    batches += [torch.from_numpy(rng.permutation(len(x))[:size]) for size in sizes]
    for batch in batches:
        assert torch.equal(layer(x[batch]), expected[batch]), f"{len(batch)} rows"


def multiply_as_tensor_cores(
    _: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, input_precision: Any, max_num_imprecise_acc: int
) -> TensorHandle:
    """A chain of instructions that add the products of 16 inputs each, in their order, and round once."""
    sums = d.data
    for first in range(0, a.data.shape[1], 16):
        products = a.data[:, first : first + 16].astype(np.float64) @ b.data[first : first + 16].astype(np.float64)
        sums = (sums + products).astype(np.float32)
    return TensorHandle(sums, d.dtype.scalar)


@pytest.fixture
def _has_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply_as_tensor_cores)
    monkeypatch.setattr(products, "ONE_SIZE", False)


@pytest.mark.usefixtures("_has_tensor_cores")
@loop_over(("name", "inputs"), [("u4_g32", 1024), ("int8", 1024), ("q4_k", 512), ("q6_k", 512)])
def test_bits_of_products_do_not_depend_on_the_batch(name: str, inputs: int) -> None:
    """The sizes have tiles of all sizes, with split sums and without."""
    matrix, _, _ = load(packed_rows(name, 40, inputs))
    layer = make_linear(matrix, random(40, seed=1))
    assert_rows_do_not_depend_on_the_batch(layer, random(66, inputs), (7, 17, 65))


@pytest.mark.usefixtures("_has_tensor_cores")
def test_bits_of_mixtures_do_not_depend_on_the_batch() -> None:
    mixture, _ = make_mixture({"up": "q4_0", "down": "q8_0"}, True, "silu_and_mul")
    assert_rows_do_not_depend_on_the_batch(mixture, random(90, HIDDEN), (7, 40, 64))


COMPILED = """
import re, triton
from triton.backends.compiler import GPUTarget
from chairlift.kernels.triton.products import variants
for name, launch in variants():
    if name in ("q4_k 4096x4096, 16 rows", "q4_k 4096x4096, 65 rows", "q4_k 4096x28672, 64 rows"):
        kernel = launch.kernel
        types = iter(launch.types)
        signature = {n: "constexpr" if n in launch.constants else next(types) for n in kernel.arg_names}
        hints = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t.startswith("*")}
        constants = {(kernel.arg_names.index(n),): value for n, value in launch.constants.items()}
        source = triton.compiler.ASTSource(kernel, signature, constants, hints)
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        found = re.findall("mma.sync[^ ]*|wgmma[^ ]*|tcgen05[^ ]*", compiled.asm["ptx"])
        found += re.findall("kWidth = [0-9]", compiled.asm["ttgir"])
        print(launch.constants["ROWS"], *sorted(set(found)), sep=",")
"""


def test_tiles_of_all_sizes_have_the_same_instruction() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    lines = [line.split(",", 1) for line in run.stdout.splitlines()]
    assert {rows for rows, _ in lines} == {"16", "32", "64"}
    assert {names for _, names in lines} == {"kWidth = 4,mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}


class Experts(Parts):
    """A `Weights` whose matrices have their format by the end of their name, and whose vectors are random."""

    def __init__(self, formats: dict[str, str]) -> None:
        self._formats = formats

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        return packed_rows(self._formats[name.split(".")[1]], *shape, seed=sum(name.encode()))

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return random(*shape, seed=sum(name.encode()))


def make_mixture(formats: dict[str, str], has_bias: bool, activation: str, num_experts: int = 5) -> tuple[Any, Any]:
    """A mixture of Triton kernels, and the reference with the same values."""
    weights, loader = Experts({"router": "f32", **formats}), matrices.DeviceMatrixLoader()

    def matrix(name: str, out: int, size: int) -> tuple[LoadedMatrix, LoadedMatrix]:
        bias = weights.tensor(f"{name}.bias", (out,)) if has_bias else None
        rows = weights.packed(f"{name}.weight", (out, size))
        dense = torch.from_numpy(rows.to_floats(rows.rows))
        return LoadedMatrix(loader.load(weights, [(name, out)], size), bias), LoadedMatrix(dense, bias)

    router = matrix("0.router", num_experts, HIDDEN)
    ups = [matrix(f"{i}.up", 2 * INNER, HIDDEN) for i in range(num_experts)]
    downs = [matrix(f"{i}.down", HIDDEN, INNER) for i in range(num_experts)]
    norm = Prologue("rms_norm", torch.linspace(0.5, 2, HIDDEN), eps=1e-5)
    both = [
        Mixture(norm, router[i], [(u[i], d[i]) for u, d in zip(ups, downs, strict=True)], activation, ROUTING)
        for i in range(2)
    ]
    return experts.make_mixture(both[0], make_linear, make_prologue), ReferenceMixture(both[1])


HIDDEN, INNER = 96, 64
ROUTING = ExpertRouting(2, "chosen")


@loop_over(("name", "has_bias"), [("mxfp4", True), ("q4_0", False), ("f32", True)])
@loop_over("num_rows", [1, 5, 40])
def test_mixtures_equal_the_reference(name: str, has_bias: bool, num_rows: int) -> None:
    activation = "swigluoai_and_mul" if has_bias else "silu_and_mul"
    fast, slow = make_mixture({"up": name, "down": name}, has_bias, activation)
    assert isinstance(fast, experts.TritonMixture)
    x = random(num_rows, HIDDEN)
    assert_close(fast(x), slow(x))


def test_rows_are_sorted_by_expert_in_tiles() -> None:
    chosen = torch.tensor([[3, 1], [3, 0], [3, 1], [1, 3]])
    found = experts.sort_rows(chosen, 5, 2)
    assert found.order.tolist() == [3, 1, 5, 6, 0, 2, 4, 7]
    assert found.tiles.tolist()[:5] == [[0, 0, 1], [1, 1, 4], [1, 3, 4], [3, 4, 8], [3, 6, 8]]
    assert all(first >= end for _, first, end in found.tiles.tolist()[5:])
    assert len(found.tiles) == 5 + 4


@loop_over(("name", "parts"), [("f32", (64,)), ("q4_0", (70, 130, 40))])
def test_adapters_equal_those_of_torch(name: str, parts: tuple[int, ...]) -> None:
    matrix, _, _ = load(*(packed_rows(name, out, 96, seed=out) for out in parts))
    lora = LoraAdapters(3, 20, torch.float32, CPU)
    layer = lora.layer([(f"m{i}", out) for i, out in enumerate(parts)], 96)
    norm = Prologue("rms_norm", torch.linspace(0.5, 2, 96), eps=1e-5)
    base = make_linear(matrix, None, norm)
    fast = adapters.AdapterMaker().add_lora(base, layer)
    slow = AdaptedLinear(base, make_prologue(norm), layer)
    x, residual = random(5, 96), random(5, sum(parts), seed=3)
    for lora_id, rank in ((1, 20), (2, 3), (3, 17), (4, 1)):
        if lora_id == 4:
            lora.unload(1)
        names = [f"m{i}" for i in range(len(parts)) if (i + lora_id) % 3]
        lora.load(lora_id, {f: (random(rank, 96), random(rank, parts[int(f[1])], seed=1)) for f in names})
        if lora_id > 1:
            lora.batch.set_slots(np.array([0, -1, lora.slot_of(lora_id), 1, 1]))
            assert_close(fast(x, residual.clone()), slow(x, residual.clone()))
    out = torch.empty(len(x), sum(parts) + 1)[:, 1:]
    assert fast(x, out=out) is out
    assert_close(out, slow(x))
    assert torch.equal(fast(x), out)
    lora.batch.set_slots(np.array([1]))
    assert name == "f32" or torch.equal(fast(x[3:4]), out[3:4])
