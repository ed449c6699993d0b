"""Native products against `quantized_linear` and plain ones, on every instruction set of the CPU.

A native layer with the identity matrix in float32 returns exactly the result of its prologue. Prologues are therefore
compared with the reference separately, and products with the exact rows that they multiply, so that two results differ
only by the rounding of float32 sums.
"""

from __future__ import annotations

import itertools
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.kernels.activations import GATED_SUFFIX, NativePrologueKind
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.formats import ROUNDED
from chairlift.kernels.cpu.row_buffers import rows_of
from chairlift.kernels.interface import Prologue
from chairlift.kernels.kernel_set import KernelsUnavailableError
from chairlift.kernels.weight_formats import BLOCKS, BYTES_PER_INPUT, FLOATS, GROUPED, SUPER_BLOCK, ZERO_POINTS
from chairlift.loading.block_rows import decode_rows
from support import reference_kernels as reference
from support.case_loop import loop_over
from support.ggml_blocks import HALVES, random_blocks, random_rows
from support.native import ROUNDING_TO_BF16
from support.quantized_products import KINDS, quantized_linear

try:
    NATIVE = load()
except KernelsUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

FORMATS = sorted(BYTES_PER_INPUT)
SUPER_FORMATS = ("iq4_xs", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
EPS = 1e-5
XIELU = (0.4, -0.3, 0.5, -1e-6)


def sizes(largest: int, rare: int) -> st.SearchStrategy[int]:
    """Sizes up to the largest, and one in about six is the rare one, which takes longer than all others."""
    return st.integers(1, largest * 6 // 5).map(lambda size: size if size <= largest else rare)


ROWS, INPUTS, OUTPUTS = sizes(40, rare=150), sizes(300, rare=2100), st.integers(1, 120)


@pytest.fixture(scope="module", autouse=True)
def two_threads(isa: str, same_threads: None) -> None:
    NATIVE.set_num_threads(2)


def width(kind: NativePrologueKind, in_features: int) -> int:
    return 2 * in_features if kind.endswith(GATED_SUFFIX) else in_features


def make_prologue(kind: NativePrologueKind, in_features: int) -> Prologue:
    is_norm = kind in ("rms_norm", "layer_norm")
    weight, bias = torch.randn(2, in_features)
    parameters = XIELU if kind == "xielu" else (0.7,) if kind == "silu_and_mul" else ()
    norm_bias = bias if kind == "layer_norm" else None
    return Prologue(kind, weight if is_norm else None, norm_bias, EPS if is_norm else 0.0, parameters)


def make_rows(num_rows: int, size: int) -> torch.Tensor:
    """Random values like activations: a few columns and a few values are much larger than the others."""
    x = torch.randn(num_rows, size)
    x[:, torch.rand(size) < 0.02] *= 20
    x[torch.rand(num_rows, size) < 0.02] *= 30
    return x


def allowed_inputs(kind: str, in_features: int) -> int:
    """The next larger number of inputs that a matrix of the format may have."""
    unblocked = kind in ROUNDED or kind == "f8_e4m3"
    block = SUPER_BLOCK if kind in SUPER_FORMATS else 1 if unblocked else 128 if kind == "u4_g128" else 32
    return -(-in_features // block) * block


def pack(kind: str, weight: torch.Tensor) -> Any:
    """A matrix of these weights; of random blocks in formats to which floats cannot be rounded."""
    matrix = NATIVE.PackedMatrix(kind, *weight.shape)
    if kind in ROUNDED:
        matrix.pack_floats(0, weight.numpy())
    else:
        seed = int(torch.randint(1 << 30, (1,)))
        matrix.pack_blocks(0, random_rows(kind, *weight.shape, seed))
    return matrix


def multiply(
    matrix: Any,
    x: torch.Tensor,
    prologue: Prologue,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    vectors = [None if v is None else v.numpy() for v in (bias, prologue.weight, prologue.bias)]
    linear = NATIVE.FusedLinear([matrix], vectors[0], prologue.kind, *vectors[1:], prologue.eps, prologue.parameters)
    out = torch.empty(len(x), matrix.out_features) if residual is None else residual.clone()
    linear(x.data_ptr(), x.stride(0), len(x), out.data_ptr(), out.stride(0), residual is not None)
    return out


def prepared(x: torch.Tensor, prologue: Prologue, in_features: int) -> torch.Tensor:
    return multiply(pack("f32", torch.eye(in_features)), x, prologue)


def inputs_of_scale(has_super_blocks: bool) -> int:
    """The number of inputs that share a scale: with tiles a super-block, if the weights of the layer have one."""
    return SUPER_BLOCK if has_super_blocks and NATIVE.isa().startswith("amx") else 32


def reference_product(
    matrix: Any, y: torch.Tensor, kind: NativePrologueKind, group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of rows after their prologue, and the tolerance of float32 sums. `group` inputs share a scale, if a
    layer has other matrices too."""
    weight = torch.from_numpy(matrix.unpack(0, matrix.out_features))
    if matrix.format == "bf16" and NATIVE.isa() in ROUNDING_TO_BF16:
        y = y.bfloat16().float()
    if matrix.format in (*FLOATS, "f8_e4m3"):
        product = (y.double() @ weight.double().t()).float()
    else:
        own = inputs_of_scale(matrix.format in SUPER_FORMATS)
        has_powers = group is not None or own != SUPER_BLOCK
        product = quantized_linear(y, weight, None, kind, matrix.format == "int8", group or own, has_powers=has_powers)
    # A 4-bit weight is a multiple of its scale and a minimum, both of them up to twice as large as the largest weight.
    magnitude = y.abs().sum(1)[:, None] * weight.abs().amax(1)[None, :]
    return product, 2**-23 * (8 + matrix.in_features / 8) * magnitude


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMATS), st.sampled_from(KINDS), ROWS, INPUTS, OUTPUTS, st.integers(0, 2**32))
def test_products_equal_the_reference(
    name: str, kind: NativePrologueKind, num_rows: int, in_features: int, out_features: int, seed: int
) -> None:
    torch.manual_seed(seed)
    in_features = allowed_inputs(name, in_features)
    matrix, prologue = pack(name, torch.randn(out_features, in_features)), make_prologue(kind, in_features)
    x = make_rows(num_rows, width(kind, in_features))
    bias, residual = torch.randn(out_features), torch.randn(num_rows, out_features)
    product, tolerance = reference_product(matrix, prepared(x, prologue, in_features), kind)
    for b, r in ((None, None), (bias, None), (None, residual), (bias, residual)):
        expected = product + (0 if b is None else b) + (0 if r is None else r)
        error = (multiply(matrix, x, prologue, b, r) - expected).abs()
        assert (error <= tolerance + 1e-6 * (1 + expected.abs())).all()


@loop_over("kind", KINDS)
@loop_over("in_features", [1, 7, 8, 9, 64, 100])
def test_prologues_equal_the_reference(kind: NativePrologueKind, in_features: int) -> None:
    torch.manual_seed(in_features)
    prologue, x = make_prologue(kind, in_features), make_rows(11, width(kind, in_features))
    ours, expected = prepared(x, prologue, in_features), reference.apply_prologue(x, prologue)
    torch.testing.assert_close(ours, expected, rtol=3e-6, atol=3e-6 * float(expected.abs().max()))


def test_activations_near_zero_and_far_from_it() -> None:
    size = torch.cat((torch.logspace(-8, 1, 200), torch.tensor([30.0, 100.0, 1e4])))
    x = torch.cat((size, -size, torch.zeros(1)))[None]
    for prologue in (Prologue("gelu"), Prologue("xielu", parameters=XIELU)):
        expected = reference.apply_prologue(x.double(), prologue).float()
        error = (prepared(x, prologue, x.shape[1]) - expected).abs()
        assert (error <= 2e-6 * expected.abs() + 2e-7 * x.abs()).all()


def test_parameters_of_activations_are_checked() -> None:
    matrix = pack("f32", torch.eye(4))
    for kind, count in (("xielu", 3), ("silu_and_mul", 2), ("silu", 1), ("none", 1)):
        with pytest.raises(ValueError, match="parameters must be four of xielu, at most one of gated"):
            NATIVE.FusedLinear([matrix], None, kind, parameters=[0.5] * count)


def test_silu_of_large_values() -> None:
    gate = torch.tensor([[-1e30, -200.0, -100.0, -30.0, 0.0, 30.0, 100.0, 1e30]])
    ours = prepared(torch.cat((gate, torch.ones_like(gate)), dim=1), Prologue("silu_and_mul"), 8)
    torch.testing.assert_close(ours, torch.nn.functional.silu(gate), rtol=1e-5, atol=1e-8)


def test_swigluoai_of_large_values() -> None:
    x = torch.tensor([[-1e30, -200.0, -3.0, 6.9, 7.1, 1e30, 3.0, 3.0, 0.5, 2.0, -1.0, -1.0, -1.0, 9.0, -7.5, 1e30]])
    ours = prepared(x, Prologue("swigluoai_and_mul"), 8)
    torch.testing.assert_close(ours, reference.activate(x, "swigluoai_and_mul"), rtol=1e-5, atol=1e-8)
    assert ours[0, 6].item() == pytest.approx(-6 * ours[0, 7].item() / 8)


@loop_over(("name", "outlier"), [("q8_0", 3000.0), ("int8", 300.0)])
def test_outliers_do_not_reduce_the_precision_of_other_inputs(name: str, outlier: float) -> None:
    """Without outliers, one input a thousand times larger would leave no bits for the others of its group."""
    weight, x = torch.randn(16, 64), torch.randn(1, 64)
    x[0, 40] = outlier
    matrix = pack(name, weight)
    exact = x @ torch.from_numpy(matrix.unpack(0, 16)).t()
    torch.testing.assert_close(multiply(matrix, x, Prologue("none")), exact, rtol=0, atol=0.3)


def _unusual_rows() -> torch.Tensor:
    """Rows of one magnitude in each 256 inputs, outliers at the ends of groups, only outliers, values near 1e-30."""
    x = torch.randn(8, 512)
    x[0] = x[0].sign() * torch.tensor([5.0, 0.8]).repeat_interleave(256)
    x[1] = x[1].sign() * torch.tensor([7.0, 0.41]).repeat_interleave(256)
    x[2, [0, 31, 32, 255, 256, 511]] = 100.0
    x[3, torch.arange(512) % 32 != 0] = 0
    x[4] *= 1e-31
    x[5:] *= torch.tensor([1e-30, 2e-30, 1e-29])[:, None]
    x[5:, 32:] = 0
    return x


@loop_over("name", [*SUPER_FORMATS, "q4_0", "q5_1", "q8_0", "u8_g32"])
def test_unusual_rows_equal_the_reference_and_have_the_same_bits_in_any_batch(name: str) -> None:
    torch.manual_seed(0)
    x, matrix = _unusual_rows(), pack(name, torch.randn(40, 512))
    expected, tolerance = reference_product(matrix, x, "none")
    alone = torch.cat([multiply(matrix, row, Prologue("none")) for row in x.split(1)])
    assert ((alone - expected).abs() <= tolerance + 1e-36).all()
    for num_rows in (17, 70):
        together = multiply(matrix, x.repeat(9, 1)[:num_rows], Prologue("none"))
        assert torch.equal(together, alone.repeat(9, 1)[:num_rows])


@loop_over("name", [*SUPER_FORMATS, "q4_0", "q5_1", "q8_0", "u8_g32"])
def test_rows_that_are_not_finite_change_no_other_row(name: str) -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(90, 512), pack(name, torch.randn(40, 512))
    expected = multiply(matrix, x, Prologue("none"))
    damaged = x.clone()
    for row, (value, inputs) in enumerate(
        itertools.product((torch.nan, torch.inf), (0, 31, 255, slice(None, None, 32)))
    ):
        damaged[row * 5, inputs] = value
    out = multiply(matrix, damaged, Prologue("none"))
    is_finite = damaged.isfinite().all(1)
    assert torch.equal(out[is_finite], expected[is_finite])
    assert not out[~is_finite].isfinite().any()


@loop_over("name", FORMATS)
def test_zeros_give_the_bias(name: str) -> None:
    in_features = allowed_inputs(name, 40)
    matrix, bias = pack(name, torch.randn(5, in_features)), torch.randn(5)
    assert torch.equal(multiply(matrix, torch.zeros(3, in_features), Prologue("none"), bias), bias.expand(3, 5))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FORMATS), st.sampled_from(KINDS), ROWS, INPUTS, OUTPUTS, st.integers(1, 4), st.integers(0, 2**32)
)
def test_rows_threads_and_order_change_no_bit(
    name: str, kind: NativePrologueKind, num_rows: int, in_features: int, out_features: int, num_threads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    in_features = allowed_inputs(name, in_features)
    matrix, prologue = pack(name, torch.randn(out_features, in_features)), make_prologue(kind, in_features)
    x, residual = make_rows(num_rows, width(kind, in_features)), torch.randn(num_rows, out_features)
    together = multiply(matrix, x, prologue, None, residual)
    cut = int(torch.randint(0, num_rows + 1, ()))
    try:
        NATIVE.set_num_threads(num_threads)
        NATIVE.set_tile_order(seed)
        parts = [multiply(matrix, x[s], prologue, None, residual[s]) for s in (slice(cut), slice(cut, None))]
        assert torch.equal(torch.cat(parts), together)
        alone = slice(num_rows - 1, None)
        assert torch.equal(multiply(matrix, x[alone], prologue, None, residual[alone]), together[alone])
    finally:
        NATIVE.set_num_threads(2)
        NATIVE.set_tile_order(0)


def test_an_instruction_for_products_of_integers_changes_no_bit(isa: str) -> None:
    without = {"avx512-vnni": "avx512", "avx-vnni": "avx2"} | dict.fromkeys(ROUNDING_TO_BF16, "avx512-vnni")
    if isa not in without:
        pytest.skip("has none, or nothing else")
    other = without[isa] if without[isa] in NATIVE.available_isas() else "avx2"
    torch.manual_seed(0)
    has_own_scales = SUPER_FORMATS if isa.startswith("amx") else ()
    integers = [*(name for name in BLOCKS if name not in has_own_scales), "int8"]
    floats = ["f8_e4m3", "f16", "f32", *([] if isa in ROUNDING_TO_BF16 else ["bf16"])]
    for num_rows, in_features in itertools.product((1, 3, 4, 5, 13, 17, 45, 150), (40, 256, 2304)):
        names = [name for name in (*integers, *floats) if allowed_inputs(name, in_features) == in_features]
        x, matrices = make_rows(num_rows, in_features), [pack(name, torch.randn(40, in_features)) for name in names]
        ours = [multiply(matrix, x, Prologue("none")) for matrix in matrices]
        NATIVE.set_isa(other)
        theirs = [multiply(matrix, x, Prologue("none")) for matrix in matrices]
        NATIVE.set_isa(isa)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_tiles_add_bfloat16_products_in_the_order_of_the_instruction(isa: str) -> None:
    """Even and odd inputs of each 32 are two sums (TDPBF16PS). A product of two bfloat16 is exact in float32."""
    if not isa.startswith("amx"):
        pytest.skip("has no tiles")
    torch.manual_seed(0)
    x, weight = torch.randn(19, 96).bfloat16().float(), torch.randn(40, 96).bfloat16().float()
    expected = torch.zeros(19, 40)
    for first in range(0, 96, 32):
        sums = torch.zeros(2, 19, 40)
        for k in range(32):
            sums[k % 2] += x[:, first + k, None] * weight[None, :, first + k]
        expected += sums[0] + sums[1]
    assert torch.equal(multiply(pack("bf16", weight), x, Prologue("none")), expected)


def test_few_rows_of_bfloat16_have_the_bits_of_many(isa: str) -> None:
    """Denormal products, sums and operands too, which are zero in tiles."""
    torch.manual_seed(0)
    x = torch.randn(19, 96) * torch.logspace(-20, -17, 19)[:, None]
    weight = torch.randn(40, 96) * torch.logspace(-21, -18, 40)[:, None]
    x[:, ::7], weight[:, ::7] = 1e-39, 1.0
    assert ((x @ weight.T).abs() < torch.finfo(torch.float32).tiny).any()
    matrix = pack("bf16", weight)
    whole = multiply(matrix, x, Prologue("none"))
    for num_rows in (1, 2, 3):
        parts = [multiply(matrix, part.contiguous(), Prologue("none")) for part in x.split(num_rows)]
        assert torch.equal(torch.cat(parts), whole)


@loop_over(("name", "in_features"), [("bf16", 4192), ("int8", 8256)])
def test_ranges_of_inputs_have_the_bits_of_all_inputs_at_once(isa: str, name: str, in_features: int) -> None:
    """So many inputs of 129 rows do not fit into a second-level cache of 2 MiB or less. The last task has one row."""
    torch.manual_seed(0)
    x, matrix, residual = torch.randn(129, in_features), pack(name, torch.randn(40, in_features)), torch.randn(129, 40)
    whole = multiply(matrix, x, Prologue("none"), None, residual)
    parts = zip(x.split(43), residual.split(43), strict=True)
    few = [multiply(matrix, part.contiguous(), Prologue("none"), None, old) for part, old in parts]
    assert torch.equal(torch.cat(few), whole)


@loop_over("num_rows", [1, 3, 40, 65])
def test_layers_of_one_call_have_the_bits_of_their_own(isa: str, num_rows: int) -> None:
    """Inputs and outputs are parts of rows, and all but the first input are of one matrix."""
    torch.manual_seed(0)
    layers = [NATIVE.FusedLinear([pack(name, torch.randn(40, 64))]) for name in ("int8", "q8_0", "bf16", "q8_0", "f32")]
    x, out = torch.randn(num_rows, 4 * 64), torch.full((num_rows, 5 * 48), 7.0)
    xs = [torch.randn(num_rows, 64), *x.chunk(4, dim=1)]
    parts = [part[:, :40] for part in out.chunk(5, dim=1)]
    NATIVE.multiply_each(layers, [rows_of(part) for part in xs], [rows_of(part) for part in parts], num_rows)
    for layer, part, found in zip(layers, xs, parts, strict=True):
        expected = torch.empty(num_rows, 40)
        layer(*rows_of(part), num_rows, *rows_of(expected), False)
        assert torch.equal(found, expected)
    assert all((part[:, 40:] == 7).all() for part in out.chunk(5, dim=1))
    with pytest.raises(ValueError, match="same number of entries"):
        NATIVE.multiply_each(layers, [rows_of(x)], [rows_of(part) for part in parts], num_rows)


@loop_over(("name", "step"), [("f32", 0.0), ("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 0.6 / 127), ("int8", 0.6 / 127)])
def test_packed_floats_are_rounded_to_the_format(name: str, step: float) -> None:
    weight = torch.randn(37, 70)
    error = (torch.from_numpy(pack(name, weight).unpack(0, 37)) - weight).abs()
    assert (error <= step * weight.abs().amax(1, keepdim=True)).all()


@loop_over("in_features", [1, 33, 512])
def test_int8_rounds_to_nearest_and_ties_to_even(in_features: int) -> None:
    weight = np.random.default_rng(0).standard_normal((37, in_features), np.float32)
    weight[1] = 0
    weight[2:19] = np.round(weight[2:19] * 64) / 2
    weight[2:19, 0] = 127  # a scale of 1, so that half of the values are ties
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    numbers = np.rint(weight * np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)).astype(np.int8)
    expected = NATIVE.PackedMatrix("int8", 37, in_features)
    expected.pack_blocks(0, np.concatenate((numbers.view(np.uint8), scale.view(np.uint8)), axis=1))
    packed = pack("int8", torch.from_numpy(weight)).unpack(0, 37)
    assert packed.tobytes() == expected.unpack(0, 37).tobytes() == (scale * numbers).tobytes()


@loop_over("name", FORMATS)
def test_packed_values_do_not_depend_on_the_pieces(name: str) -> None:
    """Rows are equal if packed in pieces, unpacked in other pieces, or gathered by id."""
    in_features = allowed_inputs(name, 70)
    again = NATIVE.PackedMatrix(name, 37, in_features)
    if name in ROUNDED:
        rows, write = torch.randn(37, in_features).numpy(), again.pack_floats
    else:
        rows, write = random_rows(name, 37, in_features), again.pack_blocks
    for first, end in ((20, 37), (0, 1), (1, 20)):
        write(first, np.ascontiguousarray(rows[first:end]))
    once = NATIVE.PackedMatrix(name, 37, in_features)
    (once.pack_floats if name in ROUNDED else once.pack_blocks)(0, rows)
    assert np.array_equal(again.unpack(0, 37), once.unpack(0, 37))
    parts = np.concatenate([again.unpack(0, 15), again.unpack(15, 22)])
    assert np.array_equal(parts, again.unpack(0, 37))
    ids = np.array([36, 0, 5, 5, 16], np.int64)
    found: npt.NDArray[np.float32] = np.empty((5, in_features), np.float32)
    again.gather(ids.ctypes.data, 5, found.ctypes.data)
    assert np.array_equal(found, parts[ids])


@loop_over("name", sorted(GROUPED))
@loop_over("in_features", [256, 2304])
def test_blocks_keep_their_values_and_their_size(name: str, in_features: int) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    rows = random_blocks(kind, 19, in_features)
    matrix = NATIVE.PackedMatrix(name, 19, in_features)
    matrix.pack_blocks(0, rows)
    assert np.array_equal(matrix.unpack(0, 19), gguf.dequantize(rows, kind))
    assert matrix.num_bytes <= 1.06 * rows.nbytes * 48 / 19, "19 rows are stored as 48"


@loop_over("num_rows", [1, 7, 45])
@loop_over("names", [("q4_k", "q6_k", "q2_k"), ("q4_0", "q8_0", "q5_1")])
def test_matrices_in_several_formats_are_multiplied_as_one(names: tuple[str, ...], num_rows: int) -> None:
    torch.manual_seed(0)
    sizes = [100, 33, 70]
    x, bias, residual = make_rows(num_rows, 256), torch.randn(sum(sizes)), torch.randn(num_rows, sum(sizes))
    matrices = [pack(name, torch.randn(out, 256)) for name, out in zip(names, sizes, strict=True)]
    linear = NATIVE.FusedLinear(matrices, bias.numpy(), "none", None, None, 0.0)
    out = residual.clone()
    linear(x.data_ptr(), 256, num_rows, out.data_ptr(), sum(sizes), True)
    own = zip(matrices, bias.split(sizes), residual.split(sizes, dim=1), strict=True)
    parts = [multiply(part, x, Prologue("none"), vector, rest.contiguous()) for part, vector, rest in own]
    assert torch.equal(out, torch.cat(parts, dim=1))


@loop_over("num_rows", [1, 7, 45, 70])
def test_beside_a_matrix_with_super_blocks_all_inputs_share_their_scales(num_rows: int) -> None:
    torch.manual_seed(0)
    x, matrices = make_rows(num_rows, 512), [pack(name, torch.randn(20, 512)) for name in ("q4_k", "q5_1", "q8_0")]
    linear = NATIVE.FusedLinear(matrices, None, "none", None, None, 0.0)
    out = torch.empty(num_rows, 60)
    linear(x.data_ptr(), 512, num_rows, out.data_ptr(), 60, False)
    for matrix, part in zip(matrices, out.split(20, dim=1), strict=True):
        expected, tolerance = reference_product(matrix, x, "none", inputs_of_scale(True))
        assert ((part - expected).abs() <= tolerance + 1e-6 * (1 + expected.abs())).all()


@loop_over("name", sorted(GROUPED.keys() - {"mxfp4"}))
def test_scales_that_are_not_finite_damage_only_their_output(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    matrix, rows = NATIVE.PackedMatrix(name, 2, 256), random_blocks(kind, 2, 256)
    offset = HALVES.get(kind.name, (0,))[0]
    rows[1, offset : offset + 2] = np.array([np.nan], np.float16).view(np.uint8)
    matrix.pack_blocks(0, rows)
    out = multiply(matrix, torch.ones(25, 256), Prologue("none"))
    expected = gguf.dequantize(rows[:1], kind).sum()
    assert torch.isnan(out[:, 1]).all()
    assert torch.allclose(out[:, 0], torch.tensor(expected), rtol=1e-3, atol=1e-4)


@loop_over("name", [*ZERO_POINTS, "int8", "f8_e4m3"])
@loop_over("in_features", [128, 384])
def test_packed_rows_keep_their_values_and_their_size(name: str, in_features: int) -> None:
    if name == "int8":
        scales = np.random.default_rng(0).uniform(-1, 1, (48, 1)).astype(np.float32).view(np.uint8)
        rows = np.concatenate((random_rows("f8_e4m3", 48, in_features)[:, :in_features], scales), axis=1)
    else:
        rows = random_rows(name, 48, in_features)
    matrix = NATIVE.PackedMatrix(name, 48, in_features)
    matrix.pack_blocks(0, rows)
    assert np.array_equal(matrix.unpack(0, 48), decode_rows(rows, name, in_features, None))
    assert matrix.num_bytes <= 1.02 * rows.nbytes


def ordered_matrix(order: list[int], name: str = "f32", out_features: int = 4, seed: int = 0) -> Any:
    """A random matrix with its own order of inputs."""
    torch.manual_seed(seed)
    matrix = pack(name, torch.randn(out_features, len(order)))
    matrix.set_input_order(order)
    return matrix


@loop_over("num_rows", [1, 6, 45])
@loop_over("name", ["q4_0", "u4_g128", "q8_0", "f32", "f8_e4m3"])
def test_inputs_are_gathered_in_the_order_of_the_matrix(name: str, num_rows: int) -> None:
    order, in_order = torch.randperm(256), list(range(256))
    plain, ordered = ordered_matrix(in_order, name, 70), ordered_matrix(order.tolist(), name, 70)
    values, restored = plain.unpack(0, 70), np.empty((70, 256), np.float32)
    restored[:, order.numpy()] = values
    assert np.array_equal(ordered.unpack(0, 70), restored)
    x = make_rows(num_rows, 512)
    rows = prepared(x, Prologue("silu_and_mul"), 256)
    expected = multiply(plain, rows[:, order].contiguous(), Prologue("none"))
    assert torch.equal(multiply(ordered, rows, Prologue("none")), expected)
    fused, unfused = multiply(ordered, x, Prologue("silu_and_mul")), torch.from_numpy(restored)
    assert relative(fused, rows @ unfused.t()) < 0.02


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


@loop_over(
    ("call", "message"),
    [
        (lambda: NATIVE.PackedMatrix("q1_0", 4, 4), "format must be one of q2_k, .*, f32, got 'q1_0'"),
        (lambda: NATIVE.PackedMatrix("q4_k", 4, 64), "in_features must be a multiple of 256 in format q4_k, got 64"),
        (
            lambda: NATIVE.PackedMatrix("q6_k", 4, 256).pack_floats(0, np.zeros((1, 256), np.float32)),
            "floats cannot be rounded to q6_k: use pack_blocks, or one of q4_0",
        ),
        (
            lambda: NATIVE.FusedLinear([NATIVE.PackedMatrix("f32", 4, 4), NATIVE.PackedMatrix("int8", 4, 4)]),
            "formats f32 and int8 cannot be multiplied as one layer",
        ),
        (
            lambda: NATIVE.FusedLinear([NATIVE.PackedMatrix("f32", 4, 4), NATIVE.PackedMatrix("f32", 4, 8)]),
            "must have the same in_features",
        ),
        (lambda: NATIVE.PackedMatrix("f32", 0, 4), "at least one row and one column"),
        (
            lambda: NATIVE.PackedMatrix("f32", 4, 4).pack_floats(2, np.zeros((3, 4), np.float32)),
            "rows 2 to 4 are outside the matrix, which has 4 rows",
        ),
        (
            lambda: NATIVE.PackedMatrix("f32", 4, 4).pack_floats(0, np.zeros((1, 5), np.float32)),
            "in_features=4 .* got 5",
        ),
        (
            lambda: NATIVE.PackedMatrix("q8_0", 4, 32).pack_blocks(0, np.zeros((1, 33), np.uint8)),
            "row_bytes=34 .* got 33",
        ),
        (lambda: NATIVE.PackedMatrix("int8", 4, 4).pack_blocks(0, np.zeros((1, 4), np.uint8)), "row_bytes=8 .* got 4"),
        (
            lambda: NATIVE.PackedMatrix("f8_e4m3", 4, 4).pack_floats(0, np.zeros((1, 4), np.float32)),
            "floats cannot be rounded to f8_e4m3",
        ),
        (lambda: NATIVE.PackedMatrix("u4_g128", 4, 64), "in_features must be a multiple of 128 in format u4_g128"),
        (lambda: NATIVE.PackedMatrix("f32", 4, 3).set_input_order([0, 1, 1]), "each of 0 to 2 once"),
        (lambda: NATIVE.PackedMatrix("f32", 4, 3).set_input_order([0, 1, 3]), "each of 0 to 2 once"),
        (
            lambda: NATIVE.FusedLinear([ordered_matrix([0, 1, 2, 3]), ordered_matrix([3, 2, 1, 0])]),
            "must have the same order of inputs",
        ),
        (lambda: NATIVE.PackedMatrix("f32", 4, 4).unpack(-1, 2), "rows -1 to 0 are outside the matrix"),
        (
            lambda: NATIVE.FusedLinear([NATIVE.PackedMatrix("f32", 4, 4)], None, "mish"),
            "prologue must be one of none, .* got 'mish'",
        ),
        (
            lambda: NATIVE.FusedLinear([NATIVE.PackedMatrix("f32", 4, 4)], np.zeros(3, np.float32)),
            "bias must have out_features",
        ),
        (
            lambda: NATIVE.FusedLinear([NATIVE.PackedMatrix("f32", 4, 4)], None, "rms_norm"),
            "norm_weight must have in_features",
        ),
    ],
)
def test_arguments_out_of_range_are_rejected(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_pairs_of_bfloat16_are_added_in_ascending_order(isa: str) -> None:
    """The products of a pair are added one after the other (VDPBF16PS). A product of two bfloat16 is exact."""
    if isa != "avx512-bf16":
        pytest.skip("has no such products")
    torch.manual_seed(0)
    x, weight = torch.randn(19, 96).bfloat16().float(), torch.randn(40, 96).bfloat16().float()
    orders = []
    for first in (0, 1):
        sums = torch.zeros(19, 40)
        for k in range(96):
            sums += x[:, k ^ first, None] * weight[None, :, k ^ first]
        orders.append(sums)
    product = multiply(pack("bf16", weight), x, Prologue("none"))
    assert any(torch.equal(product, sums) for sums in orders)
