"""Readers of the sizes of mixtures of experts."""

from __future__ import annotations

from typing import Any, Final

from chairlift.kernels.routing import ExpertRouting, ExpertSoftmax
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields, shortened
from chairlift.models.reading.gguf_header import GGUF_NAMES, SHARED_EXPERT, GGUFHeader, names_in_layers
from chairlift.models.reading.llama_sizes import ExpertNames, ExpertSizes

NUM_EXPERTS: Final = ("num_experts", "num_local_experts")
"""The two names of the number of experts in `config.json`, which transformers treats as one."""

QWEN_NAMES: Final = ExpertNames(
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
"""The names in models of Qwen with a shared expert, which has a gate."""

QWEN_GGUF_NAMES: Final = {
    **GGUF_NAMES,
    **names_in_layers("mlp.shared_expert", SHARED_EXPERT),
    "model.layers.{}.mlp.shared_expert_gate": "blk.{}.ffn_gate_inp_shexp",
}
"""The `gguf_names` of these models."""

SOFTMAX_GATING: Final = 1
SIGMOID_GATING: Final = 2
"""The values of `expert_gating_func` in GGUF files."""


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


def read_first_dense_layers(fields: ConfigFields, layers: int) -> frozenset[int]:
    """Read the numbers of the layers without experts: the first ones, unless `mlp_layer_types` has the type of each."""
    num_dense = fields.integer("first_k_dense_replace", 0, low=0, high=layers)
    types = fields.get("mlp_layer_types")
    if types is None:
        return frozenset(range(num_dense))
    if not isinstance(types, list) or len(types) != layers or not {"dense", "sparse"}.issuperset(types):
        raise fields.error("mlp_layer_types", f"must hold {layers} of dense and sparse, got {shortened(types)}")
    return frozenset(index for index, kind in enumerate(types) if kind == "dense")
