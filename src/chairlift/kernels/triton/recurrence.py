"""Recurrences: the convolution, its states, the tokens of a head one after the other, and the gated norm.

A program of `_scan` keeps the state [K, some of V] of a head of one sequence in registers, and reads its tokens in
order. The order of all sums depends on the sizes of the layer alone, so the state after a token has the same bits in
any batch and any division of the sequence into steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from chairlift.kernels.recurrence import (
    L2_EPS,
    Convolution,
    GatedDelta,
    Mamba2,
    Recurrence,
    RecurrentState,
    ShortConvolution,
    StateStep,
)
from chairlift.kernels.triton.launch import Launch, pointer
from chairlift.kernels.triton.rows import aligned_rows, log1p_exp, row_block, silu

CHANNEL_BLOCK = 512
STATE_BLOCK = 2048
"""The values of a state in a program, which has one warp: 64 in each thread."""

SNAPSHOT_BLOCK = tl.constexpr(128)
"""The snapshots or sequences that a program compares at a time."""


@triton.jit
def _count_below(values: tl.tensor, stride: tl.tensor, limit: tl.tensor, size: tl.tensor) -> Any:
    """The number of the `size` values, at distances of `stride`, that are less than `limit`."""
    count = limit * 0
    lanes = tl.arange(0, SNAPSHOT_BLOCK)
    for first in range(0, size, SNAPSHOT_BLOCK):
        each = tl.load(values + (first + lanes) * stride, mask=first + lanes < size, other=0x7FFFFFFF)
        count += tl.sum((each < limit).to(tl.int32), 0)
    return count


@triton.jit
def _end(
    snapshots: tl.tensor, entry: tl.tensor, last: tl.tensor, num_tokens: tl.tensor, slots: tl.tensor,
    sequence: tl.tensor,
) -> Any:  # fmt: skip
    """The number of tokens and the slot of a snapshot, or those at the end of the sequence for entry `last`."""
    is_last = entry == last
    count = tl.where(is_last, num_tokens, tl.load(snapshots + 3 * entry + 1, mask=entry < last, other=0))
    slot = tl.where(is_last, tl.load(slots + sequence), tl.load(snapshots + 3 * entry + 2, mask=entry < last, other=0))
    return count, slot.to(tl.int64)


@triton.jit
def _inputs(
    rows: tl.tensor, scales: tl.tensor, row: tl.tensor, columns: tl.tensor, mask: tl.tensor, IS_SHORT: tl.constexpr,
    HAS_SCALES: tl.constexpr, CHANNELS: tl.constexpr, AT: tl.constexpr, STRIDE: tl.constexpr,
) -> Any:  # fmt: skip
    """The inputs of a convolution in float32: b * x of rows [b | c | x], or the scaled channels from AT on."""
    at = rows + row.to(tl.int64) * STRIDE + AT + columns
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if IS_SHORT:
        x *= tl.load(at + 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        x *= tl.load(scales + AT + columns, mask=mask, other=0.0)
    return x


@triton.jit(do_not_specialize=["num_sequences"])
def _convolve(
    rows: tl.tensor, scales: tl.tensor, weight: tl.tensor, bias: tl.tensor, tails: tl.tensor, starts: tl.tensor,
    sources: tl.tensor, out: tl.tensor, num_sequences: tl.tensor, IS_SHORT: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, AT: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """silu(convolution) of one row, or c * convolution(b * x)."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < CHANNELS
    sequence = _count_below(starts + 1, 1, row + 1, num_sequences)
    if sequence < num_sequences:
        start = tl.load(starts + sequence)
        source = tl.load(sources + sequence)
        y = tl.zeros((BLOCK,), tl.float32)
        if HAS_BIAS:
            y += tl.load(bias + columns, mask=mask, other=0.0)
        for i in tl.static_range(WIDTH):
            position = row - (WIDTH - 1) + i
            old = tails + (source.to(tl.int64) * (WIDTH - 1) + position - start + WIDTH - 1) * CHANNELS + columns
            mask_new = columns < tl.where(position >= start, CHANNELS, 0)
            mask_old = columns < tl.where((position < start) & (source >= 0), CHANNELS, 0)
            x = _inputs(rows, scales, position, columns, mask_new, IS_SHORT, HAS_SCALES, CHANNELS, AT, STRIDE)
            x = tl.where(mask_new, x, tl.load(old, mask=mask_old, other=0.0))
            y += tl.load(weight + i * CHANNELS + columns, mask=mask, other=0.0) * x
        if IS_SHORT:
            at = rows + row.to(tl.int64) * STRIDE + CHANNELS + columns
            y *= tl.load(at, mask=mask, other=0.0).to(tl.float32)
        else:
            y = silu(y)
        tl.store(out + row.to(tl.int64) * CHANNELS + columns, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_snapshots"])
def _keep_tails(
    rows: tl.tensor, scales: tl.tensor, tails: tl.tensor, starts: tl.tensor, sources: tl.tensor, slots: tl.tensor,
    snapshots: tl.tensor, num_snapshots: tl.tensor, IS_SHORT: tl.constexpr, HAS_SCALES: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, AT: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the last inputs of a sequence. It reads the old ones first, whose slot may be one that is written."""
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + sequence)
    num_tokens = tl.load(starts + sequence + 1) - start
    source = tl.load(sources + sequence).to(tl.int64)
    taps = tl.arange(0, TAPS)[:, None]
    at = tails + (source * (WIDTH - 1) + taps) * CHANNELS + columns[None, :]
    mask_old = (taps < WIDTH - 1) & (columns[None, :] < tl.where(source >= 0, CHANNELS, 0))
    old = tl.load(at, mask=mask_old, other=0.0)
    tl.debug_barrier()  # Other threads may write what a thread has not read yet.
    last = _count_below(snapshots, 3, sequence + 1, num_snapshots)
    for entry in range(_count_below(snapshots, 3, sequence, num_snapshots), last + 1):
        count, slot = _end(snapshots, entry, last, num_tokens, slots, sequence)
        for i in tl.static_range(WIDTH - 1):
            position = count + i - (WIDTH - 1)
            mask_new = columns < tl.where(position >= 0, CHANNELS, 0)
            x = _inputs(rows, scales, start + position, columns, mask_new, IS_SHORT, HAS_SCALES, CHANNELS, AT, STRIDE)
            x = tl.where(mask_new, x, tl.sum(tl.where(taps == count + i, old, 0.0), 0))
            is_kept = columns < tl.where(slot >= 0, CHANNELS, 0)
            tl.store(tails + (slot * (WIDTH - 1) + i) * CHANNELS + columns, x, mask=is_kept)


@triton.jit(do_not_specialize=["num_snapshots"])
def _scan(
    mixed: tl.tensor, rows: tl.tensor, scales: tl.tensor, matrix: tl.tensor, starts: tl.tensor, sources: tl.tensor,
    slots: tl.tensor, snapshots: tl.tensor, decay: tl.tensor, dt_bias: tl.tensor, out: tl.tensor,
    num_snapshots: tl.tensor, IS_DELTA: tl.constexpr, HAS_CHANNEL_DECAY: tl.constexpr, IS_TILED: tl.constexpr,
    HAS_SCALES: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHANNELS: tl.constexpr, STRIDE: tl.constexpr, Q_AT: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, A_AT: tl.constexpr, B_AT: tl.constexpr, BETA_SCALE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, L2_EPS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the outputs of a head for the tokens of a sequence, and write the states."""
    sequence = tl.program_id(0)
    head = tl.program_id(1) // tl.cdiv(VALUES, BLOCK_V)
    key_head = head % KEY_HEADS if IS_TILED else head // (HEADS // KEY_HEADS)
    ks = tl.arange(0, BLOCK_K)
    vs = tl.program_id(1) % tl.cdiv(VALUES, BLOCK_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = ks < KEYS, vs < VALUES
    at = matrix + (head * KEYS + ks[:, None]) * VALUES + vs[None, :]
    source = tl.load(sources + sequence).to(tl.int64)
    is_state = (ks[:, None] < tl.where(source >= 0, KEYS, 0)) & is_value[None, :]
    state = tl.load(at + source * (HEADS * KEYS * VALUES), mask=is_state, other=0.0)
    decays, is_decay = head, head < HEADS
    if HAS_CHANNEL_DECAY:
        decays, is_decay = head * KEYS + ks, is_key
    rate = tl.load(decay + decays, mask=is_decay, other=0.0)
    bias = tl.load(dt_bias + decays, mask=is_decay, other=0.0)
    start = tl.load(starts + sequence)
    num_tokens = tl.load(starts + sequence + 1) - start
    start, done = start.to(tl.int64), num_tokens * 0
    last = _count_below(snapshots, 3, sequence + 1, num_snapshots)
    for entry in range(_count_below(snapshots, 3, sequence, num_snapshots), last + 1):
        count, slot = _end(snapshots, entry, last, num_tokens, slots, sequence)
        for index in range(done, count):
            row, token_mixed = rows + (start + index) * STRIDE, mixed + (start + index) * CHANNELS
            q = tl.load(token_mixed + Q_AT + key_head * KEYS + ks, mask=is_key, other=0.0).to(tl.float32)
            k = tl.load(token_mixed + K_AT + key_head * KEYS + ks, mask=is_key, other=0.0).to(tl.float32)
            v = tl.load(token_mixed + V_AT + head * VALUES + vs, mask=is_value, other=0.0).to(tl.float32)
            dt = tl.load(row + A_AT + decays, mask=is_decay, other=0.0).to(tl.float32)
            if HAS_SCALES:
                dt *= tl.load(scales + A_AT + decays, mask=is_decay, other=0.0)
            dt = log1p_exp(dt + bias)
            if IS_DELTA:
                q *= tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * (KEYS**-0.5)
                k *= tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
                factors = tl.exp(rate * dt)
                if HAS_CHANNEL_DECAY:
                    factors = factors[:, None]
                state *= factors
                beta = BETA_SCALE * tl.sigmoid(tl.load(row + B_AT + head).to(tl.float32))
                state += k[:, None] * (beta * (v - tl.sum(k[:, None] * state, 0)))[None, :]
            else:
                dt = tl.minimum(tl.maximum(dt, LOW), HIGH)
                state = state * tl.exp(rate * dt) + k[:, None] * (v * dt)[None, :]
            o = tl.sum(q[:, None] * state, 0)
            tl.store(out + ((start + index) * HEADS + head) * VALUES + vs, o, mask=is_value)
        done = count
        is_kept = (ks[:, None] < tl.where(slot >= 0, KEYS, 0)) & is_value[None, :]
        tl.store(at + slot * (HEADS * KEYS * VALUES), state, mask=is_kept)


@triton.jit
def _finish(
    scanned: tl.tensor, mixed: tl.tensor, rows: tl.tensor, scales: tl.tensor, skip: tl.tensor, weight: tl.tensor,
    out: tl.tensor, HAS_SKIP: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_NORM: tl.constexpr,
    GATES_FIRST: tl.constexpr, IS_SIGMOID: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    OUT: tl.constexpr, CHANNELS: tl.constexpr, STRIDE: tl.constexpr, V_AT: tl.constexpr, Z_AT: tl.constexpr,
    EPS: tl.constexpr,
) -> None:  # fmt: skip
    """The skip connection, norm and gate of the values of one token that are normed together."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * GROUP + tl.arange(0, BLOCK_G)
    mask = tl.arange(0, BLOCK_G) < GROUP
    y = tl.load(scanned + row * OUT + columns, mask=mask, other=0.0)
    if HAS_SKIP:
        x = tl.load(mixed + row * CHANNELS + V_AT + columns, mask=mask, other=0.0).to(tl.float32)
        y += tl.load(skip + columns, mask=mask, other=0.0) * x
    z = tl.load(rows + row * STRIDE + Z_AT + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        z *= tl.load(scales + Z_AT + columns, mask=mask, other=0.0)
    z = tl.sigmoid(z) if IS_SIGMOID else silu(z)
    if GATES_FIRST:
        y *= z
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(y * y, 0) / GROUP + EPS) * tl.load(weight + columns, mask=mask, other=0.0)
    if not GATES_FIRST:
        y *= z
    tl.store(out + row * OUT + columns, y.to(out.dtype.element_ty), mask=mask)


def recurrence_launches(rule: Recurrence, dtype: torch.dtype, stride: int) -> dict[str, Launch]:
    """The launches of a layer for rows of a type at distances of `stride` values."""
    channels, width = rule.convolution.num_channels, rule.convolution.width
    constants = {"STRIDE": stride, "CHANNELS": channels, "WIDTH": width, "TAPS": triton.next_power_of_2(width - 1)}
    constants |= {"HAS_BIAS": rule.convolution.bias is not None, "IS_SHORT": isinstance(rule, ShortConvolution)}
    constants |= {"BLOCK": min(triton.next_power_of_2(channels), CHANNEL_BLOCK)} | _constants(rule)

    def launch(kernel: Any, types: tuple[str, ...], num_warps: int = 4) -> Launch:
        return Launch(kernel, {name: constants[name] for name in kernel.arg_names if name.isupper()}, types, num_warps)

    row, f32, numbers = pointer(dtype), "*fp32", ("*i32",) * 4
    launches = {
        "convolve": launch(_convolve, (row, f32, f32, f32, f32, *numbers[:2], row, "i32")),
        "keep_tails": launch(_keep_tails, (row, f32, f32, *numbers, "i32")),
    }
    if not isinstance(rule, ShortConvolution):
        constants["BLOCK_G"], num_warps = row_block(constants["GROUP"])
        launches["scan"] = launch(_scan, (row, row, f32, f32, *numbers, f32, f32, f32, "i32"), 1)
        launches["finish"] = launch(_finish, (f32, row, row, f32, f32, f32, row), num_warps)
    return launches


def _constants(rule: Recurrence) -> dict[str, Any]:
    """The constants of a kind of recurrence. AT, Z_AT, A_AT and B_AT are where parts of a row of the projection begin,
    Q_AT, K_AT and V_AT those of the channels."""
    if isinstance(rule, ShortConvolution):
        return {"AT": 0, "HAS_SCALES": False}
    heads, keys, values = rule.matrix_shape
    block = triton.next_power_of_2(keys)
    constants = {"HEADS": heads, "KEYS": keys, "VALUES": values, "BLOCK_K": block, "OUT": rule.out_features}
    constants["BLOCK_V"] = max(min(triton.next_power_of_2(values), STATE_BLOCK // block), 1)
    constants |= {"L2_EPS": L2_EPS, "EPS": rule.norm_eps, "HAS_NORM": rule.norm_weight is not None}
    if isinstance(rule, GatedDelta):
        constants |= {"Q_AT": 0, "K_AT": rule.num_keys, "V_AT": 2 * rule.num_keys, "KEY_HEADS": rule.num_key_heads}
        constants |= {"HAS_CHANNEL_DECAY": rule.has_channel_decay, "IS_TILED": rule.has_tiled_keys, "IS_DELTA": True}
        constants |= {"BETA_SCALE": rule.beta_scale, "IS_SIGMOID": rule.gate == "sigmoid", "GROUP": values}
        constants |= {"LOW": 0.0, "HIGH": 0.0, "HAS_SCALES": False, "HAS_SKIP": False, "GATES_FIRST": False}
        names, ends = {"qkv": "AT", "z": "Z_AT", "b": "B_AT", "a": "A_AT"}, accumulate(rule.row_parts.values())
        pairs = zip(rule.row_parts.items(), ends, strict=True)
        return constants | {names[name]: end - size for (name, size), end in pairs}
    (x, b, _), (z, inputs, _), (low, high) = rule.mixed_parts, rule.row_parts, rule.dt_limits
    constants |= {"Z_AT": 0, "AT": z, "A_AT": z + inputs, "B_AT": 0, "V_AT": 0, "K_AT": x, "Q_AT": x + b}
    constants |= {"HAS_CHANNEL_DECAY": False, "IS_TILED": False, "IS_DELTA": False, "KEY_HEADS": rule.num_groups}
    constants |= {"LOW": low, "HIGH": high, "BETA_SCALE": 1.0, "IS_SIGMOID": False, "GROUP": rule.norm_group_size}
    constants |= {"HAS_SKIP": True, "GATES_FIRST": not rule.norm_before_gate}
    return constants | {"HAS_SCALES": rule.projection_scales is not None}


class TritonRecurrence:
    """A `RecurrentKernel` in four launches, or two without a state of heads. The inputs of a token for the convolution
    are contiguous in the memory of its state."""

    def __init__(self, recurrence: Recurrence) -> None:
        self._rule = recurrence
        convolution = recurrence.convolution
        self._device = convolution.weight.device
        self._weight = _vector(convolution.weight.t())
        self._bias = self._optional(convolution.bias)
        self._launches: dict[tuple[torch.dtype, int], dict[str, Launch]] = {}
        self._scales = self._weight
        if isinstance(recurrence, ShortConvolution):
            return
        self._decay, self._dt_bias = _vector(recurrence.decay), _vector(recurrence.dt_bias)
        self._norm, self._skip = self._optional(recurrence.norm_weight), self._weight
        if isinstance(recurrence, GatedDelta):
            self._norm = self._norm.repeat(recurrence.num_heads)
        else:
            self._scales = self._optional(recurrence.projection_scales)
            self._skip = _vector(recurrence.skip).repeat_interleave(recurrence.head_dim)

    def _optional(self, values: torch.Tensor | None) -> torch.Tensor:
        """The values, or others that are not read."""
        return self._weight if values is None else _vector(values)

    def allocate(self, num_slots: int) -> RecurrentState:
        width, channels = self._weight.shape
        tails = torch.zeros((num_slots, width - 1, channels), device=self._device)
        shape = self._rule.matrix_shape
        matrix = None if shape is None else torch.zeros((num_slots, *shape), device=self._device)
        return RecurrentState(tails.transpose(1, 2), matrix)

    def __call__(self, projected: torch.Tensor, state: RecurrentState, step: StateStep) -> torch.Tensor:
        rule, rows, scales = self._rule, aligned_rows(projected), self._scales
        num_rows, num_sequences, num_snapshots = len(rows), len(step.slots), len(step.snapshots)
        key = (rows.dtype, rows.stride(0))
        launches = self._launches.get(key) or self._launches.setdefault(key, recurrence_launches(rule, *key))
        tails, channels = state.convolution.transpose(1, 2), rule.convolution.num_channels
        blocks = triton.cdiv(channels, launches["convolve"].constants["BLOCK"])
        numbers = (step.query_start_loc, step.sources, step.slots, step.snapshots)
        mixed = torch.empty((num_rows, channels), dtype=rows.dtype, device=rows.device)
        parameters = (scales, self._weight, self._bias)
        launches["convolve"]((num_rows, blocks), rows, *parameters, tails, *numbers[:2], mixed, num_sequences)
        launches["keep_tails"]((num_sequences, blocks), rows, scales, tails, *numbers, num_snapshots)
        if isinstance(rule, ShortConvolution) or state.matrix is None:
            return mixed
        sizes = {**launches["scan"].constants, **launches["finish"].constants}
        scanned = torch.empty((num_rows, rule.out_features), device=rows.device)
        grid = (num_sequences, rule.num_heads * triton.cdiv(sizes["VALUES"], sizes["BLOCK_V"]))
        parameters = (self._decay, self._dt_bias, scanned)
        launches["scan"](grid, mixed, rows, scales, state.matrix, *numbers, *parameters, num_snapshots)
        out = torch.empty(scanned.shape, dtype=rows.dtype, device=rows.device)
        grid = (num_rows, rule.out_features // sizes["GROUP"])
        launches["finish"](grid, scanned, mixed, rows, scales, self._skip, self._norm, out)
        return out


def _vector(values: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in float32, which is aligned."""
    return values.to(torch.float32, copy=True).contiguous()


def variants() -> Iterator[tuple[str, Launch]]:
    """The launches for the layers of typical models in bfloat16."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def delta(keys: int, heads: int, by_channel: bool) -> GatedDelta:
        channels, decays = (2 * keys + heads) * 128, heads * (128 if by_channel else 1)
        return GatedDelta(
            num_key_heads=keys, num_heads=heads, key_dim=128, value_dim=128, has_channel_decay=by_channel,
            convolution=Convolution(empty(channels, 4)), decay=empty(decays), dt_bias=empty(decays),
            norm_weight=empty(128), norm_eps=1e-6, gate="sigmoid" if by_channel else "silu",
        )  # fmt: skip

    def mamba(heads: int, groups: int) -> Mamba2:
        channels = heads * 64 + 2 * groups * 128
        return Mamba2(
            num_heads=heads, head_dim=64, num_groups=groups, state_size=128, norm_weight=empty(heads * 64),
            convolution=Convolution(empty(channels, 4), empty(channels)), norm_eps=1e-5,
            decay=empty(heads), dt_bias=empty(heads), skip=empty(heads),
        )  # fmt: skip

    rules: dict[str, Recurrence] = {"short": ShortConvolution(Convolution(empty(2048, 3)))}
    rules |= {"delta": delta(16, 32, False), "channel_decay": delta(32, 32, True), "mamba2": mamba(128, 8)}
    for name, rule in rules.items():
        widths = (3 * 2048,) if isinstance(rule, ShortConvolution) else rule.row_parts
        stride = sum(widths.values() if isinstance(widths, dict) else widths)
        for kernel, launch in recurrence_launches(rule, torch.bfloat16, stride).items():
            yield f"{kernel}_{name}", launch
