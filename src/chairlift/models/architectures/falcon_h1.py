"""Falcon-H1 (Technology Innovation Institute, 2025): attention and Mamba-2 in parallel in every layer.

`LlamaSizes` with a multiplier at every input and output (muP). Multipliers of inputs are factors of the norms before
them, and the multiplier of the keys is a factor of attention scores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import NormSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture, renamed_in_layers
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader
from chairlift.models.reading.llama_sizes import LlamaSizes, NormNames
from chairlift.models.reading.mamba_sizes import MambaSizes, mamba_gguf_names, read_gguf_mamba_sizes, read_mamba_sizes

_READER: Final = LlamaConfigReader("falcon_h1", reads_mlp_bias=True, norms=NormNames(before_mlp="pre_ff_layernorm"))


def read_falcon_h1(fields: ConfigFields) -> ModelConfig:
    """Read a Falcon-H1 model. The matrices of GGUF files contain the multipliers."""
    fields.allow_only("mamba_use_mlp", True, "every layer must have a network")
    sizes = _READER.read_sizes(fields)
    scale = sizes.head_dim**-0.5 * fields.number("key_multiplier", 1.0)
    sizes = replace(
        sizes,
        attention_scale=scale,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=fields.number("lm_head_multiplier", 1.0),
    )
    mamba, config = _read_mamba(fields, sizes), sizes.declare()
    return replace(config, layers=tuple(_declare(fields, mamba, *pair) for pair in enumerate(config.layers)))


def _read_mamba(fields: ConfigFields, sizes: LlamaSizes) -> MambaSizes:
    if isinstance(fields, GGUFHeader):
        return read_gguf_mamba_sizes(fields, sizes.norm_eps)
    mamba = read_mamba_sizes(fields, sizes.hidden_size)
    has_norm = fields.flag("mamba_rms_norm", False)
    return replace(
        mamba,
        output_bias=fields.flag("projectors_bias", False),
        norm_eps=sizes.norm_eps if has_norm else None,
        norm_before_gate=fields.flag("mamba_norm_before_gate", True),
        projection_scales=_read_multipliers(fields, "ssm_multipliers", 5),
    )


def _declare(fields: ConfigFields, mamba: MambaSizes, index: int, layer: LayerSpec) -> LayerSpec:
    """Give a layer Mamba-2 beside its attention, and the multipliers."""
    before, mlp = layer.attention_norms.before, layer.feed_forward
    assert before is not None, "every layer has norms"
    assert mlp is not None, "every layer has a network"
    gate, down = _read_multipliers(fields, "mlp_multipliers", 2)
    return replace(
        layer,
        attention_norms=_branch(fields, before, "attention"),
        recurrence=mamba.declare(f"model.layers.{index}.mamba", before.size),
        recurrence_norms=_branch(fields, before, "ssm"),
        feed_forward=replace(mlp, parameters=(gate,)),
        feed_forward_norms=replace(layer.feed_forward_norms, multiplier=down),
    )


def _branch(fields: ConfigFields, before: NormSpec, kind: str) -> BranchNorms:
    norm = replace(before, weight_multiplier=fields.number(f"{kind}_in_multiplier", 1.0))
    return BranchNorms(norm, multiplier=fields.number(f"{kind}_out_multiplier", 1.0))


def _read_multipliers(fields: ConfigFields, key: str, count: int) -> tuple[float, ...]:
    """Read a list of factors."""
    values = fields.get(key, [1.0] * count)
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
        raise fields.error(key, f"must be a list of {count} numbers, got {values!r:.80}")
    return tuple(map(float, values))


FALCON_H1: Final = Architecture(
    name="falcon_h1",
    hf_readers={"FalconH1ForCausalLM": read_falcon_h1},
    gguf_readers={"falcon-h1": read_falcon_h1},
    gguf_scaled=frozenset(("falcon-h1",)),
    gguf_names={
        **GGUF_NAMES,
        **mamba_gguf_names("mamba"),
        "model.layers.{}.pre_ff_layernorm.weight": "blk.{}.ffn_norm",
    },
    stacked_names={
        "model.norm": "model.final_layernorm",
        **renamed_in_layers({f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}),
    },
)
