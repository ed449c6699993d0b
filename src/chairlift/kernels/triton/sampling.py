"""The sampler in three launches: the maximum of each row, the weights of its tokens, and the draw.

All sums are of integers: the mass of a token is its weight in steps of 2**-44. So no sum depends on an order, and the
token of a row depends only on its logits, parameters and position. Draws differ from `worker/torch_sampling.py` only
where the uniform number is within rounding of the boundary between two tokens.

The smallest weight that top_k or top_p keeps is found by bisection of the bits of the weights, with three thresholds in
each pass over the row. It ends as soon as one token is left between its bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from chairlift.kernels.device_copy import to_device
from chairlift.kernels.sampling import Bits, IntArray, SamplingParameters, TokenSampler, top_logprobs
from chairlift.kernels.triton.launch import Launch, aligned
from chairlift.kernels.triton.rows import row_block

TILE = 8192
"""The logits that a program reads at a time."""

NUM_PARAMETERS = tl.constexpr(7)
"""int64 values of each row: is_random, top_k, key, position, and the bits of temperature, min_p (float32) and top_p."""

BITS_OF_ONE = tl.constexpr(0x3F800000)
MASS_OF_ONE = tl.constexpr(2.0**44)


@triton.jit
def _ordered(bits: tl.tensor) -> Any:
    """The bits of a float32 as an integer in the order of the floats, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _maxima(logits: tl.tensor, maxima: tl.tensor, VOCAB: tl.constexpr, TILE: tl.constexpr) -> None:
    """Write the largest value of a tile and its first token. NaN is the largest value, as in torch."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * VOCAB + tokens, mask=tokens < VOCAB, other=0.0)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(x != x, 0x7FFFFFFF, _ordered(bits)).to(tl.int64)
    best = tl.where(tokens < VOCAB, (order << 32) + (0x7FFFFFFF - tokens), -(1 << 63))
    tl.store(maxima + row * tl.num_programs(1) + tile, tl.max(best, 0))


@triton.jit
def _largest(maxima: tl.tensor, row: tl.tensor, NUM_TILES: tl.constexpr, TILES: tl.constexpr) -> Any:
    """The largest logit of a row, its first token, and whether it is finite."""
    tiles = tl.arange(0, TILES)
    best = tl.max(tl.load(maxima + row * NUM_TILES + tiles, mask=tiles < NUM_TILES, other=-(1 << 63)), 0)
    value = _ordered((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    return value, 0x7FFFFFFF - (best & 0x7FFFFFFF), tl.abs(value) < float("inf")


@triton.jit
def _float_parameter(parameters: tl.tensor, row: tl.tensor, INDEX: tl.constexpr) -> Any:
    return tl.load(parameters + row * NUM_PARAMETERS + INDEX).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _mass(weights: tl.tensor) -> Any:
    return (weights * MASS_OF_ONE).to(tl.int64)


@triton.jit
def _weigh(
    logits: tl.tensor, maxima: tl.tensor, parameters: tl.tensor, masses: tl.tensor, out: tl.tensor,
    VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the token of a row that is not random. Of the others replace the logits by weights, and write the mass of
    the tile that min_p keeps."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, first, is_finite = _largest(maxima, row, NUM_TILES, TILES)
    is_random = tl.load(parameters + row * NUM_PARAMETERS) != 0
    tl.store(out + row, tl.where(is_random, VOCAB - 1, first), mask=tile == 0)
    if is_random & is_finite:
        tokens = tile * TILE + tl.arange(0, TILE)
        at = logits + row * VOCAB + tokens
        x = tl.load(at, mask=tokens < VOCAB, other=float("-inf"))
        weights = tl.exp((x - largest) / _float_parameter(parameters, row, 4))
        kept = tl.where(weights >= _float_parameter(parameters, row, 5), _mass(weights), 0)
        tl.store(at, weights, mask=tokens < VOCAB)
        tl.store(masses + row * NUM_TILES + tile, tl.sum(kept, 0))


@triton.jit
def _amounts(
    weights: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor, IS_MASS: tl.constexpr,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
) -> Any:  # fmt: skip
    """The number of weights whose bits are at least each of three positive thresholds, and their mass or number."""
    # Each thread sums its columns without the others, however the rows are aligned.
    offsets = tl.arange(0, 4)[:, None] * (TILE // 4) + tl.arange(0, TILE // 4)[None, :]
    count_1 = tl.zeros((TILE // 4,), tl.int32)
    count_2, count_3 = count_1, count_1
    mass_1 = tl.zeros((TILE // 4,), tl.int64)
    mass_2, mass_3 = mass_1, mass_1
    for start in range(0, VOCAB, TILE):
        w = tl.load(weights + start + offsets, mask=start + offsets < VOCAB, other=0.0)
        bits = w.to(tl.int32, bitcast=True)
        count_1 += tl.sum((bits >= first).to(tl.int32), 0)
        count_2 += tl.sum((bits >= second).to(tl.int32), 0)
        count_3 += tl.sum((bits >= third).to(tl.int32), 0)
        if IS_MASS:
            mass = _mass(w)
            mass_1 += tl.sum(tl.where(bits >= first, mass, 0), 0)
            mass_2 += tl.sum(tl.where(bits >= second, mass, 0), 0)
            mass_3 += tl.sum(tl.where(bits >= third, mass, 0), 0)
    n_1, n_2, n_3 = tl.sum(count_1, 0), tl.sum(count_2, 0), tl.sum(count_3, 0)
    if not IS_MASS:
        return n_1, n_2, n_3, n_1.to(tl.int64), n_2.to(tl.int64), n_3.to(tl.int64)
    return n_1, n_2, n_3, tl.sum(mass_1, 0), tl.sum(mass_2, 0), tl.sum(mass_3, 0)


@triton.jit
def _floor(
    weights: tl.tensor, low: tl.tensor, target: tl.tensor, IS_MASS: tl.constexpr, VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:  # fmt: skip
    """The bits of a weight from `low` on, such that the weights from there on reach `target`, and those from the next
    larger weight on do not."""
    high = low * 0 + BITS_OF_ONE + 1
    num_low, num_high = low * 0 + VOCAB, low * 0
    while (high - low > 1) & (num_low - num_high > 1):
        step = tl.maximum((high - low) // 4, 1)
        first, second, third = low + step, low + 2 * step, low + 3 * step
        n_1, n_2, n_3, a_1, a_2, a_3 = _amounts(weights, first, second, third, IS_MASS, VOCAB, TILE)
        is_1, is_2, is_3 = a_1 >= target, a_2 >= target, a_3 >= target
        end = tl.where(is_3, high, tl.where(is_2, third, tl.where(is_1, second, first)))
        num_end = tl.where(is_3, num_high, tl.where(is_2, n_3, tl.where(is_1, n_2, n_1)))
        low = tl.where(is_3, third, tl.where(is_2, second, tl.where(is_1, first, low)))
        num_low = tl.where(is_3, n_3, tl.where(is_2, n_2, tl.where(is_1, n_1, num_low)))
        num_high = tl.where(end < high, num_end, num_high)
        high = tl.minimum(end, high)
    return low


@triton.jit
def _uniform(parameters: tl.tensor, row: tl.tensor) -> Any:
    """The random 64 bits of a row, of which the last 12 are 0; see `worker/random_stream.py`."""
    key = tl.load(parameters + row * NUM_PARAMETERS + 2).to(tl.uint64, bitcast=True)
    position = tl.load(parameters + row * NUM_PARAMETERS + 3).to(tl.uint64, bitcast=True)
    x = key + (position + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)) >> 12 << 12


@triton.jit
def _target(parameters: tl.tensor, row: tl.tensor, total: tl.tensor) -> Any:
    """uniform * total, rounded down."""
    return tl.umulhi(_uniform(parameters, row), total.to(tl.uint64)).to(tl.int64)


@triton.jit
def _draw(
    weights: tl.tensor, maxima: tl.tensor, parameters: tl.tensor, masses: tl.tensor, out: tl.tensor,
    VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the token of a random row: the first one at which the sum of the kept masses exceeds uniform * total.

    The weights larger than `floor` are kept, and the first `needed` of those that are equal to it.
    """
    row = tl.program_id(0).to(tl.int64)
    _, _, is_finite = _largest(maxima, row, NUM_TILES, TILES)
    if is_finite & (tl.load(parameters + row * NUM_PARAMETERS) != 0):
        weights += row * VOCAB
        top_k = tl.load(parameters + row * NUM_PARAMETERS + 1)
        top_p = tl.load(parameters + row * NUM_PARAMETERS + 6).to(tl.float64, bitcast=True)
        floor = _float_parameter(parameters, row, 5).to(tl.int32, bitcast=True)
        tiles = tl.arange(0, TILES)
        mass = tl.load(masses + row * NUM_TILES + tiles, mask=tiles < NUM_TILES, other=0)
        target = _target(parameters, row, tl.sum(mass, 0))
        tile = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
        before = tl.sum(tl.where(tiles < tile, mass, 0), 0)
        start, num_before, needed = tile * TILE, tile * 0, tile * 0 + VOCAB
        if (top_k > 0) | (top_p < 1):
            if top_k > 0:
                floor = tl.maximum(floor, _floor(weights, floor * 0, top_k, False, VOCAB, TILE))
            _, _, _, total, _, _ = _amounts(weights, tl.maximum(floor, 1), floor + 1, floor + 1, True, VOCAB, TILE)
            if top_p < 1:
                share = top_p * total.to(tl.float64)
                floor = _floor(weights, floor, tl.maximum(tl.ceil(share).to(tl.int64), 1), True, VOCAB, TILE)
                num_from, num_above, _, _, above, _ = _amounts(
                    weights, tl.maximum(floor, 1), floor + 1, floor + 1, True, VOCAB, TILE
                )
                each = _mass(floor.to(tl.float32, bitcast=True))
                # A share that is a whole number of tokens is not raised by its rounding.
                ties = (share - above.to(tl.float64)) / tl.maximum(each, 1).to(tl.float64)
                ties = tl.minimum(tl.maximum(tl.ceil(ties - ties * 1e-9), 1.0), VOCAB)
                needed = tl.minimum(ties.to(tl.int32), num_from - num_above)
                total = above + needed * each
            target = _target(parameters, row, total)
            start, before, num_before = _find_tile(weights, floor, needed, target, VOCAB, TILE)
        tokens = start + tl.arange(0, TILE)
        w = tl.load(weights + tokens, mask=tokens < VOCAB, other=0.0)
        bits = w.to(tl.int32, bitcast=True)
        ordinals = num_before + tl.cumsum((bits == floor).to(tl.int32), 0)
        kept = (bits > floor) | ((bits == floor) & (ordinals <= needed))
        running = before + tl.cumsum(tl.where(kept, _mass(w), 0), 0)
        token = start + tl.sum((running <= target).to(tl.int32), 0)
        tl.store(out + row, tl.minimum(token, VOCAB - 1).to(tl.int64))


@triton.jit
def _find_tile(
    weights: tl.tensor, floor: tl.tensor, needed: tl.tensor, target: tl.tensor, VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:  # fmt: skip
    """The start of the tile in which the sum of the kept masses exceeds `target`, and the mass and the number of
    weights equal to `floor` before it."""
    start_found, num_found, num_before = floor * 0, floor * 0, floor * 0
    before = target * 0
    found = before
    each = _mass(floor.to(tl.float32, bitcast=True))
    for start in range(0, VOCAB, TILE):
        tokens = start + tl.arange(0, TILE)
        w = tl.load(weights + tokens, mask=tokens < VOCAB, other=0.0)
        bits = w.to(tl.int32, bitcast=True)
        num_ties = tl.sum(((bits == floor) & (tokens < VOCAB)).to(tl.int32), 0)
        num_kept = tl.maximum(tl.minimum(needed - num_before, num_ties), 0)
        is_here = before <= target
        start_found, found = tl.where(is_here, start, start_found), tl.where(is_here, before, found)
        num_found = tl.where(is_here, num_before, num_found)
        before += tl.sum(tl.where(bits > floor, _mass(w), 0), 0) + num_kept * each
        num_before += num_ties
    return start_found, found, num_found


@triton.jit
def _mask(
    logits: tl.tensor, index: tl.tensor, masks: tl.tensor, VOCAB: tl.constexpr, WORDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    words = tl.load(masks + row * WORDS + tokens // 32, mask=tokens < VOCAB, other=-1)
    is_masked = ((words >> (tokens % 32)) & 1) == 0
    tl.store(logits + tl.load(index + row) * VOCAB + tokens, float("-inf"), mask=is_masked & (tokens < VOCAB))


@triton.jit
def _log_sums(logits: tl.tensor, out: tl.tensor, VOCAB: tl.constexpr, TILE: tl.constexpr) -> None:
    """Write the logarithm of the sum of exp(logit) of a row."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.arange(0, TILE)
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(0, VOCAB, TILE):
        x = tl.load(logits + row * VOCAB + start + tokens, mask=start + tokens < VOCAB, other=float("-inf"))
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, VOCAB, TILE):
        x = tl.load(logits + row * VOCAB + start + tokens, mask=start + tokens < VOCAB, other=float("-inf"))
        total += tl.exp(x - top)
    tl.store(out + row, top + tl.log(tl.sum(total, 0)))


@cache
def sampling_launches(vocab_size: int) -> dict[str, Launch]:
    """The launches for a vocabulary, whose mass is less than 2**63."""
    assert vocab_size < 1 << 19
    tile, num_warps = row_block(min(max(vocab_size, 128), TILE))
    if vocab_size % 4:  # The rows are not aligned, and need more registers.
        tile //= 2
    sizes = {"VOCAB": vocab_size, "TILE": tile}
    tiles = sizes | {"NUM_TILES": (num_tiles := triton.cdiv(vocab_size, tile))}
    tiles["TILES"] = triton.next_power_of_2(num_tiles)
    arrays = ("*fp32", "*i64", "*i64", "*i64", "*i64")
    words = {"WORDS": triton.cdiv(vocab_size, 32)}
    return {
        "maxima": Launch(_maxima, sizes, ("*fp32", "*i64"), num_warps),
        "weigh": Launch(_weigh, tiles, arrays, num_warps),
        "draw": Launch(_draw, tiles, arrays, num_warps),
        "mask": Launch(_mask, sizes | words, ("*fp32", "*i64", "*i32"), num_warps),
        "log_sums": Launch(_log_sums, sizes, ("*fp32", "*fp32"), num_warps),
    }


class TritonSampling:
    """Implements `SamplingKernels`. The likeliest tokens of logprobs are found by torch."""

    def make_sampler(self, parameters: SamplingParameters) -> TokenSampler:
        def sample(logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
            logits = aligned(logits)
            launches, (num_rows, device) = sampling_launches(logits.shape[1]), (len(rows), logits.device)
            num_tiles = launches["draw"].constants["NUM_TILES"]
            packed = _to_device(_pack(parameters, rows), device)
            shapes = (num_rows, num_tiles), (num_rows, num_tiles), (num_rows,)
            maxima, masses, token_ids = (torch.empty(each, dtype=torch.int64, device=device) for each in shapes)
            is_random = bool(parameters.is_random[rows].any())
            launches["maxima"]((num_rows, num_tiles), logits, maxima)
            arrays = (logits, maxima, packed, masses, token_ids)
            launches["weigh"]((num_rows, num_tiles if is_random else 1), *arrays)
            if is_random:
                launches["draw"]((num_rows,), *arrays)
            return token_ids

        return sample

    def mask(self, logits: torch.Tensor, index: IntArray, masks: Bits) -> None:
        launch, device = sampling_launches(logits.shape[1])["mask"], logits.device
        whole = aligned(logits)
        grid = (len(index), triton.cdiv(logits.shape[1], launch.constants["TILE"]))
        launch(grid, whole, _to_device(index, device), _to_device(masks.view(np.int32), device))
        if whole is not logits:
            logits.copy_(whole)

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_sums = torch.empty(len(logits), device=logits.device)
        sampling_launches(logits.shape[1])["log_sums"]((len(logits),), aligned(logits), log_sums)
        return top_logprobs(logits, token_ids, num_top, log_sums[:, None])


def _to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device, where kernels can read it."""
    return aligned(to_device(array, device))


def _pack(parameters: SamplingParameters, rows: IntArray) -> IntArray:
    """The parameters of rows [N, NUM_PARAMETERS]."""
    p = parameters
    numbers = (p.is_random[rows], p.top_k[rows], p.keys[rows].view(np.int64), p.positions[rows])
    bits = (p.temperature[rows].view(np.int32), p.min_p[rows].view(np.int32), p.top_p[rows].view(np.int64))
    return np.stack([each.astype(np.int64) for each in (*numbers, *bits)], axis=1)


def variants() -> Iterator[tuple[str, Launch]]:
    """The launches for the vocabularies of typical models."""
    for vocab_size in (50257, 128256, 201088, 262208):
        for name, launch in sampling_launches(vocab_size).items():
            yield f"{name}_{vocab_size}", launch
