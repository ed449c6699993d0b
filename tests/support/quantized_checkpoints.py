"""Quantizes the linear layers of a Hugging Face folder by rounding to nearest, in the layout of each method.

Rounding to nearest is less accurate than the algorithms of these methods, which choose numbers by means of calibration
data; the layout of the files is the same.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
SAME_INPUT = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Method:
    """A method of quantization with its options.

    Attributes:
        group_size: inputs with one scale; None for one scale for each output.
        block: outputs and inputs with one scale, for floats.
        is_packed: of compressed-tensors: whether integers are packed in int32.
        dynamic_activations: of compressed-tensors: whether activations are quantized too.
        act_order: whether inputs are assigned to groups in another order than their own.
        version: of GPTQ: 1 if zero points are stored minus 1.
        scale_dtype: the type of scales in the file.
        divides: of FP8: whether scales are stored as their reciprocals.
    """

    name: str
    bits: int = 4
    group_size: int | None = 128
    symmetric: bool = True
    is_float: bool = False
    block: tuple[int, int] | None = None
    per_tensor: bool = False
    is_packed: bool = True
    dynamic_activations: bool = False
    act_order: bool = False
    version: int = 1
    scale_dtype: torch.dtype = torch.float16
    divides: bool = False


COMPRESSED = Method("compressed-tensors", scale_dtype=torch.bfloat16)
METHODS: dict[str, Method] = {
    "w8a8": replace(COMPRESSED, bits=8, group_size=None, is_packed=False, dynamic_activations=True),
    "w8a8-asymmetric": replace(
        COMPRESSED, bits=8, group_size=None, is_packed=False, dynamic_activations=True, symmetric=False
    ),
    "w8a16": replace(COMPRESSED, bits=8, group_size=None),
    "w8a16-groups": replace(COMPRESSED, bits=8),
    "w4a16": COMPRESSED,
    "w4a16-channel": replace(COMPRESSED, group_size=None),
    "w4a16-asymmetric": replace(COMPRESSED, symmetric=False),
    "w4a16-act-order": replace(COMPRESSED, act_order=True),
    "nvfp4": replace(COMPRESSED, is_float=True, group_size=16),
    "mxfp4": replace(COMPRESSED, is_float=True, group_size=32),
    "awq": Method("awq", symmetric=False),
    "awq-symmetric": Method("awq", scale_dtype=torch.bfloat16),
    "gptq": Method("gptq"),
    "gptq-asymmetric": Method("gptq", symmetric=False),
    "gptq-act-order": Method("gptq", symmetric=False, act_order=True),
    "gptq-v2": Method("gptq", symmetric=False, version=2),
    "gptq-8": Method("gptq", bits=8),
    "gptq-8-act-order": Method("gptq", bits=8, act_order=True),
    "gptq-8-asymmetric": Method("gptq", bits=8, symmetric=False),
    "fp8": Method("fp8", bits=8, is_float=True, block=(128, 128), scale_dtype=torch.float32),
    "fp8-divisors": Method("fp8", bits=8, is_float=True, group_size=None, scale_dtype=torch.float32, divides=True),
    "fp8-channel": replace(COMPRESSED, bits=8, is_float=True, group_size=None, dynamic_activations=True),
    "fp8-tensor": replace(COMPRESSED, bits=8, is_float=True, group_size=None, per_tensor=True),
    "fp8-block": replace(COMPRESSED, bits=8, is_float=True, block=(128, 128)),
}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rounded:
    """A matrix [out, in] rounded to integers, whose value is scale * (number - zero point).

    Attributes:
        numbers: int64 [out, in], from 0 to 2^bits - 1.
        scales: [out, groups], in the type of the file.
        zeros: int64 [out, groups].
        groups: int64 [in], the group of each input.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        return (self.numbers - self.zeros[:, self.groups]).float() * self.scales.float()[:, self.groups]


def round_to_integers(weight: torch.Tensor, method: Method, groups: torch.Tensor) -> Rounded:
    largest, center = 2**method.bits - 1, 2 ** (method.bits - 1)
    num_groups = int(groups.max()) + 1
    scales, zeros = [], []
    for group in range(num_groups):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if method.symmetric:
            scale = torch.maximum(-low, high) / (center - 1)
        else:
            scale = (high - low) / largest
        scale = scale.clamp(min=1e-5).to(method.scale_dtype)
        scales.append(scale)
        zero = torch.full_like(low, center) if method.symmetric else torch.round(-low / scale.float())
        zeros.append(zero.clamp(0, largest).long())
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    numbers = torch.round(weight / scale.float()[:, groups]).long() + zero[:, groups]
    return Rounded(numbers.clamp(0, largest), scale, zero, groups)


def round_to_floats(weight: torch.Tensor, method: Method) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the matrix in E4M3, its scales, and its values."""
    out, inputs = weight.shape
    rows, columns = method.block or ((out, inputs) if method.per_tensor else (1, inputs))
    padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -out % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scales = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-8).to(method.scale_dtype)
    spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:out, :inputs]
    numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    if method.divides:
        return numbers, 1 / scales, numbers.float() * (1 / (1 / spread))
    return numbers, scales.reshape(()) if method.per_tensor else scales, numbers.float() * spread


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def round_to_small_floats(weight: torch.Tensor, method: Method) -> tuple[Tensors, torch.Tensor]:
    """Return the tensors of NVFP4 (groups of 16) or MXFP4 in the layout of compressed-tensors, and the values."""
    groups = weight.view(len(weight), -1, method.group_size or 0)
    largest = groups.abs().amax(2) / 6
    if method.group_size == 32:
        exponents = torch.ceil(torch.log2(largest)).clamp(min=-127)
        tensors, scales = {"weight_scale": (exponents + 127).to(torch.uint8)}, torch.exp2(exponents)
    else:
        factor = (448 / largest.max()).reshape(1)
        stored = (largest * factor).to(torch.float8_e4m3fn)
        tensors, scales = {"weight_scale": stored, "weight_global_scale": factor}, stored.float() / factor
    numbers = (groups[..., None] / scales[..., None, None] - E2M1).abs().argmin(3).to(torch.uint8)
    values = (E2M1[numbers.long()] * scales[..., None]).view(weight.shape)
    pairs = numbers.view(len(weight), -1, 2)
    return {"weight_packed": pairs[..., 0] | pairs[..., 1] << 4, **tensors}, values


def pack_words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack consecutive columns in int32, the first in the lowest bits, or the columns of each word in another order."""
    per_word = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % per_word))
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // per_word, dtype=torch.int64)
    for position, column in enumerate(order or range(per_word)):
        words |= numbers[:, column::per_word] << (bits * position)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def awq_tensors(found: Rounded, method: Method) -> Tensors:
    return {
        "qweight": pack_words(found.numbers.t(), 4, AWQ_ORDER),
        "qzeros": pack_words(found.zeros.t(), 4, AWQ_ORDER),
        "scales": found.scales.t(),
    }


def gptq_tensors(found: Rounded, method: Method) -> Tensors:
    zeros = (found.zeros - 1) % 2**method.bits if method.version == 1 else found.zeros
    return {
        "qweight": pack_words(found.numbers, method.bits).t(),
        "qzeros": pack_words(zeros.t(), method.bits),
        "scales": found.scales.t(),
        "g_idx": found.groups.to(torch.int32),
    }


def compressed_tensors(found: Rounded, method: Method) -> Tensors:
    center = 2 ** (method.bits - 1)
    tensors: Tensors = {"weight_scale": found.scales}
    if method.is_packed:
        tensors["weight_packed"] = pack_words(found.numbers, method.bits)
        tensors["weight_shape"] = torch.tensor(found.numbers.shape)
    else:
        tensors["weight"] = (found.numbers - center).to(torch.int8)
    if not method.symmetric and method.is_packed:
        tensors["weight_zero_point"] = pack_words(found.zeros.t(), method.bits).t()
    elif not method.symmetric:
        tensors["weight_zero_point"] = (found.zeros - center).to(torch.int8)
    if method.act_order:
        tensors["weight_g_idx"] = found.groups.to(torch.int32)
    return tensors


LAYOUTS: dict[str, Callable[[Rounded, Method], Tensors]] = {
    "awq": awq_tensors,
    "gptq": gptq_tensors,
    "compressed-tensors": compressed_tensors,
}


def quantize(weight: torch.Tensor, method: Method, module: str) -> tuple[Tensors, torch.Tensor]:
    """Return the tensors of a linear layer by the end of their names, and the values of the matrix."""
    weight = weight.float()
    if method.is_float and method.bits == 4:
        return round_to_small_floats(weight, method)
    if method.is_float:
        numbers, scales, values = round_to_floats(weight, method)
        return {"weight": numbers, "weight_scale_inv" if method.name == "fp8" else "weight_scale": scales}, values
    groups = torch.arange(weight.shape[1]) // (method.group_size or weight.shape[1])
    if method.act_order:
        parent, _, last = module.rpartition(".")
        seed = zlib.crc32(f"{parent}.{SAME_INPUT.get(last, last)}".encode())
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
    found = round_to_integers(weight, method, groups)
    return LAYOUTS[method.name](found, method), found.values


def quantization_config(method: Method, ignored: list[str]) -> dict[str, Any]:
    group_size = -1 if method.group_size is None else method.group_size
    if method.name == "awq":
        options = {"version": "gemm", "zero_point": not method.symmetric, "modules_to_not_convert": ignored or None}
        return {"quant_method": "awq", "bits": method.bits, "group_size": group_size, **options}
    if method.name == "gptq":
        layout = "gptq" if method.version == 1 else "gptq_v2"
        options = {"sym": method.symmetric, "desc_act": method.act_order, "checkpoint_format": layout}
        return {"quant_method": "gptq", "bits": method.bits, "group_size": group_size, "lm_head": False, **options}
    if method.name == "fp8":
        options = {"fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": ignored}
        options |= {"weight_scale_semantics": "inverse"} if method.divides else {}
        return {"quant_method": "fp8", "weight_block_size": method.block, **options}
    return compressed_config(method, ignored)


def compressed_config(method: Method, ignored: list[str]) -> dict[str, Any]:
    strategy = (
        "block" if method.block else "tensor" if method.per_tensor else "group" if method.group_size else "channel"
    )
    if method.is_float and method.group_size == 16:
        strategy = "tensor_group"
    weights: dict[str, Any] = {
        "num_bits": method.bits,
        "type": "float" if method.is_float else "int",
        "symmetric": method.symmetric,
        "strategy": strategy,
        "group_size": method.group_size if "group" in strategy else None,
        "block_structure": method.block,
        "dynamic": False,
        "actorder": "group" if method.act_order else None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    activations = {**weights, "symmetric": True, "strategy": "token", "dynamic": True, "block_structure": None}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations if method.dynamic_activations else None,
        "output_activations": None,
    }
    layout = "float-quantized" if method.is_float else "pack-quantized" if method.is_packed else "int-quantized"
    if method.is_float and method.bits == 4:
        layout = f"{'nvfp4' if method.group_size == 16 else 'mxfp4'}-pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *ignored],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def write_checkpoint(source: Path, target: Path, method: Method, ignored: list[str] | None = None) -> Tensors:
    """Quantize the projections of a folder.

    Args:
        ignored: names of modules to keep as they are.

    Returns:
        The tensors of the source, with the values of the quantized matrices.
    """
    ignored = ignored or []
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: Tensors = {}
    values = {name: tensor for file in sorted(source.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    for name, tensor in values.items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or "_proj" not in module or module in ignored:
            tensors[name] = tensor
            continue
        found, values[name] = quantize(tensor, method, module)
        tensors.update({f"{module}.{end}": part.contiguous() for end, part in found.items()})
    save_file(tensors, target / FILE, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(method, ignored)
    (target / "config.json").write_text(json.dumps(config))
    return values
