"""A mixture of experts in a constant number of launches: rows are sorted by expert on the device, without the host.

The result of a row is the sum of its experts in the order of their scores, and so does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chairlift.kernels.grouped_mixture import GroupedMixture, route
from chairlift.kernels.interface import (
    NO_PROLOGUE,
    LinearKernel,
    LoadedMatrix,
    Mixture,
    MixtureKernel,
    Prologue,
    RowKernel,
)
from chairlift.kernels.triton.formats import num_tiles
from chairlift.kernels.triton.launch import Launch, aligned
from chairlift.kernels.triton.matrices import Matrix, part_inputs, part_outputs
from chairlift.kernels.triton.products import (
    FEW_ROWS,
    FLOAT,
    MANY_ROWS,
    MERGED,
    ProductShape,
    arrays_of,
    kind_of,
    make_linear,
    merge_launch,
    product_launch,
    product_variants,
    rows_per_tile,
)

MakePrologue = Callable[[Prologue], RowKernel]


def make_mixture(
    mixture: Mixture, make_set_linear: Callable[..., LinearKernel], make_prologue: MakePrologue
) -> MixtureKernel:
    """Implement `Kernels.make_mixture`. Experts in several formats are computed one after the other.

    Args:
        make_set_linear: `Kernels.make_linear` of the set.
        make_prologue: returns the kernel of a norm or activation.
    """
    experts = list(mixture.experts)
    pairs = [(up.matrix.parts, down.matrix.parts) for up, down in experts]
    if len({tuple(tuple(map(kind_of, parts)) for parts in pair) for pair in pairs}) == 1 and all(
        len(parts) == 1 and getattr(parts[0], "input_order", None) is None for pair in pairs for parts in pair
    ):
        return TritonMixture(replace(mixture, experts=experts), make_prologue)
    return GroupedMixture(replace(mixture, experts=experts), make_set_linear, make_prologue)


@dataclass(frozen=True, slots=True, eq=False)
class SortedRows:
    """The pairs of rows and their experts, sorted by expert and divided into tiles of rows with the same expert.

    Attributes:
        order: int32 [T * k], the pairs: row * k + the place of the expert among those of the row.
        tiles: int32 [n, 3], see `product_kernels.multiply`. Tiles after the last one have no rows.
    """

    order: torch.Tensor
    tiles: torch.Tensor


def sort_rows(chosen: torch.Tensor, num_experts: int, rows: int) -> SortedRows:
    """Sort the rows by their experts, int64 [T, k]. The number of tiles is that of the worst division."""
    flat = chosen.flatten()
    experts, order = torch.sort(flat, stable=True)
    bounds = torch.searchsorted(experts, torch.arange(num_experts + 1, device=flat.device))
    tile_ends = ((bounds.diff() + rows - 1) // rows).cumsum(0)
    tile = torch.arange(min(len(flat), num_experts) + len(flat) // rows, device=flat.device)
    expert = torch.searchsorted(tile_ends, tile, right=True).clamp(max=num_experts - 1)
    before = tile_ends[expert] - (bounds[expert + 1] - bounds[expert] + rows - 1) // rows
    end = bounds[expert + 1]
    first = torch.minimum(bounds[expert] + (tile - before) * rows, end)
    return SortedRows(order.int(), torch.stack((expert, first, end), 1).int())


class StackedExperts:
    """The products of all experts with the matrices of one projection.

    Args:
        chosen: the number of experts of a row.
        is_down: whether x has a row for each place in `SortedRows.order`, and the result a row for each pair.
    """

    def __init__(self, experts: Sequence[LoadedMatrix], chosen: int, is_down: bool) -> None:
        matrices: list[Matrix] = [each.matrix for each in experts]
        first = matrices[0].parts[0]
        self._arrays = _stack([arrays_of(matrix.parts[0]) for matrix in matrices])
        self._bias = None if experts[0].bias is None else torch.stack([_bias(each) for each in experts])
        self._outputs, self._is_down = part_outputs(first), is_down
        sizes = part_inputs(first), self._outputs, self._outputs
        has_bias = self._bias is not None
        self.shape = ProductShape(kind_of(first), *sizes, 0, first.dtype, has_bias, False, chosen, is_down)

    def __call__(self, x: torch.Tensor, rows: SortedRows, rows_per_tile: int) -> torch.Tensor:
        """Multiply each row by the matrix of its expert: [T * k, out], in float32 if `is_down`."""
        x, num_pairs = aligned(x), len(rows.order)
        out = x.new_empty((num_pairs, self._outputs), dtype=torch.float32 if self._is_down else x.dtype)
        bias = x if self._bias is None else self._bias
        grid = len(rows.tiles), num_tiles(self._outputs), 1
        product_launch(self.shape, rows_per_tile, is_split=False)(
            grid, x, *self._arrays, bias, x, out, rows.tiles, rows.order, num_pairs
        )
        return out


def _stack(arrays: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Stack the arrays of all experts; those that a format lacks are its values."""
    values = torch.stack([each[0] for each in arrays])
    rest = [
        values if arrays[0][index] is arrays[0][0] else torch.stack([each[index] for each in arrays])
        for index in range(1, 4)
    ]
    return values, *rest


def _bias(expert: LoadedMatrix) -> torch.Tensor:
    assert expert.bias is not None, "all experts have a bias or none"
    return expert.bias


class TritonMixture:
    """A mixture of experts whose matrices have the same format."""

    def __init__(self, mixture: Mixture, make_prologue: MakePrologue) -> None:
        router, experts = mixture.router, list(mixture.experts)
        self._norm = make_prologue(mixture.norm)
        router_norm = mixture.router_norm or NO_PROLOGUE
        self._router = make_linear(router.matrix, router.bias, router_norm, make_prologue, has_fixed_order=True)
        self._has_router_norm = mixture.router_norm is not None
        self._activation = make_prologue(Prologue(mixture.activation))
        self._options: tuple[Any, ...] = (mixture.routing, mixture.expert_scales, mixture.selection_bias)
        self._chosen, self._num_experts = mixture.routing.experts_per_token, len(experts)
        self._up = StackedExperts([up for up, _ in experts], self._chosen, is_down=False)
        self._down = StackedExperts([down for _, down in experts], self._chosen, is_down=True)

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        normed = self._norm(x)
        routed = x if routed is None else routed
        chosen, weights = route(self._router(routed if self._has_router_norm else normed), *self._options)
        rows = rows_per_tile(chosen.numel() // self._num_experts + 1, self._up.shape)
        places = sort_rows(chosen, self._num_experts, rows)
        sums = self._down(self._activation(self._up(normed, places, rows)), places, rows)
        out = torch.empty_like(normed, memory_format=torch.contiguous_format)
        width = out.shape[1]
        shape = ProductShape(FLOAT, width, width, width, 0, x.dtype)
        merge_launch(self._chosen, shape, has_factors=True)(
            (len(x), -(-width // MERGED)), sums, aligned(weights.float()), out, out, out
        )
        return out


def variants() -> Iterator[tuple[str, Launch]]:
    """The launches of mixtures of typical models."""
    sizes = {"gpt-oss-20b": ("mxfp4", 2880, 2880, 4), "Qwen3-30B-A3B": (FLOAT, 2048, 768, 8)}
    for model, (name, hidden, inner, chosen) in sizes.items():
        up = ProductShape(name, hidden, 2 * inner, 2 * inner, 0, torch.bfloat16, name == "mxfp4", False, chosen)
        down = replace(up, in_features=inner, out_features=hidden, width=hidden, is_scattered=True)
        for label, shape in (("up", up), ("down", down)):
            for rows in (rows_per_tile(count, shape) for count in (FEW_ROWS, MANY_ROWS)):
                yield f"{name} experts {model} {label}, {rows} rows", product_launch(shape, rows, is_split=False)
        yield from product_variants(f"router {model}", hidden, 128, FLOAT, torch.bfloat16)
        yield f"experts {model} sum", merge_launch(chosen, replace(down, has_bias=False), has_factors=True)
