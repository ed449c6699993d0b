"""Readers of `quantization_config`, one for each method of quantization.

AutoAWQ, AutoGPTQ and GPTQModel, compressed-tensors, and transformers (FineGrainedFP8Config) write these fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.kernels.weight_formats import GROUP
from chairlift.models.quantization import REGEX, SHARED_SCALE, Quantization, WeightScheme
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.neutral_fields import NEUTRAL_QUANTIZATION

ALTERNATIVE: Final = "use a GGUF file, or the unquantized model with --quantization int8"
"""The way out that every message names."""


def read_quantization(config: ConfigFields) -> Quantization | None:
    """Read `quantization_config`, or return None if the checkpoint is not quantized.

    Raises:
        ModelLoadError: the method or one of its options is not supported; names the value and what is supported.
    """
    value = config.get("quantization_config")
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise config.error("quantization_config", f"must be an object, got {value!r:.200}")
    prefix = "quantization_config."
    fields = ConfigFields({f"{prefix}{key}": item for key, item in value.items()}, config.source, prefix)
    method = _choice(fields, "quant_method", READERS, fields.get("quant_method", "none"))
    quantization = READERS[method](fields)
    fields.reject_undeclared(f"{method} format", NEUTRAL_QUANTIZATION)
    return quantization


def _read_awq(fields: ConfigFields) -> Quantization:
    version = fields.get("version", "gemm")
    _choice(fields, "version", ("gemm",), version.lower() if isinstance(version, str) else version)
    _only(fields, "zero_point", True, "AWQ matrices with zero points")
    bits = _choice(fields, "bits", (4,), fields.get("bits"))
    fields.ignore("modules_to_not_convert")  # The tensors of the file show which modules are quantized.
    return _of_all("awq", WeightScheme("awq", bits, group_size=_group_size(fields), symmetric=False))


def _read_gptq(fields: ConfigFields) -> Quantization:
    layout = _choice(fields, "checkpoint_format", ("gptq", "gptq_v2"), fields.get("checkpoint_format", "gptq"))
    _only(fields, "format", layout, f"the value of checkpoint_format ({layout})")
    _only(fields, "is_marlin_format", False, "the layouts gptq and gptq_v2")
    _only(fields, "pack_dtype", "int32", "numbers that are packed in int32")
    if fields.get("dynamic"):
        raise _unsupported(fields, "dynamic", fields.get("dynamic"), "the same bits and group_size in all modules")
    group_size = _group_size(fields)
    scheme = WeightScheme(
        "gptq",
        _choice(fields, "bits", (4, 8), fields.get("bits")),
        group_size=group_size,
        symmetric=fields.flag("sym", True),
        act_order=fields.flag("desc_act", False) and group_size is not None,
        zero_point_offset=1 if layout == "gptq" else 0,
    )
    return _of_all("gptq", scheme)


def _read_fp8(fields: ConfigFields) -> Quantization:
    _only(fields, "fmt", "e4m3", "floats in E4M3")
    _choice(fields, "activation_scheme", ("dynamic",), fields.get("activation_scheme", "dynamic"))
    fields.ignore("modules_to_not_convert", "ignored_layers")  # The tensors show which modules are quantized.
    block = fields.get("weight_block_size")
    if block is None:
        return _of_all("fp8", WeightScheme("fp8", 8, is_float=True))
    rows, inputs = _block(fields, "weight_block_size", block)
    return _of_all("fp8", WeightScheme("fp8", 8, is_float=True, group_size=inputs, block_rows=rows))


def _read_mxfp4(fields: ConfigFields) -> Quantization:
    fields.ignore("modules_to_not_convert")  # The tensors of the file show which modules are quantized.
    _only(fields, "dequantize", False, "weights that are stored in MXFP4")
    return _of_all("mxfp4", WeightScheme("mxfp4", 4, is_float=True, group_size=GROUP))


def _of_all(method: str, scheme: WeightScheme) -> Quantization:
    return Quantization(method, ((("Linear",), scheme),))


# -- compressed-tensors ----------------------------------------------------------------------------------------------

FORMATS: Final = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")


def _read_compressed_tensors(fields: ConfigFields) -> Quantization:
    _choice(fields, "format", FORMATS, fields.get("format", "pack-quantized"))
    _only(fields, "kv_cache_scheme", None, "K and V without scales; select their type by --kv-cache-dtype")
    sparsity = fields.get("sparsity_config") or {}
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense"):
        raise _unsupported(fields, "sparsity_config", sparsity, "dense matrices")
    if transform := fields.get("transform_config"):
        raise _unsupported(fields, "transform_config", transform, "matrices without transforms")
    groups = fields.mapping("config_groups")
    names = fields.get("config_groups")
    if groups is None or not names:
        raise _unsupported(fields, "config_groups", names, "at least one group with targets and weights")
    schemes = tuple(_read_group(groups, name) for name in names)
    return Quantization("compressed-tensors", schemes, _targets(fields, "ignore", fields.get("ignore", [])))


def _read_group(groups: ConfigFields, name: str) -> tuple[tuple[str, ...], WeightScheme]:
    group = groups.mapping(name)
    weights = None if group is None else group.mapping("weights")
    if group is None or weights is None:
        raise _unsupported(groups, name, groups.get(name), "groups with weights")
    _only(group, "output_activations", None, "outputs without quantization")
    if group.get("format") is not None:
        _choice(group, "format", FORMATS, group.get("format"))
    if (inputs := group.mapping("input_activations")) is not None:
        _check_activations(inputs)
    return _targets(group, "targets", group.get("targets", [])), _read_weights(weights)


def _check_activations(inputs: ConfigFields) -> None:
    """Accept activations that are quantized at run time. The kernels use finer scales than the checkpoint requires."""
    if inputs.get("dynamic", False) is not True:
        raise _unsupported(inputs, "dynamic", inputs.get("dynamic", False), "scales of activations at run time (true)")
    _choice(inputs, "num_bits", (8,), inputs.get("num_bits", 8))
    inputs.ignore("type", "symmetric", "strategy", "group_size")


def _read_weights(weights: ConfigFields) -> WeightScheme:
    is_float = _choice(weights, "type", ("int", "float"), weights.get("type", "int")) == "float"
    bits = _choice(weights, "num_bits", (8,) if is_float else (4, 8), weights.get("num_bits", 8))
    _only(weights, "dynamic", False, "weights with stored scales")
    _only(weights, "is_mx", False, "scales that are floats")
    supported = ("tensor", "channel", "block") if is_float else ("tensor", "channel", "group")
    strategy = _choice(weights, "strategy", supported, weights.get("strategy") or _strategy(weights))
    symmetric = weights.flag("symmetric", True)
    if is_float:
        _only(weights, "symmetric", True, "floats without zero points")
    rows, group_size = 1, None
    if strategy == "group":
        group_size = _group_size(weights)
    elif strategy == "block":
        rows, group_size = _block(weights, "block_structure", weights.get("block_structure"))
    weights.ignore("group_size", "block_structure")  # Other strategies ignore them.
    act_order = weights.get("actorder") in ("group", "dynamic") and group_size is not None
    return WeightScheme("compressed-tensors", bits, is_float, group_size, rows, symmetric, act_order)


def _strategy(weights: ConfigFields) -> str:
    """The strategy that compressed-tensors derives from the group size."""
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _targets(fields: ConfigFields, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fields.error(key, f"must be a list of module names, got {value!r}")
    for target in value:
        try:
            re.compile(target.removeprefix(REGEX))
        except (re.error, RecursionError, OverflowError) as error:
            if target.startswith(REGEX):
                raise fields.error(key, f"has {target!r}, which is not a regular expression: {error}") from None
    return tuple(value)


# -- values ----------------------------------------------------------------------------------------------------------


def _group_size(fields: ConfigFields) -> int | None:
    size = fields.get("group_size", -1)
    if size == -1 and not isinstance(size, bool):
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < GROUP or size % GROUP:
        raise _unsupported(fields, "group_size", size, f"-1 and the multiples of {GROUP}")
    return size


def _block(fields: ConfigFields, key: str, value: Any) -> tuple[int, int]:
    """Return the outputs and inputs of a block of floats."""
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    if not is_pair or value[1] % SHARED_SCALE:
        raise _unsupported(fields, key, value, f"[n, {SHARED_SCALE}] and multiples of {SHARED_SCALE} inputs")
    return value[0], value[1]


def _choice(fields: ConfigFields, key: str, supported: Collection[Any], value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int) or value not in supported:
        raise _unsupported(fields, key, value, ", ".join(map(str, supported)))
    return value


def _only(fields: ConfigFields, key: str, supported: Any, description: str) -> None:
    value = fields.get(key, supported)
    if value != supported:
        raise _unsupported(fields, key, value, description)


def _unsupported(fields: ConfigFields, key: str, value: Any, supported: str) -> ModelLoadError:
    method = fields.get("quant_method", "compressed-tensors")  # Nested fields do not have it.
    name = "" if key == "quant_method" else f" in {method} checkpoints"
    return fields.error(key, f"is {value!r:.200}, which is not supported{name}; supported: {supported}; {ALTERNATIVE}")


READERS: Final[dict[str, Callable[[ConfigFields], Quantization]]] = {
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}
"""The reader for each `quant_method`."""
