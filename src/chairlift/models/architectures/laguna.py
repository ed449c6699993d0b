"""Laguna (Poolside, 2026): `LlamaSizes` with a gate of attention by softplus, and experts beside a shared one.

Layers may differ in the number of query heads. Those with full attention have a separate rotary embedding, which may
rotate a part of each head. Experts are chosen by sigmoids with a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.architecture import Architecture, renamed_in_layers, stacked_experts
from chairlift.models.reading.config_fields import ConfigFields, shortened
from chairlift.models.reading.expert_fields import read_routed_experts
from chairlift.models.reading.gguf_header import GGUF_NAMES, SHARED_EXPERT, GGUFHeader
from chairlift.models.reading.layer_fields import read_head_dim, read_layer_windows
from chairlift.models.reading.llama_sizes import AttentionGate, ExpertSizes, LlamaSizes
from chairlift.models.reading.rope_fields import read_gguf_rope, read_type_ropes

DEFAULT_ROPES: Final[dict[str, dict[str, Any]]] = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
"""The rotary embeddings of files without rope_parameters."""

DEFAULTS: Final[dict[str, Any]] = {
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "n_routed_experts": 256,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 512,
    "topk_group": 1,
    "vocab_size": 100_352,
}
"""The values of fields that a `config.json` does not contain, as in transformers' `LagunaConfig`."""

GATES: Final = {True: True, "per-head": True, "per-element": False}
"""Value of `gating` -> whether all values of a head have the same gate."""

FULL_INTERVAL: Final = 4
"""In GGUF files: every n-th layer has full attention, from the first one on."""


class LagunaConfigReader(LlamaConfigReader):
    """The reader of Laguna."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        gate = AttentionGate("g_proj", activation="softplus", is_per_head=_is_per_head(fields, sizes))
        return replace(sizes, attention_gate=gate, ropes=_read_ropes(fields, sizes))

    def _read_heads(self, fields: ConfigFields, layers: int) -> Sequence[int]:
        key = "num_attention_heads_per_layer"
        if not isinstance(found := fields.get(key), list):
            return super()._read_heads(fields, layers)
        fields.ignore("num_attention_heads")  # No effect beside the numbers of layers.
        if len(found) != layers:
            raise fields.error(key, f"must hold {layers} numbers, got {shortened(found)}")
        return [fields.as_integer(key, each) for each in found]


def _is_per_head(fields: ConfigFields, sizes: LlamaSizes) -> bool:
    if isinstance(fields, GGUFHeader):
        return fields.num_rows("blk.0.attn_gate.weight") in (None, sizes.num_heads)
    # transformers reads any other value as "per-element".
    gating = fields.get("gating", True)
    if gating is not True and not (isinstance(gating, str) and gating in GATES):
        raise fields.error("gating", f"must be true, 'per-head' or 'per-element', got {gating!r}")
    kind = gating.replace("-", "_") if isinstance(gating, str) else "per_head"
    fields.allow_only("gating_types", [kind] * sizes.num_layers, "transformers ignores it: all layers follow gating")
    return GATES[gating]


def _read_ropes(fields: ConfigFields, sizes: LlamaSizes) -> Sequence[RopeConfig]:
    head_dims = [sizes.head_dim] * sizes.num_layers
    if not isinstance(fields, GGUFHeader):
        return read_type_ropes(fields, sizes.sliding_windows, head_dims, DEFAULT_ROPES, is_partial=True)
    whole, size = read_gguf_rope(fields, is_partial=True), read_head_dim(fields)
    rotated = fields.integer("rope.dimension_count_swa", size, high=size)
    local = RopeConfig(
        theta=fields.number("rope_local_base_freq", whole.theta), rotary_dim=None if rotated == size else rotated
    )
    return [whole if window is None else local for window in sizes.sliding_windows]


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    window, types = fields.window(512), fields.get("layer_types")
    if isinstance(fields, GGUFHeader):
        interval = fields.integer("sliding_window_pattern", FULL_INTERVAL)
        return [window if index % interval else None for index in range(layers)]
    return read_layer_windows(fields, types or ["full_attention"] * layers, layers, window)


def _read_experts(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes | None:
    if (experts := read_routed_experts(fields, sizes)) is None:
        return None
    fields.allow_only("mlp_only_layers", sorted(experts.dense_layers), "mlp_layer_types or its default has others")
    return replace(experts, shared_size=fields.integer("shared_expert_intermediate_size"))


_READER: Final = LagunaConfigReader(
    "laguna",
    _windows,
    qk_norm="heads",
    reads_rope=False,
    experts=_read_experts,
    field_names={"n_routed_experts": "num_experts", "routed_scaling_factor": "moe_routed_scaling_factor"},
    defaults=DEFAULTS,
    required={
        "decoder_sparse_step": 1,
        "moe_apply_router_weight_on_input": False,
        "moe_router_logit_softcapping": 0.0,
        "norm_topk_prob": True,
        "qkv_bias": False,
        "swa_attention_sink_enabled": False,
    },
    ignored=("partial_rotary_factor",),  # The types of layers have their own.
)

LAGUNA: Final = Architecture(
    name="laguna",
    hf_readers={"LagunaForCausalLM": _READER},
    gguf_readers={"laguna": _READER},
    gguf_names={**GGUF_NAMES, "model.layers.{}.self_attn.g_proj": "blk.{}.attn_gate"},
    stacked_names=stacked_experts()
    | renamed_in_layers({f"mlp.shared_experts.{name}": f"mlp.shared_expert.{name}" for name in SHARED_EXPERT})
    | renamed_in_layers({"mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias"}),
)
