"""Apertus (Swiss AI Initiative, 2025): Llama with norms of heads, and networks with xIELU instead of a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader
from chairlift.models.reading.llama_sizes import NormNames

PARAMETERS: Final = ("alpha_p", "alpha_n", "beta", "eps")
"""The parameters of xIELU: tensors of each layer in folders, and metadata in GGUF files."""

ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rotary embedding of files that do not contain one (`ApertusConfig` of transformers)."""


def read_apertus(fields: ConfigFields) -> ModelConfig:
    """Read an Apertus model. Other fields than those of Llama are fixed."""
    fields.allow_only("qk_norm", True, "queries and keys have norms")
    fields.allow_only("post_norm", False, "norms precede the branches of a layer")
    config = _READER(fields)
    layers = []
    for layer, parameters in zip(config.layers, _parameters(fields, config.num_layers), strict=True):
        assert layer.feed_forward is not None, "every layer has a network"
        layers.append(replace(layer, feed_forward=replace(layer.feed_forward, parameters=parameters)))
    return replace(config, layers=tuple(layers))


def _parameters(fields: ConfigFields, layers: int) -> Iterator[tuple[float | str, ...]]:
    """Return the parameters of xIELU of each layer, in a folder the names of their tensors."""
    if not isinstance(fields, GGUFHeader):
        names = (f"model.layers.{layer}.mlp.act_fn" for layer in range(layers))
        return (tuple(f"{name}.{parameter}" for parameter in PARAMETERS) for name in names)
    return zip(*(_values(fields, f"xielu.{parameter}", layers) for parameter in PARAMETERS), strict=True)


def _values(fields: ConfigFields, key: str, layers: int) -> list[float]:
    """Read a number for each layer, or one for all."""
    value = fields.get(key)
    values = value if isinstance(value, list) else [value] * layers
    if len(values) != layers or not all(isinstance(each, float) for each in values):
        raise fields.error(key, f"must be a number or hold one for each of {layers} layers, got {value!r:.80}")
    return values


_READER: Final = LlamaConfigReader(
    "apertus",
    norms=NormNames("attention_layernorm", None, "feedforward_layernorm", None),
    qk_norm="heads",
    activation="xielu",
    gated=False,
    default_theta=ROPE["rope_theta"],
    defaults={"rope_scaling": ROPE},
)

APERTUS: Final = Architecture(
    name="apertus",
    hf_readers={"ApertusForCausalLM": read_apertus},
    gguf_readers={"apertus": read_apertus},
    gguf_names={
        **GGUF_NAMES,
        "model.layers.{}.attention_layernorm": "blk.{}.attn_norm",
        "model.layers.{}.feedforward_layernorm": "blk.{}.ffn_norm",
    },
)
