"""Readers of the sizes of mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from chairlift.kernels.routing import ExpertRouting, ExpertSoftmax
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields, shortened
from chairlift.models.reading.gguf_header import GGUFHeader
from chairlift.models.reading.llama_sizes import ExpertNames, ExpertSizes, LlamaSizes

NUM_EXPERTS: Final = ("num_experts", "num_local_experts")
"""The two names of the number of experts in `config.json`, which transformers treats as one."""

QWEN_NAMES: Final = ExpertNames(
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
"""The names in models of Qwen with a shared expert, which has a gate."""

SOFTMAX_GATING: Final = 1
SIGMOID_GATING: Final = 2
"""The values of `expert_gating_func` in GGUF files."""

SUM_EPS: Final = 1e-20
"""See ExpertRouting."""

BIASED_EXPERTS: Final = ExpertNames(selection_bias="mlp.gate.e_score_correction_bias")

OLDER_GROUPS: Final = {160: (8, 3), 256: (8, 4)}
"""Number of experts -> groups, and those with the experts of a token, of DeepSeek-V2 and V3: llama.cpp's converter has
written them to GGUF files since October 2025 only, and chooses from all experts in older files."""

TOPK_METHODS: Final = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}
"""`scoring_func` -> the values of `topk_method`, the default first."""


def read_experts(
    fields: ConfigFields,
    softmax: ExpertSoftmax,
    intermediate_size: Any = REQUIRED,
    names: ExpertNames | None = None,
    gating: int = SOFTMAX_GATING,
) -> ExpertSizes:
    """Read the experts of a model; every layer has them.

    Args:
        softmax: see ExpertRouting.
        intermediate_size: the inner size of one expert in GGUF files that do not contain it, and in every config.json.
        names: see ExpertSizes; None for its default, which all GGUF files have.
        gating: SOFTMAX_GATING or SIGMOID_GATING.
    """
    found = [key for key in NUM_EXPERTS if fields.get(key) is not None] or [NUM_EXPERTS[0]]
    count = fields.uniform(found[0])
    for other in found[1:]:
        fields.allow_only(other, count, f"{found[0]} is {count}")
    fields.allow_only("expert_gating_func", gating, f"the architecture requires {gating} (1: softmax, 2: sigmoid)")
    is_norm = softmax == "chosen"
    fields.allow_only("expert_weights_norm", is_norm, f"the architecture requires {is_norm}")
    chosen = fields.uniform("num_experts_per_tok", high=count)
    if intermediate_size is REQUIRED or isinstance(fields, GGUFHeader):
        inner = fields.integer("moe_intermediate_size", intermediate_size)
    else:
        inner = intermediate_size
        fields.allow_only("moe_intermediate_size", inner, f"the size of an expert is intermediate_size ({inner})")
    return ExpertSizes(count, inner, ExpertRouting(chosen, softmax), names=names or ExpertNames())


def read_softmax(fields: ConfigFields) -> ExpertSoftmax:
    """Read `norm_topk_prob`: whether the weights of the chosen experts of a token add up to 1."""
    return "chosen" if fields.flag("norm_topk_prob", False) else "all"


def read_dense_layers(fields: ConfigFields, layers: int) -> frozenset[int]:
    """Read the numbers of the layers without experts.

    Layers have experts if their number, counted from 1, is a multiple of `decoder_sparse_step`, and they are not in
    `mlp_only_layers`, whose numbers are counted from 0.
    """
    step = fields.integer("decoder_sparse_step", 1)
    listed = fields.get("mlp_only_layers", [])
    if not isinstance(listed, list):
        raise fields.error("mlp_only_layers", f"must be a list of layer numbers, got {listed!r}")
    for number in listed:
        fields.as_integer("mlp_only_layers", number, low=0, high=layers - 1)
    return frozenset(listed) | {index for index in range(layers) if (index + 1) % step}


def read_routed_experts(
    fields: ConfigFields, sizes: LlamaSizes, names: ExpertNames = BIASED_EXPERTS, *, has_sigmoid: bool = True
) -> ExpertSizes | None:
    """Read the routed and shared experts of DeepSeek, and of models with the same router; None in a file without them.

    Args:
        names: the names in safetensors files.
        has_sigmoid: whether experts are chosen as in DeepSeek-V3, by sigmoids and a bias, or as in V2 by a softmax.
    """
    inner: Any = REQUIRED
    has_bias, is_greedy = has_sigmoid, False
    if isinstance(fields, GGUFHeader):
        if fields.get("n_routed_experts", 0) == 0:
            fields.ignore("moe_intermediate_size", "n_shared_experts", "first_k_dense_replace")  # No effect.
            return None
        inner, names = sizes.intermediate_size, BIASED_EXPERTS
        has_sigmoid, has_bias = _read_gguf_gating(fields)
    else:
        is_greedy = _read_gating(fields, has_sigmoid=has_sigmoid)
    count = fields.integer("n_routed_experts")
    routing = read_routing(fields, count, has_sigmoid=has_sigmoid)
    inner = fields.integer("moe_intermediate_size", inner)
    shared = inner * fields.integer("n_shared_experts", 0, low=0)
    if isinstance(fields, GGUFHeader):
        shared = fields.integer("moe_shared_expert_intermediate_size", shared, low=0)
    return ExpertSizes(
        count,
        inner,
        routing if is_greedy else _with_groups(routing, fields, count),
        read_first_dense_layers(fields, sizes.num_layers),
        names if has_bias else replace(names, selection_bias=None),
        shared_size=shared,
    )


def read_routing(fields: ConfigFields, count: int, *, has_sigmoid: bool) -> ExpertRouting:
    """Read how the experts of a token are chosen from `count`, without groups."""
    return ExpertRouting(
        fields.integer("num_experts_per_tok", high=count),
        "chosen" if fields.flag("norm_topk_prob", has_sigmoid) else "all",
        has_sigmoid=has_sigmoid,
        sum_eps=SUM_EPS if has_sigmoid else 0.0,
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def _read_gating(fields: ConfigFields, *, has_sigmoid: bool) -> bool:
    """Check the fields of the router in a `config.json`, and return whether it ignores groups of experts."""
    scoring = "sigmoid" if has_sigmoid else "softmax"
    method = fields.choice("topk_method", TOPK_METHODS[scoring], TOPK_METHODS[scoring][0])
    fields.allow_only("scoring_func", scoring, f"topk_method {method} requires {scoring!r}")
    fields.allow_only("moe_layer_freq", 1, "all layers after the first ones must have experts")
    if not has_sigmoid:
        fields.allow_only("norm_topk_prob", False, "transformers ignores it in this architecture")
    if is_greedy := method == "greedy":
        fields.ignore("n_group", "topk_group")  # They have no effect.
    return is_greedy


def _read_gguf_gating(header: GGUFHeader) -> tuple[bool, bool]:
    """Return whether scores are sigmoids, and whether there is a bias, and set the groups of files without them."""
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in header.tensor_names)
    gating = header.get("expert_gating_func", SIGMOID_GATING if has_bias else SOFTMAX_GATING)
    if gating not in (SOFTMAX_GATING, SIGMOID_GATING):
        raise header.error("expert_gating_func", f"is {gating!r:.80}; supported: 1 (softmax) and 2 (sigmoid)")
    known = OLDER_GROUPS.get(header.get("n_routed_experts")) if header.name == "deepseek2" else None
    header.set_defaults(dict(zip(("n_group", "topk_group"), known or (1, 1), strict=True)))
    return gating == SIGMOID_GATING, has_bias


def _with_groups(routing: ExpertRouting, fields: ConfigFields, count: int) -> ExpertRouting:
    """Read the number of groups of experts, and how many of them have the experts of a token."""
    groups = fields.integer("n_group", high=count)
    used, chosen = fields.integer("topk_group", high=groups), routing.experts_per_token
    if count % groups or used * (count // groups) < chosen:
        raise fields.error(
            "n_group",
            f"({groups}) must divide {count} experts so that {used} groups ({fields.name_of('topk_group')}) hold "
            f"{chosen} of a token",
        )
    return replace(routing, num_groups=groups, groups_per_token=used)


def read_first_dense_layers(fields: ConfigFields, layers: int) -> frozenset[int]:
    """Read the numbers of the layers without experts: the first ones, unless `mlp_layer_types` has the type of each."""
    num_dense = fields.integer("first_k_dense_replace", 0, low=0, high=layers)
    types = fields.get("mlp_layer_types")
    if types is None:
        return frozenset(range(num_dense))
    if not isinstance(types, list) or len(types) != layers or not {"dense", "sparse"}.issuperset(types):
        raise fields.error("mlp_layer_types", f"must hold {layers} of dense and sparse, got {shortened(types)}")
    return frozenset(index for index, kind in enumerate(types) if kind == "dense")
