"""Kimi Linear (Kimi Team, 2025): `LlamaSizes` with Kimi Delta Attention in three of four layers, latent attention
without positions in the others, and the experts of DeepSeek-V3.

Kimi Delta Attention is the gated delta rule with a decay for each channel of a key. Two matrices each project the
decays and the gate of its output, with the size of a head between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from chairlift.models.architectures.deepseek import DEEPSEEK, DEEPSEEK_GGUF_NAMES, DeepseekConfigReader
from chairlift.models.declaration.matrix_spec import NormSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.declaration.recurrence_spec import RecurrenceSpec
from chairlift.models.reading.architecture import Architecture, renamed_in_layers
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.delta_sizes import DeltaSizes
from chairlift.models.reading.gguf_header import SHARED_EXPERT, GGUFHeader, names_in_layers
from chairlift.models.reading.layer_fields import DELTA_LAYERS, check_recurrent_layers, read_width
from chairlift.models.reading.llama_sizes import LlamaSizes

TYPE_LISTS: Final = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
"""Lists of numbers of layers, from 1 on, in `linear_attn_config` -> the type of these layers."""

FIELD_NAMES: Final = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""The names of fields of DeepSeek-V3 -> those that transformers writes, as the published file has them."""


@dataclass(frozen=True)
class KimiLinearConfigReader(DeepseekConfigReader):
    """The reader of both kinds of files."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        # No layer has positions, and the size of a head in GGUF files has no meaning.
        fields.ignore("rope_theta", "attention.value_length")
        config = super().__call__(fields)
        layers = (
            replace(layer, attention=replace(spec, rope=None)) for layer in config.layers if (spec := layer.attention)
        )
        config = replace(config, layers=tuple(layers))
        sizes = self.read_sizes(fields)
        declare = partial(_declare_delta, _read_delta(fields, sizes), sizes)
        return config.with_recurrences(_read_layers(fields, sizes.num_layers), declare)


def _read_delta(fields: ConfigFields, sizes: LlamaSizes) -> DeltaSizes:
    """Read the sizes of Kimi Delta Attention, which published files have in `linear_attn_config`."""
    if isinstance(fields, GGUFHeader):
        heads, head_dim = sizes.num_heads, fields.integer("kda.head_dim")
        width = read_width(fields, "linear_conv_kernel_dim")
    else:
        heads, head_dim = fields.integer("linear_num_heads", 32), fields.integer("linear_head_dim", 128)
        width = read_width(fields, "linear_conv_kernel_dim", 4)
        if (own := fields.mapping("linear_attn_config")) is not None:
            heads, head_dim = own.integer("num_heads", heads), own.integer("head_dim", head_dim)
            width = read_width(own, "short_conv_kernel_size", width)
    return DeltaSizes(
        num_key_heads=heads,
        num_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        width=width,
        has_channel_decay=True,
        gate="sigmoid",
    )


def _read_layers(fields: ConfigFields, layers: int) -> list[bool]:
    """Read whether each layer has Kimi Delta Attention."""
    if isinstance(fields, GGUFHeader):
        return fields.layers_without_kv(layers)
    types, own = fields.get("layer_types"), fields.mapping("linear_attn_config")
    listed = {} if own is None else {key: own.get(key) for key in TYPE_LISTS}
    if own is not None and types is None and None not in listed.values():
        if wrong := next((key for key, numbers in listed.items() if not isinstance(numbers, list)), None):
            raise own.error(wrong, f"must be a list of numbers of layers, got {listed[wrong]!r:.80}")
        numbered = ((key, number) for key, numbers in listed.items() for number in numbers)
        found = {own.as_integer(key, number, high=layers): TYPE_LISTS[key] for key, number in numbered}
        return check_recurrent_layers(
            own, "kda_layers", [found.get(i + 1) for i in range(layers)], layers, DELTA_LAYERS
        )
    default = ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(layers)]
    return check_recurrent_layers(fields, "layer_types", types or default, layers, DELTA_LAYERS)


def _declare_delta(delta: DeltaSizes, sizes: LlamaSizes, index: int) -> RecurrenceSpec:
    prefix, values, rank = f"model.layers.{index}.self_attn", delta.out_features, delta.key_dim
    widths = {"q": values, "k": values, "v": values, "b": delta.num_heads, "f_a": rank, "g_a": rank}
    return delta.declare(
        prefix,
        sizes.hidden_size,
        NormSpec("rms_norm", f"{prefix}.o_norm", delta.value_dim, sizes.norm_eps),
        [(f"{name}_proj", width) for name, width in widths.items()],
        "o_proj",
        convolutions=[f"{name}_conv1d" for name in "qkv"],
        gates=[("f_b_proj", rank), ("g_b_proj", rank)],
    )


_NETWORKS: Final = {
    **{name: name for name in ("gate", *SHARED_EXPERT, *(f"shared_experts.{name}" for name in SHARED_EXPERT))},
    "experts.{}.gate_proj.weight": "experts.{}.w1.weight",
    "experts.{}.up_proj.weight": "experts.{}.w3.weight",
    "experts.{}.down_proj.weight": "experts.{}.w2.weight",
}
"""Declared names in `mlp` -> those in `block_sparse_moe`. transformers 5.24 saves dense networks there too."""

_READER: Final = KimiLinearConfigReader(
    "kimi_linear",
    reads_rope=False,
    has_recurrence=True,
    has_head_size=False,
    field_names=FIELD_NAMES,
    required={"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "tie_word_embeddings": False},
    ignored=("use_grouped_topk",),
    defaults={
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.446,
    },
)

KIMI_LINEAR: Final = Architecture(
    name="kimi_linear",
    hf_readers={"KimiLinearForCausalLM": _READER},
    gguf_readers={"kimi-linear": _READER},
    gguf_names={
        **DEEPSEEK_GGUF_NAMES,
        **names_in_layers(
            "self_attn",
            {
                **{f"{name}_proj": f"ssm_{name}" for name in ("f_a", "f_b", "g_a", "g_b")},
                **{f"{name}_conv1d": f"ssm_conv1d_{name}" for name in "qkv"},
                "b_proj": "ssm_beta",
                "o_norm": "ssm_norm",
                "A_log": "ssm_a",
                "dt_bias": "ssm_dt.bias",
            },
        ),
    },
    stacked_names={
        **DEEPSEEK.stacked_names,
        **renamed_in_layers({f"self_attn.f_{x}_proj": f"self_attn.forget_gate.f_{x}_proj" for x in "ab"}),
        **renamed_in_layers({f"mlp.{name}": f"block_sparse_moe.{other}" for name, other in _NETWORKS.items()}),
    },
)
