"""Granite 3 and 4 (IBM, 2024 and 2025).

`LlamaSizes` with multipliers of the embedding, both branches, attention scores and logits. Granite 4 has a feed-forward
network of other names, with gate and up in one matrix, and some models have no rotary embedding. Granite 4 H has
Mamba-2 in place of attention in most layers, and some models have experts beside the network.

Granite-MoE has experts in every layer. Its safetensors files hold the experts of a layer in one tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, read_gguf_experts
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture, StoredName, renamed_in_layers
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields
from chairlift.models.reading.expert_fields import read_experts
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import check_recurrent_layers
from chairlift.models.reading.llama_sizes import ExpertNames, ExpertSizes, LlamaSizes
from chairlift.models.reading.mamba_sizes import mamba_gguf_names, read_gguf_mamba_sizes, read_mamba_sizes

LAYER_TYPES: Final = {"attention": False, "full_attention": False, "mamba": True, "linear_attention": True}
"""The types of layers in files of transformers 4 and 5, and whether such a layer has Mamba-2 in place of attention."""

NAMES: Final = ExpertNames(
    router="block_sparse_moe.router.layer",
    up=("block_sparse_moe.experts.{}.input_linear",),
    down="block_sparse_moe.experts.{}.output_linear",
    shared_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)

# -- config.json -----------------------------------------------------------------------------------------------------


class GraniteConfigReader(LlamaConfigReader):
    """The reader of Granite 3 and Granite-MoE."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        scale = sizes.head_dim**-0.5 if isinstance(fields, GGUFHeader) else 1.0
        return replace(
            sizes,
            attention_scale=fields.number("attention_multiplier", scale),
            embedding_multiplier=fields.number("embedding_multiplier", 1.0),
            residual_multiplier=fields.number("residual_multiplier", 1.0),
            logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
        )


_READER4: Final = GraniteConfigReader(
    "granitemoehybrid", inner_key="shared_intermediate_size", fused_projections=("gate_up_proj",)
)


def _read_experts(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    return read_experts(fields, "chosen", sizes.intermediate_size, NAMES)


def read_shared_experts(fields: ConfigFields, sizes: LlamaSizes, names: ExpertNames = NAMES) -> ExpertSizes:
    """Read the experts of a model, beside which shared ones may be, by the given names in its files."""
    experts = read_experts(fields, "chosen", sizes.intermediate_size, names)
    return replace(experts, shared_size=fields.integer("shared_intermediate_size", 0, low=0))


def read_granite4(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of a Granite 4 model (`GraniteMoeHybridForCausalLM`)."""
    fields.allow_only("normalization_function", "rmsnorm", "norms must be RMSNorm")
    sizes = _READER4.read_sizes(fields)
    if fields.choice("position_embedding_type", ("nope", "rope"), "nope") == "nope":
        sizes = sizes.without_rope()
    mamba = replace(read_mamba_sizes(fields, sizes.hidden_size), norm_eps=sizes.norm_eps)
    inner = fields.integer("intermediate_size")
    if fields.get("num_local_experts", REQUIRED) == 0:
        fields.ignore("num_experts_per_tok")
    else:
        experts = read_experts(fields, "chosen", inner, NAMES)
        sizes = replace(sizes, experts=replace(experts, shared_size=sizes.intermediate_size))
    return mamba.replace_attention(sizes.declare(), _read_layers(fields, sizes.num_layers))


def _read_layers(fields: ConfigFields, layers: int) -> list[bool]:
    """Read whether each layer has Mamba-2 in place of attention. The default of transformers is Mamba-2 in all."""
    key = "layer_types" if fields.get("layer_types") is not None else "layers_block_type"
    types = fields.get(key, ["mamba"] * layers)
    return check_recurrent_layers(fields, key, types, layers, LAYER_TYPES)


# -- GGUF ------------------------------------------------------------------------------------------------------------


def read_granite_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of Granite 3, Granite 4 (whose names are the same), 4 H or Granite-MoE."""
    kv_heads = header.get("num_key_value_heads")
    is_hybrid = header.name == "granitehybrid" and isinstance(kv_heads, list) and 0 in kv_heads
    has_experts = is_hybrid or header.name == "granitemoe"
    reader = GraniteConfigReader(
        header.name, experts=read_gguf_experts if has_experts else None, has_recurrence=is_hybrid
    )
    sizes = reader.read_sizes(header)
    experts, inner, key = sizes.experts, sizes.intermediate_size, "shared_expert_intermediate_size"
    if not header.flag("rope.scaling.finetuned", True):
        sizes = sizes.without_rope()
    if experts is None:
        header.allow_only(key, inner, f"it must be feed_forward_length ({inner})")
    else:
        sizes = replace(sizes, experts=replace(experts, shared_size=header.integer(key, 0, low=0)))
    if is_hybrid:
        mamba = read_gguf_mamba_sizes(header, sizes.norm_eps)
        return mamba.replace_attention(sizes.declare(), header.layers_without_kv(sizes.num_layers))
    names = ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")
    header.ignore(*(f"ssm.{name}" for name in names))  # No effect without Mamba-2.
    return sizes.declare()


INPUT: Final = StoredName("model.layers.{}.shared_mlp.input_linear", row_step=2, block="part")
OUTPUT: Final = StoredName("model.layers.{}.shared_mlp.output_linear")
GGUF_ARCHITECTURES: Final = ("granite", "granitehybrid", "granitemoe")

GRANITE: Final = Architecture(
    name="granite",
    hf_readers={
        "GraniteForCausalLM": GraniteConfigReader("granite", reads_mlp_bias=True),
        "GraniteMoeForCausalLM": GraniteConfigReader("granitemoe", experts=_read_experts),
        "GraniteMoeSharedForCausalLM": GraniteConfigReader("granitemoeshared", experts=read_shared_experts),
        "GraniteMoeHybridForCausalLM": read_granite4,
    },
    gguf_readers=dict.fromkeys(GGUF_ARCHITECTURES, read_granite_gguf),
    gguf_names={**GGUF_NAMES, **mamba_gguf_names("mamba")},
    gguf_interleaved=frozenset(GGUF_ARCHITECTURES),
    stacked_names={
        **renamed_in_layers(
            {f"block_sparse_moe.experts.{{}}.{x}_linear": f"block_sparse_moe.{x}_linear" for x in ("input", "output")}
        ),
        "model.layers.{}.mlp.gate_up_proj": INPUT.name,
        # GGUF files divide the network of Granite 4, and adapters have the modules of transformers.
        **{
            f"model.layers.{{}}.{network}.{name}_proj": place
            for network in ("mlp", "mlp.shared_experts")
            for name, place in {"gate": INPUT, "up": INPUT._replace(first_row=1), "down": OUTPUT}.items()
        },
    },
)
