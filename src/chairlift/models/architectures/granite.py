"""Granite 3 and 4 (IBM, 2024 and 2025).

`LlamaSizes` with multipliers of the embedding, both branches, attention scores and logits. Granite 4 has a feed-forward
network of other names, with gate and up in one matrix, and some models have no rotary embedding. Granite 4 H has
Mamba-2 in place of attention in most layers, and some models have experts beside the network.

Granite-MoE has experts in every layer. Its safetensors files hold those of a layer in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chairlift.kernels.routing import ExpertSoftmax
from chairlift.models.architectures.llama import LlamaConfigReader, no_windows
from chairlift.models.declaration import FeedForwardSpec, LayerSpec, ModelConfig, ParallelExpertsSpec
from chairlift.models.reading.architecture import Architecture, GGUFHeader
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields
from chairlift.models.reading.expert_fields import read_experts
from chairlift.models.reading.gguf_sizes import GGUF_NAMES, read_gguf_sizes
from chairlift.models.reading.layer_fields import check_recurrent_layers
from chairlift.models.reading.llama_sizes import ExpertNames, LlamaSizes
from chairlift.models.reading.mamba_sizes import mamba_gguf_names, read_gguf_mamba_sizes, read_mamba_sizes

LAYER_TYPES: Final = {"attention": False, "full_attention": False, "mamba": True, "linear_attention": True}
"""The types of layers in files of transformers 4 and 5, and whether such a layer has Mamba-2 in place of attention."""

FIELDS_WITHOUT_EFFECT: Final = ("init_method", "output_router_logits", "router_aux_loss_coef")

GGUF_FIELDS_WITHOUT_EFFECT: Final = (
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)

# -- config.json -----------------------------------------------------------------------------------------------------

_READER: Final = LlamaConfigReader("granite", no_windows, architecture="granite", reads_mlp_bias=True)
_MOE_READER: Final = LlamaConfigReader("granitemoe", no_windows, architecture="granite")
_READER4: Final = LlamaConfigReader(
    "granitemoehybrid", no_windows, architecture="granite", inner_key="shared_intermediate_size"
)


def read_granite(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of a Granite 3 model."""
    return _with_multipliers(fields, _READER.read_sizes(fields)).declare()


def read_granite_moe(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of a Granite-MoE model, which has experts in every layer."""
    sizes = _with_multipliers(fields, _MOE_READER.read_sizes(fields))
    return replace(sizes, experts=read_experts(fields, sizes.intermediate_size, "chosen", NAMES)).declare()


def read_granite4(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of a Granite 4 model (`GraniteMoeHybridForCausalLM`)."""
    fields.allow_only("normalization_function", "rmsnorm", "norms must be RMSNorm")
    for key in FIELDS_WITHOUT_EFFECT:
        fields.get(key)
    sizes = _with_multipliers(fields, _READER4.read_sizes(fields))
    if fields.choice("position_embedding_type", ("nope", "rope"), "nope") == "nope":
        sizes = _without_rope(sizes)
    mamba = read_mamba_sizes(fields, sizes.hidden_size)
    mamba = replace(mamba, norm_eps=sizes.norm_eps, norm_groups=mamba.num_groups)
    layers = [_with_shared_mlp(index, layer) for index, layer in enumerate(sizes.declare().layers)]
    layers = _with_experts(fields, sizes, layers)
    for index, has_mamba in enumerate(_read_layers(fields, sizes.num_layers)):
        if has_mamba:
            layers[index] = mamba.replace_attention(layers[index], f"model.layers.{index}.mamba", sizes.hidden_size)
    return replace(sizes.declare(), layers=tuple(layers))


def _with_multipliers(fields: ConfigFields, sizes: LlamaSizes) -> LlamaSizes:
    return replace(
        sizes,
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    )


def _without_rope(sizes: LlamaSizes) -> LlamaSizes:
    return replace(sizes, ropes=(None,) * sizes.num_layers)


def _read_layers(fields: ConfigFields, layers: int) -> list[bool]:
    """Read whether each layer has Mamba-2 in place of attention. The default of transformers is Mamba-2 in all."""
    key = "layer_types" if fields.get("layer_types") is not None else "layers_block_type"
    types = fields.get(key, ["mamba"] * layers)
    return check_recurrent_layers(fields, key, types, layers, LAYER_TYPES)


def _with_experts(fields: ConfigFields, sizes: LlamaSizes, layers: list[LayerSpec]) -> list[LayerSpec]:
    """Give each layer the experts beside its network, if the model has some."""
    inner = fields.integer("intermediate_size")
    if fields.get("num_local_experts", REQUIRED) == 0:
        fields.get("num_experts_per_tok")
        return layers
    sizes = replace(sizes, experts=read_experts(fields, inner, "chosen", NAMES))
    return [
        _beside_experts(layer, sizes.declare_feed_forward(f"model.layers.{index}", index))
        for index, layer in enumerate(layers)
    ]


def _beside_experts(layer: LayerSpec, mixture: FeedForwardSpec) -> LayerSpec:
    before = layer.feed_forward_norms.before
    assert before is not None, "every layer has norms"
    return replace(layer, parallel_experts=ParallelExpertsSpec(mixture, before))


def _with_shared_mlp(
    index: int, layer: LayerSpec, up: Sequence[str] = ("input_linear",), down: str = "output_linear"
) -> LayerSpec:
    """Give the matrices of the feed-forward network the names of Granite 4: of gate and up, one each or one for both,
    and of down."""
    prefix, mlp = f"model.layers.{index}.shared_mlp", layer.feed_forward
    assert mlp is not None, "every layer has a network"
    size = mlp.up.out_features // len(up)
    first = replace(mlp.up, parts=tuple((f"{prefix}.{name}", size) for name in up))
    last = replace(mlp.down, parts=((f"{prefix}.{down}", mlp.down.out_features),))
    return replace(layer, feed_forward=replace(mlp, up=first, down=last))


# -- GGUF ------------------------------------------------------------------------------------------------------------


def read_granite_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of Granite 3, Granite 4 (whose names are the same), 4 H or Granite-MoE."""
    fields, kv_heads = header.fields, header.fields.get("attention.head_count_kv")
    is_hybrid = header.name == "granitehybrid" and isinstance(kv_heads, list) and 0 in kv_heads
    softmax: ExpertSoftmax | None = "chosen" if is_hybrid or header.name == "granitemoe" else None
    sizes = read_gguf_sizes(header, expert_softmax=softmax, has_recurrence=is_hybrid)
    inner, key = sizes.intermediate_size, "expert_shared_feed_forward_length"
    if not fields.flag("rope.scaling.finetuned", True):
        sizes = _without_rope(sizes)
    sizes = replace(
        sizes,
        architecture="granite",
        attention_scale=fields.number("attention.scale", sizes.head_dim**-0.5),
        embedding_multiplier=fields.number("embedding_scale", 1.0),
        residual_multiplier=fields.number("residual_scale", 1.0),
        logits_multiplier=1.0 / fields.number("logit_scale", 1.0),
    )
    if sizes.experts is None or not is_hybrid:
        fields.allow_only(key, inner, f"it must be feed_forward_length ({inner})")
    if is_hybrid:
        return _declare_hybrid(header, sizes, kv_heads, fields.integer(key, inner))
    for each in GGUF_FIELDS_WITHOUT_EFFECT:
        fields.get(each)
    return sizes.declare()


def _declare_hybrid(header: GGUFHeader, sizes: LlamaSizes, heads: list[int], shared: int) -> ModelConfig:
    """Declare a model of which a layer without KV heads has Mamba-2.

    Args:
        heads: the number of KV heads of each layer.
        shared: the inner size of the network beside experts.
    """
    if len(heads) != sizes.num_layers:
        raise header.fields.error(
            "attention.head_count_kv",
            f"must hold the number of KV heads of each of {sizes.num_layers} layers, got {heads!r:.80}",
        )
    dense = sizes if sizes.experts is None else replace(sizes, experts=None, intermediate_size=shared)
    config, mamba = dense.declare(), read_gguf_mamba_sizes(header, sizes.norm_eps)
    layers = []
    for index, layer in enumerate(config.layers):
        if sizes.experts is not None:
            layer = _beside_experts(layer, sizes.declare_feed_forward(f"model.layers.{index}", index))
            layer = _with_shared_mlp(index, layer, ("gate_proj", "up_proj"), "down_proj")
        if heads[index] == 0:
            layer = mamba.replace_attention(layer, f"model.layers.{index}.mamba", sizes.hidden_size)
        layers.append(layer)
    return replace(config, layers=tuple(layers))


NAMES: Final = ExpertNames(
    router="block_sparse_moe.router.layer",
    up=("block_sparse_moe.experts.{}.input_linear",),
    down="block_sparse_moe.experts.{}.output_linear",
)
GGUF_ARCHITECTURES: Final = ("granite", "granitehybrid", "granitemoe")

GRANITE_GGUF_NAMES: Final = {
    **GGUF_NAMES,
    **mamba_gguf_names("mamba"),
    **{f"model.layers.{{}}.shared_mlp.{name}_proj": f"blk.{{}}.ffn_{name}_shexp" for name in ("gate", "up", "down")},
}

GRANITE: Final = Architecture(
    name="granite",
    hf_readers={
        "GraniteForCausalLM": read_granite,
        "GraniteMoeForCausalLM": read_granite_moe,
        "GraniteMoeHybridForCausalLM": read_granite4,
    },
    gguf_readers=dict.fromkeys(GGUF_ARCHITECTURES, read_granite_gguf),
    gguf_names=GRANITE_GGUF_NAMES,
    gguf_interleaved=frozenset(GGUF_ARCHITECTURES),
    stacked_names={
        f"model.layers.{{}}.block_sparse_moe.experts.{{}}.{name}": f"model.layers.{{}}.block_sparse_moe.{name}"
        for name in ("input_linear", "output_linear")
    },
)
