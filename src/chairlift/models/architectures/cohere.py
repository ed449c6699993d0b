"""Command R, R7B and A, and Aya (Cohere, 2024 to 2026): Llama with parallel branches after one LayerNorm.

The two dimensions of a rotated pair are in adjacent rows. Command R7B and A (`Cohere2ForCausalLM`) have windows in
three of four layers, and no rotary embedding in the others. Command R+, with norms of query and key heads, is not read.

Command A+ and North Mini Code (`Cohere2MoeForCausalLM`) have experts in all layers but the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.reading.architecture import PAIRED_QUERIES_AND_KEYS, Architecture, stacked_experts
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import SIGMOID_GATING, SOFTMAX_GATING, read_experts, read_first_dense_layers
from chairlift.models.reading.gguf_header import GGUFHeader
from chairlift.models.reading.layer_fields import read_windows
from chairlift.models.reading.llama_sizes import ExpertSizes, LlamaSizes, NormNames

FIXED: Final[dict[str, Any]] = {
    "use_qk_norm": False,
    "use_parallel_block": True,
    "use_gated_activation": True,
    "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}
"""The only supported values of these fields."""

GATINGS: Final = {"softmax": SOFTMAX_GATING, "sigmoid": SIGMOID_GATING}
"""`expert_selection_fn` -> `expert_gating_func` in GGUF files."""

PREFIX_PATTERN: Final = "prefix_dense_sliding_window_pattern"


class CohereConfigReader(LlamaConfigReader):
    """The reader of one model type."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        return replace(
            super().read_sizes(fields),
            norms=NormNames(before_mlp="input_layernorm"),
            norm_kind="layer_norm",
            is_parallel=True,
            logits_multiplier=fields.number("logit_scale", 0.0625),
        )


class Cohere2MoeConfigReader(CohereConfigReader):
    """The reader of models with experts."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        """Read the sizes. Norms are RMSNorm in files with its epsilon, and layers without experts may be rotated."""
        fields.set_defaults({self.inner_key: fields.get("intermediate_size")})
        sizes = super().read_sizes(fields)
        assert sizes.experts is not None, "models of this class have experts"
        if fields.integer(PREFIX_PATTERN, 1) == 1:
            dense = sizes.experts.dense_layers
            ropes = [sizes.rope if index in dense else rope for index, rope in enumerate(sizes.ropes)]
            sizes = replace(sizes, ropes=ropes)
        if fields.get("rms_norm_eps") is None:
            return sizes
        return replace(sizes, norm_kind="rms_norm", norm_eps=fields.number("rms_norm_eps", high=1.0))


def _read_experts(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    if isinstance(fields, GGUFHeader):
        gating = fields.get("expert_gating_func", SIGMOID_GATING)
    else:
        gating = GATINGS[fields.choice("expert_selection_fn", GATINGS, "softmax")]
    has_sigmoid = gating == SIGMOID_GATING
    adds_up = fields.flag("norm_topk_prob", True) or not has_sigmoid
    experts = read_experts(fields, "chosen" if adds_up else "all", gating=gating)
    shared = experts.intermediate_size * fields.integer("n_shared_experts", 0, low=0)
    if isinstance(fields, GGUFHeader):
        fields.allow_only("shared_expert_intermediate_size", shared, f"the shared experts have the size {shared}")
    combination = fields.choice("shared_expert_combination_strategy", ("average", "sum"), "average")
    return replace(
        experts,
        routing=replace(experts.routing, has_sigmoid=has_sigmoid),
        dense_layers=read_first_dense_layers(fields, sizes.num_layers),
        shared_size=shared,
        sum_multiplier=0.5 if combination == "average" else 1.0,
    )


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    if fields.window(4096) is None:
        raise fields.error("sliding_window", "is missing or 0; layers with a rotary embedding must have a window")
    return read_windows(fields, layers, pattern=4, default=4096)


def _moe_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    """Read the windows, in whose patterns the first layers, without experts, do not count."""
    if not isinstance(fields, GGUFHeader):
        first = fields.integer("first_k_dense_replace", 0, low=0, high=layers)
        parts = (
            (fields.integer(PREFIX_PATTERN, 1), first),
            (fields.integer("sliding_window_pattern", 4), layers - first),
        )
        kinds = ["sliding_attention" if (i + 1) % n else "full_attention" for n, count in parts for i in range(count)]
        fields.set_defaults({"layer_types": kinds})
    return _windows(fields, layers)


_READER: Final = CohereConfigReader(
    "cohere",
    rotates_windows_only=True,
    eps_key="layer_norm_eps",
    default_theta=500_000.0,
    defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    required=FIXED,
    ignored=("layer_switch", "use_embedding_sharing", "use_parallel_embedding"),
)

_READER2: Final = replace(_READER, name="cohere2", windows=_windows, default_theta=10_000.0)
_MOE_READER: Final = Cohere2MoeConfigReader(
    "cohere2_moe",
    _moe_windows,
    rotates_windows_only=True,
    experts=_read_experts,
    inner_key="prefix_dense_intermediate_size",
    eps_key="layer_norm_eps",
    field_names={"moe_intermediate_size": "intermediate_size", "n_shared_experts": "num_shared_experts"},
    defaults={**_READER.defaults, "head_dim": 128},
    gguf_defaults={"layer_norm_eps": 1e-5},
    required=FIXED,
    ignored=_READER.ignored,
)

COHERE: Final = Architecture(
    name="cohere",
    hf_readers={"CohereForCausalLM": _READER, "Cohere2ForCausalLM": _READER2, "Cohere2MoeForCausalLM": _MOE_READER},
    gguf_readers={"command-r": _READER, "cohere2": _READER2, "cohere2moe": _MOE_READER},
    gguf_interleaved=frozenset(("command-r", "cohere2", "cohere2moe")),
    stacked_names={**PAIRED_QUERIES_AND_KEYS, **stacked_experts()},
)
