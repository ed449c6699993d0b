"""Llama with experts that are chosen by a softmax: Mixtral (Jiang et al., 2024), Qwen2-MoE and Qwen3-MoE (Yang et al.,
2024 and 2025), OLMoE (Muennighoff et al., 2024), ERNIE 4.5 (Baidu, 2025) and Mellum 2 (JetBrains, 2026).

Mixtral is Mistral with experts in every layer; its GGUF files are of the architecture llama. Qwen2-MoE and Qwen3-MoE
are Qwen2 and Qwen3 with experts in all layers, or in some of them, and Qwen2-MoE has a shared expert with a gate. OLMoE
has experts in every layer, and norms of query and key across heads. ERNIE 4.5 adds a bias to the softmax for the
choice, and has shared experts. Mellum 2 is Qwen3-MoE with windows in most layers, and YaRN in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows, qwen_windows, uniform_windows
from chairlift.models.reading.architecture import (
    PAIRED_QUERIES_AND_KEYS,
    Architecture,
    renamed_in_layers,
    stacked_experts,
)
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import (
    QWEN_NAMES,
    read_dense_layers,
    read_experts,
    read_first_dense_layers,
    read_softmax,
)
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import read_windows
from chairlift.models.reading.llama_sizes import ExpertNames, ExpertSizes, LlamaSizes

ERNIE_NAMES: Final = ExpertNames(selection_bias="mlp.gate.moe_statics.e_score_correction_bias")
MIXTRAL_NAMES: Final = ExpertNames(
    router="block_sparse_moe.gate",
    up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)


def _read_mixtral(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    return read_experts(fields, "chosen", sizes.intermediate_size, MIXTRAL_NAMES)


def _read_qwen2(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    fields.allow_only("qkv_bias", True, "query, key and value must have biases")
    size = fields.integer("shared_expert_intermediate_size")
    return replace(_read_qwen3(fields, sizes), names=QWEN_NAMES, shared_size=size)


def _read_qwen3(
    fields: ConfigFields, sizes: LlamaSizes, read_dense: Callable[..., frozenset[int]] = read_dense_layers
) -> ExpertSizes:
    experts = read_experts(fields, read_softmax(fields))
    return replace(experts, dense_layers=read_dense(fields, sizes.num_layers))


def _read_olmoe(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    fields.allow_only("clip_qkv", None, "query, key and value are not clipped")
    return read_experts(fields, read_softmax(fields), sizes.intermediate_size)


def _read_ernie(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    """Read the experts, which every n-th layer of a range has."""
    fields.allow_only("use_bias", False, "transformers has a bias in the LM head as well")
    experts = read_experts(fields, "chosen", names=ERNIE_NAMES)
    if isinstance(fields, GGUFHeader):
        # llama.cpp's converter computes it from the number of KV heads (conversion/ernie.py).
        fields.ignore("shared_expert_intermediate_size")
    first, interval = fields.integer("first_k_dense_replace", 0, low=0), fields.integer("moe_layer_interval", 1)
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    layers = range(sizes.num_layers)
    used = layers[first:] if last == -1 else layers[first : last + 1]
    return replace(
        experts,
        routing=replace(experts.routing, sum_min=fields.number("moe_norm_min", 1e-12)),
        dense_layers=frozenset(index for index in layers if index not in used or (index + 1) % interval),
        shared_size=experts.intermediate_size * fields.integer("n_shared_experts", 0, low=0),
    )


def _qwen3_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    fields.ignore("max_window_layers")  # transformers ignores it in this architecture.
    if not fields.flag("use_sliding_window", False):
        fields.ignore("sliding_window")  # Has no effect.
        return ()
    return (fields.integer("sliding_window"),) * layers


_MIXTRAL: Final = LlamaConfigReader(
    "mixtral", uniform_windows, qkv_bias=False, experts=_read_mixtral, default_theta=1e6
)
_QWEN2: Final = LlamaConfigReader(
    "qwen2moe",
    partial(qwen_windows, is_paired=True),
    qkv_bias=True,
    experts=_read_qwen2,
    defaults={"max_window_layers": 28},
    gguf_defaults={"norm_topk_prob": False},
)
_QWEN3: Final = LlamaConfigReader("qwen3moe", _qwen3_windows, qk_norm="heads", experts=_read_qwen3)
_OLMOE: Final = LlamaConfigReader("olmoe", qk_norm="rows", experts=_read_olmoe, gguf_defaults={"norm_topk_prob": False})

_ERNIE: Final = LlamaConfigReader(
    "ernie4_5_moe",
    qkv_bias=False,
    default_theta=500_000.0,
    experts=_read_ernie,
    field_names={
        "first_k_dense_replace": "moe_layer_start_index",
        "n_shared_experts": "moe_num_shared_experts",
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
    },
    defaults={"first_k_dense_replace": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    required={"moe_gate": "topk", "moe_use_aux_free": True, "use_rmsnorm": True},
    ignored=("moe_capacity",),
)
_MELLUM: Final = LlamaConfigReader(
    "mellum",
    partial(read_windows, pattern=4, default=1024, is_full=lambda layer, layers: True),
    qk_norm="heads",
    experts=partial(_read_qwen3, read_dense=read_first_dense_layers),
    layer_thetas=(10_000.0, 500_000.0),
    defaults={"head_dim": 128, "norm_topk_prob": True},
    required={"decoder_sparse_step": 1, "first_k_dense_replace": 0, "mlp_only_layers": [], "use_sliding_window": True},
    ignored=("mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers"),
)

MIXTRAL: Final = Architecture(
    name="mixtral",
    hf_readers={"MixtralForCausalLM": _MIXTRAL},
    stacked_names=stacked_experts(MIXTRAL_NAMES) | renamed_in_layers({"block_sparse_moe.gate": "mlp.gate"}),
)
QWEN2_MOE: Final = Architecture(
    name="qwen2-moe",
    hf_readers={"Qwen2MoeForCausalLM": _QWEN2},
    gguf_readers={"qwen2moe": replace(_QWEN2, windows=no_windows)},
    stacked_names=stacked_experts(),
)
QWEN3_MOE: Final = Architecture(
    name="qwen3-moe",
    hf_readers={"Qwen3MoeForCausalLM": _QWEN3},
    gguf_readers=dict.fromkeys(("qwen3moe", "qwen3vlmoe"), replace(_QWEN3, windows=uniform_windows)),
    stacked_names=stacked_experts(),
)
OLMOE: Final = Architecture(
    name="olmoe",
    hf_readers={"OlmoeForCausalLM": _OLMOE},
    gguf_readers={"olmoe": _OLMOE},
    stacked_names=stacked_experts(),
)
_BIAS: Final = f"model.layers.{{}}.{ERNIE_NAMES.selection_bias}"
ERNIE45_MOE: Final = Architecture(
    name="ernie4_5_moe",
    hf_readers={"Ernie4_5_MoeForCausalLM": _ERNIE},
    gguf_readers={"ernie4_5-moe": _ERNIE},
    gguf_names={**GGUF_NAMES, _BIAS: "blk.{}.exp_probs_b.bias"},
    gguf_interleaved=frozenset(("ernie4_5-moe",)),
    stacked_names={**PAIRED_QUERIES_AND_KEYS, **stacked_experts(), _BIAS: _BIAS.replace(".gate.", ".")},
    unread_prefixes=("model.mtp_",),
)
MELLUM: Final = Architecture(
    name="mellum",
    hf_readers={"MellumForCausalLM": _MELLUM},
    gguf_readers={"mellum": _MELLUM},
    stacked_names=stacked_experts(),
    unread_prefixes=("mtp.",),
)
