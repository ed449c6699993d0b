"""Readers of `quantization_config`, one for each method of quantization.

AutoAWQ, AutoFP8, AutoGPTQ and GPTQModel, AutoRound, compressed-tensors, and transformers (FineGrainedFP8Config,
GPTQConfig, AwqConfig) write these fields. A field that changes the weights is read or rejected, others are logged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.kernels.weight_formats import GROUP
from chairlift.models.quantization import LINEAR, NVFP4_GROUP, REGEX, SHARED_SCALE, Quantization, WeightScheme
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.neutral_fields import is_neutral_quantization

logger = logging.getLogger(__name__)

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
    _only(fields, "method", method, f"the value of quant_method ({method})")
    _only(fields, "pack_dtype", "int32", "numbers that are packed in int32")
    quantization = READERS[method](fields)
    neutral = fields.reject_undeclared(f"{method} format", is_harmless=is_neutral_quantization)
    if names := [name.removeprefix(prefix) for name, value in neutral.items() if value]:
        logger.info(
            f"{config.source}: fields of quantization_config that do not change the weights: {', '.join(names)}"
        )
    return quantization


def _read_awq(fields: ConfigFields) -> Quantization:
    for key in ("version", "format", "checkpoint_format"):
        value = fields.get(key, "gemm")
        _choice(fields, key, ("gemm",), value.lower() if isinstance(value, str) else value)
    _only(fields, "desc_act", False, "inputs in their own order")
    _only(fields, "data_type", "int", "integers")
    fields.ignore("modules_to_not_convert", "sym")  # The tensors show the former; transformers writes sym in all files.
    return _of_modules(fields, "awq", ("bits", "group_size", "zero_point"), _awq_scheme)


def _awq_scheme(fields: ConfigFields) -> WeightScheme:
    bits = _choice(fields, "bits", (4,), fields.get("bits"))
    return WeightScheme("awq", bits, group_size=_group_size(fields), symmetric=not fields.flag("zero_point", True))


def _read_gptq(fields: ConfigFields, default: str = "gptq") -> Quantization:
    layout = _choice(fields, "checkpoint_format", ("gptq", "gptq_v2"), fields.get("checkpoint_format", default))
    _only(fields, "format", layout, f"the value of checkpoint_format ({layout})")
    _only(fields, "is_marlin_format", False, "the layouts gptq and gptq_v2")
    _only(fields, "data_type", "int", "integers")
    read = partial(_gptq_scheme, zero_point_offset=1 if layout == "gptq" else 0)
    return _of_modules(fields, "gptq", ("bits", "group_size", "sym", "desc_act"), read)


def _gptq_scheme(fields: ConfigFields, zero_point_offset: int) -> WeightScheme:
    group_size = _group_size(fields)
    return WeightScheme(
        "gptq",
        _choice(fields, "bits", (4, 8), fields.get("bits")),
        group_size=group_size,
        symmetric=fields.flag("sym", True),
        act_order=fields.flag("desc_act", False) and group_size is not None,
        zero_point_offset=zero_point_offset,
    )


def _read_auto_round(fields: ConfigFields) -> Quantization:
    """Read the format of AutoRound, which has the tensors of another one. Its own layout stores whole zero points."""
    packing = fields.get("packing_format", "auto_round:auto_gptq")
    _choice(fields, "packing_format", AUTO_ROUND_FORMATS, packing)
    if packing in ("auto_round:fp8", "auto_round:fp8_static"):
        return _read_fp8(fields)
    if packing == "auto_round:llm_compressor":
        return _read_auto_round_float4(fields)
    if packing == "auto_round:auto_awq":
        fields.set_defaults({"zero_point": not fields.flag("sym", True)})
        return _read_awq(fields)
    return _read_gptq(fields, "gptq" if packing == "auto_round:auto_gptq" else "gptq_v2")


AUTO_ROUND_FORMATS: Final = (
    *("auto_round", "auto_round:auto_awq", "auto_round:auto_gptq", "auto_round:gptqmodel"),
    *("auto_round:fp8", "auto_round:fp8_static", "auto_round:llm_compressor"),
)


def _read_auto_round_float4(fields: ConfigFields) -> Quantization:
    """Read NVFP4 or MXFP4 in the tensors of compressed-tensors."""
    kind = _choice(fields, "data_type", AUTO_ROUND_GROUPS, fields.get("data_type", "int"))
    size = _choice(fields, "group_size", (AUTO_ROUND_GROUPS[kind],), fields.get("group_size"))
    _only(fields, "bits", 4, "4 bits")
    _only(fields, "sym", True, "floats without zero points")
    for _, own in _read_modules(fields, "extra_config"):
        _only(own, "bits", 4, "the same floats in all quantized modules")
    return _of_all("compressed-tensors", WeightScheme("compressed-tensors", 4, is_float=True, group_size=size))


AUTO_ROUND_GROUPS: Final = {"nv_fp": NVFP4_GROUP, "mx_fp": GROUP}


def _read_fp8(fields: ConfigFields) -> Quantization:
    if fields.get("fmt") != "float8_e4m3fn":  # The name in files of MiniMax-M2.
        _only(fields, "fmt", "e4m3", "floats in E4M3")
    for key in ("format", "checkpoint_format"):
        _choice(fields, key, ("fp8", "float8_e4m3fn"), fields.get(key, "fp8"))
    for key, value in FP8_VALUES.items():
        _only(fields, key, value, f"the value {value!r}")
    # The tensors show which modules are quantized, and the scales of weights suffice without those of activations.
    fields.ignore("modules_to_not_convert", "ignored_layers", "weight_scale_method", "data_type")
    for _, own in _read_modules(fields, "extra_config"):
        _only(own, "bits", 8, "the same floats in all quantized modules")
    _choice(fields, "activation_scheme", ("dynamic", "static"), fields.get("activation_scheme", "dynamic"))
    _only(fields, "weight_scale_semantics", "inverse", "scales that divide, as GPTQModel stores them")
    scheme = WeightScheme("fp8", 8, is_float=True, divides=fields.get("weight_scale_semantics") is not None)
    block, group_size = fields.get("weight_block_size"), fields.get("group_size", -1)
    if group_size not in (-1, 0, block):
        raise _unsupported(fields, "group_size", group_size, "-1, and the value of weight_block_size")
    if block is not None:
        rows, inputs = _block(fields, "weight_block_size", block)
        scheme = replace(scheme, group_size=inputs, block_rows=rows)
    return _of_all("fp8", scheme)


FP8_VALUES: Final[dict[str, Any]] = {
    "bits": 8,
    "dequantize": False,
    "desc_act": False,
    "expert_dtype": "fp8",
    "sym": True,
}
"""The only supported values of fields of GPTQModel and transformers."""


def _read_mxfp4(fields: ConfigFields) -> Quantization:
    fields.ignore("modules_to_not_convert")  # The tensors of the file show which modules are quantized.
    _only(fields, "dequantize", False, "weights that are stored in MXFP4")
    return _of_all("mxfp4", WeightScheme("mxfp4", 4, is_float=True, group_size=GROUP))


def _of_all(method: str, scheme: WeightScheme) -> Quantization:
    return Quantization(method, (((LINEAR,), scheme),))


def _of_modules(
    fields: ConfigFields, method: str, keys: tuple[str, ...], read: Callable[[ConfigFields], WeightScheme]
) -> Quantization:
    """Read the scheme of all modules and those of some, which replace values of `keys`.

    A pattern in `dynamic` (GPTQModel) matches the beginning of names, after "+:". One in `extra_config` (AutoRound) is
    the name of a module or matches anywhere.
    """
    schemes = []
    for key in ("dynamic", "extra_config"):
        for name, own in _read_modules(fields, key):
            own.set_defaults({each: fields.get(each) for each in keys})
            _only(own, "data_type", "int", "integers")
            target = f"{REGEX}{name.removeprefix('+:')}"
            if key == "extra_config":
                target = name if MODULE_NAME.fullmatch(name) else f"{REGEX}.*(?:{name})"
            schemes.append((_targets(fields, key, [target]), read(own)))
    return Quantization(method, (*schemes, ((LINEAR,), read(fields))))


def _read_modules(fields: ConfigFields, key: str) -> Iterator[tuple[str, ConfigFields]]:
    """Yield patterns and fields of quantized modules. The tensors show which ones are not ("-:", or 16 bits)."""
    if (modules := fields.mapping(key)) is None:
        return
    for name, value in fields.get(key).items():
        if name.startswith("-:") or (isinstance(value, Mapping) and value.get("bits") in UNQUANTIZED_BITS):
            modules.ignore(name)
        elif (own := modules.mapping(name)) is not None:
            yield name, own


MODULE_NAME: Final = re.compile(r"[\w.-]+")
UNQUANTIZED_BITS: Final = (16, 32)


# -- compressed-tensors ----------------------------------------------------------------------------------------------

FORMATS: Final = (
    *("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mixed-precision"),
)


def _read_compressed_tensors(fields: ConfigFields) -> Quantization:
    _choice(fields, "format", FORMATS, fields.get("format", "pack-quantized"))
    sparsity = fields.get("sparsity_config") or {}
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense"):
        raise _unsupported(fields, "sparsity_config", sparsity, "dense matrices")
    if transform := fields.get("transform_config"):
        raise _unsupported(fields, "transform_config", transform, "matrices without transforms")
    groups = fields.mapping("config_groups")
    names = fields.get("config_groups")
    if groups is None or not names:
        raise _unsupported(fields, "config_groups", names, "at least one group with targets and weights")
    schemes = [group for name in names if (group := _read_group(groups, name)) is not None]
    return Quantization("compressed-tensors", tuple(schemes), _targets(fields, "ignore", fields.get("ignore", [])))


def _read_group(groups: ConfigFields, name: str) -> tuple[tuple[str, ...], WeightScheme] | None:
    """Read the targets and the scheme of a group; None if it has activations only, which are not quantized here."""
    group = groups.mapping(name)
    if group is None:
        raise _unsupported(groups, name, groups.get(name), "groups with weights")
    if group.get("format") is not None:
        _choice(group, "format", FORMATS, group.get("format"))
    targets, weights = _targets(group, "targets", group.get("targets", [])), group.mapping("weights")
    return None if weights is None else (targets, _read_weights(weights))


def _read_weights(weights: ConfigFields) -> WeightScheme:
    is_float = _choice(weights, "type", ("int", "float"), weights.get("type", "int")) == "float"
    bits = _choice(weights, "num_bits", (4, 8), weights.get("num_bits", 8))
    _only(weights, "dynamic", False, "weights with stored scales")
    supported = STRATEGIES[is_float, bits]
    strategy = _choice(weights, "strategy", supported, weights.get("strategy") or _strategy(weights))
    symmetric = weights.flag("symmetric", True)
    if is_float:
        _only(weights, "symmetric", True, "floats without zero points")
    is_float4 = is_float and bits == 4
    if not is_float4:
        _only(weights, "is_mx", False, "scales that are floats")
    weights.ignore("is_mx")
    rows, group_size = 1, None
    if is_float4:
        group_size = _choice(weights, "group_size", (FLOAT4_GROUPS[strategy],), weights.get("group_size"))
    elif strategy == "group":
        group_size = _group_size(weights)
    elif strategy == "block":
        rows, group_size = _block(weights, "block_structure", weights.get("block_structure"))
    weights.ignore("group_size", "block_structure")  # Other strategies ignore them.
    act_order = weights.get("actorder") in ("group", "dynamic") and group_size is not None
    return WeightScheme("compressed-tensors", bits, is_float, group_size, rows, symmetric, act_order)


STRATEGIES: Final = {
    (False, 4): ("tensor", "channel", "group"),
    (False, 8): ("tensor", "channel", "group"),
    (True, 4): ("tensor_group", "group"),
    (True, 8): ("tensor", "channel", "block"),
}
"""The supported strategies of weights by whether they are floats, and their bits."""

FLOAT4_GROUPS: Final = {"tensor_group": NVFP4_GROUP, "group": GROUP}
"""The inputs with one scale in NVFP4, where groups have a common scale too, and in MXFP4."""


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
    "auto-round": _read_auto_round,
}
"""The reader for each `quant_method`."""
